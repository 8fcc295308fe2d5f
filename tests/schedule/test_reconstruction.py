"""The work that each residency leaves, against the table of docs/scheduling.md."""

from __future__ import annotations

import pytest

from zipmoe import _native

TABLE = {  # state: kinds of operation before the execution
    0: [],
    1: ["decompress", "recombine"],
    2: ["E", "decompress", "recombine"],
    3: ["SM", "decompress", "recombine"],
    4: ["E", "SM", "decompress", "recombine"],
}


@pytest.mark.parametrize("state", TABLE)
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_operations_of_a_state(state: int, shards: int) -> None:
    dag = _native.reconstruction_dag(state, shards)
    kinds = [kind for kind, _, _ in dag]
    expected = [kind for kind in TABLE[state] for _ in range(shards if kind in ("E", "decompress") else 1)]
    assert sorted(kinds) == sorted([*expected, "execute"])
    assert kinds[-1] == "execute"
    for position, (kind, shard, predecessors) in enumerate(dag):
        assert all(predecessor < position for predecessor in predecessors)
        before = [dag[predecessor][:2] for predecessor in predecessors]
        if kind == "decompress":
            assert before == ([("E", shard)] if "E" in TABLE[state] else [])
        elif kind == "recombine":
            reads = [("SM", 0)] if "SM" in TABLE[state] else []
            assert sorted(before) == sorted([("decompress", k) for k in range(shards)] + reads)
        elif kind == "execute":
            assert before == ([("recombine", 0)] if TABLE[state] else [])
        else:
            assert before == []


def test_operations_of_a_fused_codec() -> None:
    assert _native.reconstruction_dag(0, 0) == [("execute", 0, [])]
    assert _native.reconstruction_dag(1, 0) == [("execute", 0, [])]
    assert _native.reconstruction_dag(4, 0) == [("packed", 0, []), ("execute", 0, [0])]
    for state in (2, 3):
        with pytest.raises(ValueError, match="no chunks that could be held apart"):
            _native.reconstruction_dag(state, 0)


@pytest.mark.parametrize("state", [-1, 5, 255])
def test_other_states_do_not_exist(state: int) -> None:
    with pytest.raises(ValueError, match="a state is 0"):
        _native.reconstruction_dag(state, 1)
