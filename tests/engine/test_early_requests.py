"""A request that begins early is taken over by its like, and given up without a trace by everything else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_native import Interrupted
from packed_model import EMBEDDING, EXPERTS, GROUPS, PARAMETERS, PROJECTION, PackedModel, build

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.engine import Engine
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.errors import CorruptRecordError, UnsupportedOperationError

NETWORK = _native.ExpertNetwork(0, 1, _native.GatedActivation("silu", "halves"))
COUNTS = ("hits", "misses", "requests", "evictions", "reads")


@pytest.fixture(params=["one pool", "pools"])
def served(request: pytest.FixtureRequest, model: PackedModel) -> Iterator[Engine]:
    """Three experts at a time, on either of the two kinds of pools; computes on packed weights."""
    if request.param == "one pool":
        with model.engine(3, fused=True) as opened:
            yield opened
        return
    budget = model.budget(3, spare=64 << 20)
    with Engine(model.folder, budget, decode_threads=2, pools=PoolSlots(1, 2), fused=True) as opened:
        yield opened


def run(engine: Engine, model: PackedModel, group: int, experts: list[int], **options: Any) -> list[int]:
    """One request that checks every matrix; returns the order of handing out."""
    handle, order = engine.group(GROUPS[group]), []
    with engine.request(handle, experts, **options) as request:
        for expert in request:
            order.append(expert)
            for name in PARAMETERS:
                assert torch.equal(engine.matrix(handle, expert, name), model.experts[GROUPS[group], expert, name])
    return order


def counts(engine: Engine) -> list[int]:
    counters = engine._native.counters()
    return [counters[name] for name in COUNTS]


def compute(engine: Engine, experts: list[int]) -> torch.Tensor:
    assert engine.fused is not None
    x = (torch.randn(len(experts), 64, generator=torch.Generator().manual_seed(5)) * 0.5).bfloat16()
    return engine.fused.experts(engine.group(GROUPS[0]), experts, [1] * len(experts), NETWORK, x)


def begin(engine: Engine, experts: list[int], **options: Any) -> bool:
    return engine.early.begin(engine.group(GROUPS[0]), experts, **options)


def test_the_same_request_takes_it_over(served: Engine, model: PackedModel) -> None:
    before = counts(served)
    for options in ({}, {"ascending": True}, {"tokens": [2, 1, 4, 1, 1]}):
        assert begin(served, [5, 1, 7, 0, 3], **options)
        assert sorted(run(served, model, 0, [5, 1, 7, 0, 3], **options)) == [0, 1, 3, 5, 7]
    after = dict(zip(COUNTS, (new - old for new, old in zip(counts(served), before, strict=True)), strict=True))
    assert after["requests"] == 3
    assert after["hits"] + after["misses"] == 15


def test_counts_are_those_of_a_request_that_begins_late(model: PackedModel) -> None:
    found = []
    for early in (True, False):
        with model.engine(8, fused=True) as engine:
            for experts in ([0, 1, 2], [1, 3], [7, 1, 0, 2], [1], [6, 4]):
                if early:
                    assert begin(engine, experts)
                run(engine, model, 0, experts)
                if early:
                    assert begin(engine, experts, tokens=[1] * len(experts))
                compute(engine, experts)
            found.append(counts(engine))
    assert found[0] == found[1]


def test_fused_computing_takes_it_over(served: Engine, model: PackedModel) -> None:
    seen = []
    served.request_observer = lambda path, experts: seen.append((path, list(experts)))
    expected = compute(served, [4, 2, 6, 1])
    run(served, model, 1, [0, 1, 2, 3])
    requests = counts(served)[2]
    assert begin(served, [4, 2, 6, 1], tokens=[1, 1, 1, 1])
    assert torch.equal(compute(served, [4, 2, 6, 1]), expected)
    assert counts(served)[2] == requests + 1
    assert seen == [(GROUPS[0], [4, 2, 6, 1]), (GROUPS[1], [0, 1, 2, 3]), (GROUPS[0], [4, 2, 6, 1])]


@pytest.mark.parametrize("later", [{"group": 1}, {"experts": [1, 0, 2]}, {"ascending": True}, {"tokens": [1, 1, 2]}])
def test_another_request_gives_it_up(served: Engine, model: PackedModel, later: dict[str, Any]) -> None:
    options = {"group": 0, "experts": [0, 1, 2]} | later
    before = counts(served)
    assert begin(served, [0, 1, 2])
    assert sorted(run(served, model, **options)) == [0, 1, 2]
    hits, misses, requests = (new - old for new, old in list(zip(counts(served), before, strict=True))[:3])
    assert hits + misses == 3
    assert requests == 1


def test_it_is_given_up_by_one_that_begins_early(served: Engine, model: PackedModel) -> None:
    before = counts(served)
    for experts in ([0, 1, 2], [3, 4, 5], [3, 4, 5], []):
        assert begin(served, experts)
    assert run(served, model, 0, []) == []
    assert counts(served)[2] == before[2] + 1
    assert counts(served)[:2] == before[:2]


def test_dense_matrices_are_used_while_it_is_open(served: Engine, model: PackedModel) -> None:
    assert served.fused is not None
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = served.fused.linear(PROJECTION, x, None)
    rows = torch.tensor([99, 0, 59, 60])
    for _ in range(2):
        run(served, model, 1, [0, 1, 2, 3, 4])
        before = counts(served)
        assert begin(served, [6, 7, 5])
        assert torch.equal(served.fused.linear(PROJECTION, x, None), expected)
        assert torch.equal(served.dense_matrix(PROJECTION), model.dense[PROJECTION])
        assert torch.equal(served.dense_rows(EMBEDDING, rows), model.dense[EMBEDDING][rows])
        for first, last, tile in served.dense_tiles(EMBEDDING):
            assert torch.equal(tile, model.dense[EMBEDDING][first:last])
        assert sorted(run(served, model, 0, [6, 7, 5])) == [5, 6, 7]
        assert counts(served)[2] == before[2] + 1


def test_rows_on_demand_are_read_while_it_is_open(tmp_path: Path) -> None:
    model = build(tmp_path / "wide", embedding_shape=(60000, 256))
    with model.engine(2, rows_on_demand=[EMBEDDING]) as engine:
        rows = torch.arange(0, 60000, 997)
        assert begin(engine, [0, 1, 2, 3, 4])
        assert torch.equal(engine.dense_rows(EMBEDDING, rows), model.dense[EMBEDDING][rows])
        assert sorted(run(engine, model, 0, [0, 1, 2, 3, 4])) == [0, 1, 2, 3, 4]


def test_a_single_matrix_gives_it_up(served: Engine, model: PackedModel) -> None:
    handle = served.group(GROUPS[0])
    assert begin(served, [0, 1, 2])
    assert torch.equal(served.expert_matrix(handle, 6, "down_proj"), model.experts[GROUPS[0], 6, "down_proj"])
    assert sorted(run(served, model, 0, [0, 1, 2])) == [0, 1, 2]


def test_the_pool_changes_its_size(served: Engine, model: PackedModel) -> None:
    free = served._spare_bytes()
    for taken in (free, 0):
        assert begin(served, [0, 1, 2])
        served.account("key-value cache", taken)
        assert sorted(run(served, model, 0, [0, 1, 2])) == [0, 1, 2]


def test_not_inside_of_a_request(served: Engine) -> None:
    with served.request(served.group(GROUPS[0]), [0, 1]) as request:
        assert not begin(served, [2, 3])
        assert sorted(request) == [0, 1]


def test_another_thread_may_take_it_over_or_give_it_up(served: Engine, model: PackedModel) -> None:
    with ThreadPoolExecutor(1) as another:
        for experts in ([0, 1, 2], [5, 6]):
            assert begin(served, [0, 1, 2])
            assert sorted(another.submit(run, served, model, 0, experts).result(timeout=60)) == experts
            assert sorted(run(served, model, 0, [0, 1, 2])) == [0, 1, 2]


def test_closing_gives_it_up(served: Engine, model: PackedModel) -> None:
    assert begin(served, [0, 1, 2, 3, 4])
    served.close()
    assert counts(served)[:3] == [0, 0, 0]
    for use in (lambda: begin(served, [0]), lambda: run(served, model, 0, [0]), lambda: compute(served, [0])):
        with pytest.raises(UnsupportedOperationError, match="closed"):
            use()


def test_an_expert_that_is_named_twice(served: Engine, model: PackedModel) -> None:
    with pytest.raises(ValueError, match="each expert once"):
        begin(served, [0, 0])
    assert sorted(run(served, model, 0, [2, 0, 1])) == [0, 1, 2]


def test_too_few_rows_for_what_began_early(served: Engine, model: PackedModel) -> None:
    assert served.fused is not None
    assert begin(served, [0, 1], tokens=[1, 2])
    with pytest.raises(ValueError, match="one row for every token"):
        served.fused.experts(served.group(GROUPS[0]), [0, 1], [1, 2], NETWORK, torch.zeros(2, 64, dtype=torch.bfloat16))
    assert sorted(run(served, model, 0, [2, 0, 1])) == [0, 1, 2]


@pytest.mark.parametrize("ahead", [0, 2])
def test_pools_of_parts(tmp_path: Path, ahead: int) -> None:
    """Exponents are decompressed by other threads while dense matrices are decoded."""
    model = build(tmp_path / "parts", CodecSettings("zstd", 3, 2))
    settings = PoolSettings(PoolSlots(1, 1, 1, 1), decompress_ahead=ahead)
    with Engine(model.folder, model.budget(3, spare=64 << 20), decode_threads=2, pools=settings) as engine:
        for step in range(12):
            experts = list({step % 8, (3 * step + 1) % 8, (5 * step + 2) % 8})
            assert begin(engine, [(experts[0] + 1) % 8] if step % 3 == 0 else experts)
            assert torch.equal(engine.dense_matrix(PROJECTION), model.dense[PROJECTION])
            assert sorted(run(engine, model, 0, experts)) == sorted(experts)


@pytest.mark.parametrize("separable", [False, True])
def test_damage_is_reported_by_the_request(tmp_path: Path, separable: bool) -> None:
    codec = CodecSettings("zstd", 3, 2) if separable else CodecSettings("fx3", None, 1)
    model = build(tmp_path / "damaged", codec)
    model.flip(model.record(0, 5), model.record(0, 5).length // 2)
    with model.engine(3, fused=True) as engine:
        for _ in range(2):
            assert begin(engine, [4, 5, 6])
            with pytest.raises(CorruptRecordError, match=model.record(0, 5).name):
                run(engine, model, 0, [4, 5, 6])
            assert begin(engine, [4, 5, 6])  # and given up
            healthy = [expert for expert in range(EXPERTS) if expert != 5]
            assert sorted(run(engine, model, 0, healthy)) == healthy
        if engine.fused is not None:
            assert begin(engine, [4, 5, 6], tokens=[1, 1, 1])
            with pytest.raises(CorruptRecordError, match=model.record(0, 5).name):
                compute(engine, [4, 5, 6])
            assert compute(engine, [4, 6]).shape == (2, 64)


@pytest.mark.parametrize("call", ["begin_request", "abandon_request", "feed_forward_request", "next_expert"])
def test_the_engine_survives_control_c(
    served: Engine, model: PackedModel, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def use() -> None:
        begin(served, [0, 1, 2])
        run(served, model, 0, [3, 4])
        begin(served, [0, 1, 2], tokens=[1, 1, 1])
        compute(served, [0, 1, 2])

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(served, "_native", Interrupted(served._native, call))
        use()
    use()
    with ThreadPoolExecutor(1) as other_thread:
        other_thread.submit(use).result(timeout=60)


def native_rows(experts: int) -> Any:
    return torch.ones(experts, 64, dtype=torch.bfloat16).view(torch.uint16).numpy()


@pytest.mark.parametrize("computed", [[0], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [1, 0, 2], [0, 1, 3]], ids=str)
def test_other_experts_than_have_begun_are_not_computed(
    served: Engine, model: PackedModel, computed: list[int]
) -> None:
    records = served.group(GROUPS[0]).records
    wanted, count = [records[expert] for expert in computed], len(computed)
    served._native.begin_request([records[expert] for expert in (0, 1, 2)], False, [1, 1, 1])
    for _ in range(2):  # the second time none is open
        with pytest.raises(ValueError, match="no request for these experts is open"):
            served._native.feed_forward_request(
                wanted, [1] * count, NETWORK, native_rows(count), native_rows(count), True
            )
    assert sorted(run(served, model, 0, [0, 1, 2])) == [0, 1, 2]


def test_a_request_that_has_handed_an_expert_out_is_not_computed(served: Engine, model: PackedModel) -> None:
    records = [served.group(GROUPS[0]).records[expert] for expert in (0, 1, 2)]
    served._native.begin_request(records, False, [1, 1, 1])
    served._native.next_expert()
    with pytest.raises(ValueError, match="from which nobody was handed out"):
        served._native.feed_forward_request(records, [1, 1, 1], NETWORK, native_rows(3), native_rows(3), True)
    assert sorted(run(served, model, 0, [0, 1, 2])) == [0, 1, 2]
