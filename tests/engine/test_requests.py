"""Experts come out bit for bit, in the promised order, each read at most once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from interrupted_native import Interrupted
from packed_model import EXPERTS, GROUPS, PARAMETERS, PackedModel, build

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.engine import Engine
from zipmoe.errors import InvalidArgumentError, UnsupportedOperationError

CODECS = [CodecSettings("fx3", None, 1), CodecSettings("zstd", 3, 3), CodecSettings("lz4", None, 2)]


def run(engine: Engine, model: PackedModel, group: int, experts: list[int], *, ascending: bool = False) -> list[int]:
    """One request that checks every matrix; returns the order of handing out."""
    handle = engine.group(GROUPS[group])
    order = []
    with engine.request(handle, experts, ascending=ascending) as request:
        for expert in request:
            order.append(expert)
            decoded = [engine.matrix(handle, expert, name) for name in PARAMETERS]
            for name, matrix in zip(PARAMETERS, decoded, strict=True):
                assert matrix.dtype == torch.bfloat16
                assert matrix.data_ptr() % 64 == 0
                assert torch.equal(matrix, model.experts[GROUPS[group], expert, name])
    return order


def resident(engine: Engine, group: int) -> set[int]:
    records = engine.group(GROUPS[group]).records
    return {expert for expert, record in enumerate(records) if engine._native.resident(record)}


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_every_expert_of_every_layer_equals_the_original(tmp_path: Path, codec: CodecSettings) -> None:
    if next(c for c in _native.codecs() if c.name == codec.name).unavailable_reason:
        pytest.skip(f"{codec.name} is not built in")
    model = build(tmp_path, codec)
    for instruction_set in _native.instruction_sets():
        with model.engine(3, instruction_set=instruction_set) as engine:
            for group in (0, 1):
                assert sorted(run(engine, model, group, list(range(EXPERTS)))) == list(range(EXPERTS))


def test_hits_come_first_then_misses_and_the_least_recently_used_goes(engine: Engine, model: PackedModel) -> None:
    assert sorted(run(engine, model, 0, [6, 1, 4])) == [1, 4, 6]
    assert run(engine, model, 0, [4]) == [4]
    assert run(engine, model, 0, [6]) == [6]  # from old to new: 1, 4, 6, and one slot is free
    order = run(engine, model, 0, [7, 6, 0, 4])
    assert order[:2] == [6, 4]
    assert sorted(order[2:]) == [0, 7]
    assert resident(engine, 0) == {0, 4, 6, 7}
    counters = engine.statistics.counters()
    assert (counters.hits, counters.misses, counters.evictions) == (4, 5, 1)


def test_layers_share_the_pool(engine: Engine, model: PackedModel) -> None:
    run(engine, model, 0, [0, 1, 2])
    run(engine, model, 1, [0, 1])
    assert resident(engine, 1) == {0, 1}
    assert len(resident(engine, 0)) == 2
    assert engine.statistics.counters().hits == 0


@pytest.mark.parametrize("slots", [2, 3, 5])
@pytest.mark.parametrize("ascending", [False, True])
def test_more_experts_than_slots(model: PackedModel, slots: int, ascending: bool) -> None:
    with model.engine(slots) as engine:
        run(engine, model, 0, [7, 6, 5])
        before = engine.statistics.counters()
        order = run(engine, model, 0, [7, 2, 0, 5, 1, 6, 3, 4], ascending=ascending)
        assert sorted(order) == list(range(EXPERTS))
        if ascending:
            assert order == list(range(EXPERTS))
        after = engine.statistics.counters().since(before)
        assert after.hits + after.misses == EXPERTS
        assert after.reads == after.misses <= EXPERTS
        if not ascending:
            assert after.hits == min(slots, 3)


def test_hits_that_hold_every_slot_give_way_in_an_ascending_request(model: PackedModel) -> None:
    with model.engine(2) as engine:
        run(engine, model, 0, [6, 7])
        before = engine.statistics.counters()
        assert run(engine, model, 0, [7, 0, 6, 1], ascending=True) == [0, 1, 6, 7]
        assert engine.statistics.counters().since(before).reads <= 4


def test_repeated_ids_count_once_and_an_empty_request_is_empty(engine: Engine, model: PackedModel) -> None:
    assert sorted(run(engine, model, 0, [3, 3, 1, 3])) == [1, 3]
    assert engine.statistics.counters().misses == 2
    assert run(engine, model, 0, []) == []


def test_a_request_may_be_left_early(engine: Engine, model: PackedModel) -> None:
    handle = engine.group(GROUPS[0])
    with engine.request(handle, [0, 1, 2, 3, 4, 5]) as request:
        next(iter(request))
    with pytest.raises(KeyError), engine.request(handle, [4, 5, 6]) as request:
        for _ in request:
            raise KeyError("the caller fails")
    assert sorted(run(engine, model, 0, list(range(EXPERTS)))) == list(range(EXPERTS))


def test_expert_matrix_fetches_alone_and_is_fresh(engine: Engine, model: PackedModel) -> None:
    handle = engine.group(GROUPS[1])
    first = engine.expert_matrix(handle, 2, "down_proj")
    second = engine.expert_matrix(handle, 3, "down_proj")
    assert torch.equal(first, model.experts[GROUPS[1], 2, "down_proj"])
    assert torch.equal(second, model.experts[GROUPS[1], 3, "down_proj"])
    assert first.data_ptr() % 64 == 0
    with engine.request(handle, [3]) as request:
        for expert in request:
            assert torch.equal(engine.expert_matrix(handle, expert, "down_proj"), second)
            with pytest.raises(UnsupportedOperationError, match="expert 2 of"):
                engine.expert_matrix(handle, 2, "down_proj")


def test_misuse_is_refused_with_a_reason(engine: Engine) -> None:
    handle = engine.group(GROUPS[0])
    with pytest.raises(InvalidArgumentError, match=r"no experts are packed under 'model\.layers\.9'"):
        engine.group("model.layers.9")
    with pytest.raises(InvalidArgumentError, match="experts 0 to 7, not 8"):
        engine.request(handle, [0, 8])
    with pytest.raises(InvalidArgumentError, match="no packed parameter 'up_proj'"):
        engine.matrix(handle, 0, "up_proj")
    with pytest.raises(UnsupportedOperationError, match="inside its with block"):
        next(iter(engine.request(handle, [0])))
    with pytest.raises(UnsupportedOperationError, match="handed out last"):
        engine.matrix(handle, 0, "down_proj")
    with engine.request(handle, [0, 1], ascending=True) as request:
        assert next(request) == 0
        with pytest.raises(UnsupportedOperationError, match="has a request open already"), engine.request(handle, [1]):
            pass
        with pytest.raises(UnsupportedOperationError, match="handed out last"):
            engine.matrix(handle, 1, "down_proj")
        assert next(request) == 1
        with pytest.raises(UnsupportedOperationError, match="handed out last"):
            engine.matrix(handle, 0, "down_proj")


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_results_do_not_depend_on_the_number_of_threads(tmp_path: Path, threads: int) -> None:
    model = build(tmp_path, CodecSettings("fx3", None, 1), second_layer_scale=30)
    with model.engine(2, decode_threads=threads, io_threads=threads) as engine:
        run(engine, model, 1, [0, 5, 7])


@pytest.mark.parametrize("call", ["begin_request", "next_expert", "end_request"])
def test_the_engine_survives_control_c_at_any_moment_of_a_request(
    engine: Engine, model: PackedModel, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "_native", Interrupted(engine._native, call))
        run(engine, model, 0, [0, 1, 2])
    with ThreadPoolExecutor(1) as other_thread:
        assert sorted(other_thread.submit(run, engine, model, 0, [0, 1, 2]).result(timeout=60)) == [0, 1, 2]
