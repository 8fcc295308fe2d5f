"""Pools F, C, S and E: what is read for whom, what they take of the budget, and that weights come out bit for bit."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed_model import EXPERTS, GROUPS, PARAMETERS, SHAPES, PackedModel, build

from zipmoe import _native
from zipmoe.engine.budget import EXPERT_POOL, PROCESS, MemoryBudget
from zipmoe.engine.engine import Engine
from zipmoe.engine.pool_memory_plan import (
    HUGE_PAGE_BYTES,
    READABLE_TAIL_BYTES,
    PoolMemoryPlan,
    exponent_bytes,
    full_bytes,
    part_bytes,
)
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.errors import BudgetExceededError, BudgetTooSmallError, CorruptRecordError, InvalidArgumentError
from zipmoe.store.manifest import CodecSettings

SEPARABLE = next(c.name for c in _native.codecs() if c.separable and not c.unavailable_reason)
PLANAR = CodecSettings(SEPARABLE, {"zstd": 3, "lz4hc": 9}.get(SEPARABLE), 3)
FIXED = {PROCESS: 100_000_000, "workspace": 50_000_000}


@pytest.fixture
def planar(tmp_path: Path) -> PackedModel:
    return build(tmp_path, PLANAR)


def pool_plan(model: PackedModel, settings: PoolSettings) -> PoolMemoryPlan:
    separable = model.folder.manifest.codec.name != "fx3"
    return PoolMemoryPlan.of(model.folder.manifest.expert_groups, settings, separable=separable)


def budget_of(model: PackedModel, settings: PoolSettings, spare: int = 0) -> MemoryBudget:
    """Exactly what the pools need, and ``spare`` bytes."""
    plan = model.plan()
    total = sum(FIXED.values()) + plan.dense_reservation_bytes + plan.scratch_reservation_bytes
    return MemoryBudget(total + pool_plan(model, settings).wanted_bytes + spare, FIXED)


def pooled(
    model: PackedModel, slots: PoolSlots, *, staging: int = 1, spare: int = 0, ahead: int = 2, **options: object
) -> Engine:
    settings = PoolSettings(slots, staging=staging, decompress_ahead=ahead)
    return Engine(model.folder, budget_of(model, settings, spare), decode_threads=2, pools=settings, **options)


def run(engine: Engine, model: PackedModel, group: int, experts: list[int], *, ascending: bool = False) -> list[int]:
    handle = engine.group(GROUPS[group])
    order = []
    with engine.request(handle, experts, ascending=ascending, tokens=[1 + e % 3 for e in experts]) as request:
        for expert in request:
            order.append(expert)
            matrices = [engine.matrix(handle, expert, name) for name in PARAMETERS]
            for name, matrix in zip(PARAMETERS, matrices, strict=True):
                assert matrix.data_ptr() % 64 == 0
                assert torch.equal(matrix, model.experts[GROUPS[group], expert, name])
    assert sorted(order) == sorted(experts)
    for held, slots in zip(engine._native.pool_occupancy, engine._native.pool_slots, strict=True):
        assert all(h <= s for h, s in zip(held, slots, strict=True))
    return order


def states(engine: Engine, group: int) -> str:
    """A letter per expert."""
    return "".join("FCSEM"[engine._native.residency(record)] for record in engine.group(GROUPS[group]).records)


# --- what is read


@pytest.mark.parametrize(
    ("slots", "state", "reads"),
    [
        (PoolSlots(1), "F", (False, False)),
        (PoolSlots(0, 1), "C", (False, False)),
        (PoolSlots(0, 0, 1), "S", (True, False)),
        (PoolSlots(0, 0, 0, 1), "E", (False, True)),
        (PoolSlots(), "M", (True, True)),
    ],
)
def test_only_what_is_missing_is_read(
    planar: PackedModel, slots: PoolSlots, state: str, reads: tuple[bool, bool]
) -> None:
    exponent, sign_mantissa = part_bytes(planar.record(0, 2))
    with pooled(planar, slots) as engine:
        start = engine.statistics.counters()
        run(engine, planar, 0, [2])
        first = engine.statistics.counters()
        assert states(engine, 0) == "MM" + state + "MMMMM"
        assert first.since(start).reads == 1
        assert first.since(start).read_bytes == planar.record(0, 2).length
        run(engine, planar, 0, [2])
        second = engine.statistics.counters().since(first)
        assert (second.exponent_read_bytes, second.sign_mantissa_read_bytes) == (
            exponent * reads[0],
            sign_mantissa * reads[1],
        )
        assert second.read_bytes == second.exponent_read_bytes + second.sign_mantissa_read_bytes
        assert second.reads == any(reads)
        assert second.hits_by_pool == {letter: int(letter == state) for letter in "FCSE"}
        assert (second.hits, second.misses) == ((1, 0) if state in "FC" else (0, 1))
        if state == "F":
            assert second.decoded_bytes == 0


def test_a_known_sequence_of_moves(planar: PackedModel) -> None:
    exponent, sign_mantissa = part_bytes(planar.record(0, 0))
    settings = PoolSettings(PoolSlots(0, 1, 1, 1), staging=1, tolerance=EXPERTS)
    with Engine(planar.folder, budget_of(planar, settings), decode_threads=2, pools=settings) as engine:
        start = engine.statistics.counters()
        for expert in (0, 1, 2, 0):
            run(engine, planar, 0, [expert])
        assert states(engine, 0).startswith("CMS")  # newcomers pass their predecessors on; who leaves S has no E-chunks
        counters = engine.statistics.counters().since(start)
        assert counters.hits_by_pool == {"F": 0, "C": 0, "S": 0, "E": 0}
        assert counters.misses == 4
        assert (counters.exponent_read_bytes, counters.sign_mantissa_read_bytes) == (4 * exponent, 4 * sign_mantissa)
        run(engine, planar, 0, [2])  # S: its E-chunks come back, and it takes the place of 0, which was used as often
        after = engine.statistics.counters().since(start)
        assert after.exponent_read_bytes - counters.exponent_read_bytes == exponent
        assert after.sign_mantissa_read_bytes == counters.sign_mantissa_read_bytes
        assert after.hits_by_pool["S"] == 1


def test_decoded_experts_come_without_a_copy(planar: PackedModel) -> None:
    with pooled(planar, PoolSlots(2)) as engine:
        run(engine, planar, 0, [1, 4])
        handle = engine.group(GROUPS[0])
        with engine.request(handle, [1]) as request:
            for expert in request:
                first = engine.matrix(handle, expert, PARAMETERS[0])
                assert engine.matrix(handle, expert, PARAMETERS[0]).data_ptr() == first.data_ptr()
                scratch = {buffer.data_ptr() for buffer in engine._scratch}
                assert first.data_ptr() not in scratch
                fresh = engine.expert_matrix(handle, expert, PARAMETERS[0])
                assert torch.equal(fresh, first) and fresh.data_ptr() != first.data_ptr()
        assert torch.equal(engine.expert_matrix(handle, 4, PARAMETERS[1]), planar.experts[GROUPS[0], 4, PARAMETERS[1]])
        assert engine.statistics.counters().full_hits == 2


SLOTS = st.builds(PoolSlots, *[st.integers(0, 3)] * 4)


@pytest.mark.parametrize("seed", range(6))
def test_any_pools_and_requests(planar: PackedModel, seed: int) -> None:
    choice = random.Random(seed)
    for _ in range(3):
        slots = PoolSlots(*(choice.randrange(4) for _ in range(4)))
        with pooled(planar, slots, staging=1 + choice.randrange(3), ahead=choice.randrange(4)) as engine:
            for _ in range(12):
                wanted = choice.sample(range(EXPERTS), 1 + choice.randrange(EXPERTS))
                order = run(engine, planar, choice.randrange(2), wanted, ascending=choice.random() < 0.5)
                assert len(order) == len(wanted)


@given(SLOTS, st.integers(0, 8))
def test_slots_never_exceed_the_experts(slots: PoolSlots, experts: int) -> None:
    limited = slots.within(experts)
    assert sum(limited.experts) == min(sum(slots.experts), experts)
    assert all(a <= b for a, b in zip(limited.experts, slots.experts, strict=True))


def test_threads_share_pools(planar: PackedModel) -> None:
    def work(engine: Engine, seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(15):
            run(engine, planar, choice.randrange(2), choice.sample(range(EXPERTS), 4), ascending=choice.random() < 0.5)
            engine.account("cache", choice.randrange(40_000))

    def checked(engine: Engine, seed: int) -> bool:
        work(engine, seed)
        return True

    with pooled(planar, PoolSlots(1, 1, 1, 1), staging=2) as engine, ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda seed: checked(engine, seed), range(3))) == [True] * 3


# --- decompression ahead


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_matrices_are_equal_for_any_shards_workers_and_pools(tmp_path: Path, shards: int, workers: int) -> None:
    model = build(tmp_path, replace(PLANAR, shards=shards))
    choice = random.Random(10 * shards + workers)
    requests = [choice.sample(range(EXPERTS), choice.choice((1, 4, 8))) for _ in range(5)]
    for slots in (PoolSlots(0, 3), PoolSlots(0, 0, 3), PoolSlots(0, 0, 0, 3), PoolSlots(1, 1, 1, 1), PoolSlots()):
        kept = []
        for ahead in (0, 2):
            settings = PoolSettings(slots, staging=2, decompress_ahead=ahead)
            budget = budget_of(model, settings, spare=1_000_000)
            with Engine(model.folder, budget, decode_threads=workers, pools=settings) as engine:
                for number, experts in enumerate(requests):
                    run(engine, model, number % 2, experts, ascending=number == 2)
                counters = engine.statistics.counters()
                assert counters.ready_bytes <= counters.decoded_bytes
                assert (counters.ahead_bytes > 0) == (counters.decompress_ahead_seconds > 0)
                kept.append((states(engine, 0), states(engine, 1), counters.decoded_bytes))
        assert kept[0] == kept[1]


def test_exponents_of_experts_in_memory_are_ready_when_the_disk_is_done(planar: PackedModel) -> None:
    with pooled(planar, PoolSlots(0, 2), ahead=2) as engine:
        run(engine, planar, 0, [1, 2])
        start = engine.statistics.counters()
        handle = engine.group(GROUPS[0])
        with engine.request(handle, [1, 2]) as request:
            # Nobody has asked for a matrix yet: everything is decompressed in the background.
            while engine.statistics.counters().since(start).ahead_bytes < 2 * exponent_bytes(planar.record(0, 1)):
                pass
            for expert in request:
                for name in PARAMETERS:
                    assert torch.equal(engine.matrix(handle, expert, name), planar.experts[GROUPS[0], expert, name])
        counters = engine.statistics.counters().since(start)
        assert counters.ready_bytes == counters.decoded_bytes > 0


# --- damage


@pytest.mark.parametrize(("slots", "part", "name"), [(PoolSlots(0, 0, 2), 0, "E"), (PoolSlots(0, 0, 0, 2), 1, "SM")])
def test_damage_in_a_part_that_is_read_alone_is_named(
    planar: PackedModel, slots: PoolSlots, part: int, name: str
) -> None:
    record = planar.record(0, 5)
    with pooled(planar, slots) as engine:
        run(engine, planar, 0, [5])
        planar.flip(record, record.extents[part].offset + 3)
        for _ in range(2):
            with pytest.raises(CorruptRecordError, match=rf"{record.name}.*\(extent {name}\)"):
                run(engine, planar, 0, [3, 5])
        run(engine, planar, 0, [0, 1, 2, 3, 4, 6, 7])
        planar.flip(record, record.extents[part].offset + 3)
        run(engine, planar, 0, list(range(EXPERTS)))


def test_damage_that_is_not_read_is_not_met(planar: PackedModel) -> None:
    record = planar.record(0, 5)
    with pooled(planar, PoolSlots(0, 0, 1)) as engine:
        run(engine, planar, 0, [5])
        planar.flip(record, record.extents[1].offset + 3)  # its SM-chunks are in memory
        run(engine, planar, 0, [5])


# --- memory


def test_reservation_and_slots_agree_with_the_native_engine(planar: PackedModel) -> None:
    slots = PoolSlots(1, 2, 1, 1)
    settings = PoolSettings(slots, staging=2, decompress_ahead=3)
    exponent = max(part_bytes(planar.record(g, e))[0] for g in (0, 1) for e in range(EXPERTS))
    sign_mantissa = max(part_bytes(planar.record(g, e))[1] for g in (0, 1) for e in range(EXPERTS))
    full = -(-full_bytes(planar.record(0, 0)) // 4096) * 4096
    raw = -(-exponent_bytes(planar.record(0, 0)) // 4096) * 4096
    expected = 2 * (full + 3 * exponent + 3 * sign_mantissa) + 2 * (exponent + sign_mantissa) + 3 * raw
    plan = pool_plan(planar, settings)
    assert plan.wanted_bytes == expected + plan.rounding_bytes
    with pooled(planar, slots, staging=2, ahead=3, spare=1000) as engine:
        assert engine._native.pool_bytes == expected
        assert engine.budget.reserved(EXPERT_POOL) == plan.wanted_bytes
        assert engine.budget.free_bytes == 1000
        line = engine.mode_line("exact", "eager")
        assert (
            f"pools F 1, C 2, S 1, E 1 of {EXPERTS} experts per layer and 2 staged and 3 decompressed ahead (" in line
        )
        assert "reads in cache_affinity order" in line


def test_pools_that_do_not_fit_are_refused_and_itemised(planar: PackedModel) -> None:
    settings = PoolSettings(PoolSlots(2, 2, 2, 2), decompress_ahead=2)
    budget = budget_of(planar, settings, spare=-1)
    with pytest.raises(
        BudgetTooSmallError,
        match=r"expert pool .*\(pools F 2, C 2, S 2, E 2 per layer, 24.6 kB for exponents of 2 experts",
    ):
        Engine(planar.folder, budget, decode_threads=2, pools=settings)


def test_exponents_of_a_fused_codec_are_not_decompressed(model: PackedModel, planar: PackedModel) -> None:
    slots = PoolSlots(0, 2)
    with_buffers, without = (PoolSettings(slots, decompress_ahead=ahead) for ahead in (2, 0))
    assert pool_plan(model, with_buffers).wanted_bytes == pool_plan(model, without).wanted_bytes
    difference = pool_plan(planar, with_buffers).wanted_bytes - pool_plan(planar, without).wanted_bytes
    assert difference == 2 * 12288 + HUGE_PAGE_BYTES + READABLE_TAIL_BYTES  # 96 x 64 + 64 x 48 exponents each
    assert pool_plan(planar, PoolSettings(slots, decompress_ahead=50)).classes[0].exponent_buffers == EXPERTS
    with pooled(planar, slots, ahead=0) as engine:
        run(engine, planar, 0, [1, 2, 3])
        counters = engine.statistics.counters()
        assert (counters.ready_bytes, counters.ahead_bytes, counters.decompress_ahead_seconds) == (0, 0, 0)
        assert "decompressed ahead" not in engine.mode_line("exact", "eager")


def test_pools_give_way_and_grow_again(planar: PackedModel) -> None:
    slots = PoolSlots(2, 2, 2, 2)
    with pooled(planar, slots) as engine:
        plan = engine._pools
        assert plan is not None
        run(engine, planar, 0, list(range(EXPERTS)))
        spare = plan.wanted_bytes - plan.floor_bytes
        engine.account("cache", spare // 2)
        assert engine.budget.free_bytes >= 0
        smaller = [PoolSlots(*group) for group in engine._native.pool_slots]
        assert smaller == [PoolSlots(1, 1, 1, 1)] * 2
        assert "F 1, C 1, S 1, E 1" in engine.mode_line("exact", "eager")
        run(engine, planar, 0, list(range(EXPERTS)))
        engine.account("cache", spare)
        assert engine._native.pool_slots == [[0, 0, 0, 0]] * 2
        assert states(engine, 0) == "M" * EXPERTS
        run(engine, planar, 0, list(range(EXPERTS)), ascending=True)
        with pytest.raises(BudgetExceededError, match="the expert pool can give at most 0 B"):
            engine.account("cache", spare + 1)
        engine.account("cache", 0)
        assert engine._native.pool_slots == [[2, 2, 2, 2]] * 2
        run(engine, planar, 1, list(range(EXPERTS)))


def test_layers_of_different_sizes_have_slots_of_their_own(tmp_path: Path) -> None:
    model = build(tmp_path, PLANAR, second_layer_scale=3)
    settings = PoolSettings((PoolSlots(1, 1), PoolSlots(0, 0, 3, 2)))
    with Engine(model.folder, budget_of(model, settings), decode_threads=2, pools=settings) as engine:
        for _ in range(3):
            for group in (0, 1):
                run(engine, model, group, list(range(EXPERTS)))
        assert engine._native.pool_occupancy == [[1, 1, 0, 0], [0, 0, 3, 2]]
        assert "pools F 0 to 1, C 0 to 1, S 0 to 3, E 0 to 2 of 8 experts" in engine.mode_line("exact", "eager")


# --- options


def test_slots_are_written_as_text() -> None:
    assert PoolSlots.parse("F=0,C=12,S=8,E=0") == PoolSlots(0, 12, 8, 0)
    assert PoolSlots.parse(" e = 3 , C=1") == PoolSlots(0, 1, 0, 3)
    assert str(PoolSlots(0, 12, 8, 0)) == "F 0, C 12, S 8, E 0"
    for text in ("", "C", "C=-1", "C=1,C=2", "X=3", "C=1.5", "C=1 S=2"):
        with pytest.raises(InvalidArgumentError, match="does not say how many experts"):
            PoolSlots.parse(text)


def test_slots_follow_from_shares_of_bytes() -> None:
    assert PoolSlots.from_shares(1000, {"F": 0.5, "C": 0.25, "E": 0.25}, (200, 120, 100, 30)) == PoolSlots(2, 2, 0, 8)
    assert PoolSlots.from_shares(600, {"C": 1.0}, (200, 120, 0, 0)) == PoolSlots(0, 5)
    for shares in ({"X": 0.1}, {"C": -0.1}, {"C": 0.7, "F": 0.4}):
        with pytest.raises(InvalidArgumentError, match="does not divide"):
            PoolSlots.from_shares(1000, shares, (200, 120, 100, 30))


def test_misuse_is_refused_with_a_reason(planar: PackedModel, model: PackedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="records have no parts"):
        pooled(model, PoolSlots(0, 1, 1))
    with pytest.raises(InvalidArgumentError, match="cannot hold -1 experts"):
        PoolSlots(-1)
    for wrong in (
        {"staging": 0},
        {"tolerance": -1.0},
        {"half_life_steps": 0.0},
        {"order": "random"},
        {"decompress_ahead": -1},
    ):
        with pytest.raises(InvalidArgumentError):
            PoolSettings(PoolSlots(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="given for 3 sparse layers, but the model has 2"):
        pool_plan(planar, PoolSettings((PoolSlots(),) * 3))
    with pooled(planar, PoolSlots(0, 1)) as engine:
        handle = engine.group(GROUPS[0])
        for experts, tokens in (([1, 1], [1, 1]), ([1, 2], [1])):
            with pytest.raises(InvalidArgumentError, match="numbers of tokens"):
                engine.request(handle, experts, tokens=tokens)


def test_a_fused_codec_has_the_pools_f_and_c(model: PackedModel) -> None:
    with pooled(model, PoolSlots(1, 2)) as engine:
        for _ in range(3):
            run(engine, model, 0, list(range(EXPERTS)))
            run(engine, model, 1, [7, 3, 1], ascending=True)
        assert engine._native.pool_occupancy == [[1, 2, 0, 0]] * 2
        counters = engine.statistics.counters()
        assert counters.full_hits > 0 and counters.compressed_hits > 0
        assert (counters.exponent_read_bytes, counters.sign_mantissa_read_bytes) == (0, 0)
    assert sum(rows * columns for rows, columns in SHAPES.values()) * 2 == full_bytes(model.record(0, 0))


# --- policies


POLICY_POOLS = {
    "F": PoolSlots(2),
    "C": PoolSlots(0, 3),
    "S": PoolSlots(0, 0, 3),
    "E": PoolSlots(0, 0, 0, 3),
    "FS": PoolSlots(2, 0, 2),
    "SE": PoolSlots(0, 0, 2, 2),
    "FCE": PoolSlots(1, 1, 0, 2),
    "FCSE": PoolSlots(1, 2, 1, 2),
}


@pytest.mark.parametrize("name", POLICY_POOLS)
@pytest.mark.parametrize("policy", _native.cache_policies())
def test_residencies_are_those_of_the_dispatch_and_matrices_the_originals(
    planar: PackedModel, policy: str, name: str
) -> None:
    slots = POLICY_POOLS[name]
    half_life = 3.0 if policy == "zipmoe" else None
    settings = PoolSettings(slots, staging=1 + len(name) % 2, policy=policy, half_life_steps=half_life, tolerance=1.0)
    books = [
        _native.LayerPools(
            EXPERTS, slots.experts, policy, tolerance=1.0, half_life_steps=3.0, seed=group, staging=settings.staging
        )
        for group in range(len(GROUPS))
    ]
    choice = random.Random(5)
    found = dict.fromkeys("FCSEM", 0)
    with Engine(planar.folder, budget_of(planar, settings), decode_threads=2, pools=settings) as engine:
        plan = engine._pools
        assert plan is not None
        for step in range(40):
            group = choice.randrange(len(GROUPS))
            wanted = choice.sample(range(EXPERTS), choice.choice([1, 2, 3, EXPERTS]))
            before, _ = books[group].access(wanted)
            for residency in before:
                found["FCSEM"[residency]] += 1
            run(engine, planar, group, wanted, ascending=choice.random() < 0.5)
            if step % 16 == 15:  # the key-value cache grows and shrinks again
                taken = choice.randrange(plan.wanted_bytes - plan.floor_bytes)
                for count in (taken, 0):
                    engine.account("cache", count)
                    for book, new in zip(books, engine._native.pool_slots, strict=True):
                        book.resize((new[0], new[1], new[2], new[3]))
            for number, book in enumerate(books):
                assert states(engine, number) == "".join("FCSEM"[residency] for residency in book.residencies)
        counters = engine.statistics.counters()
    # With little staging, some that wait for their turn give up parts; decoded ones never do.
    assert counters.full_hits == found["F"]
    assert all(count <= found[letter] for letter, count in counters.hits_by_pool.items())
    assert counters.hits + counters.misses == sum(found.values())


def test_an_expert_that_leaves_f_for_s_is_not_read_again_but_its_exponents(planar: PackedModel) -> None:
    exponent, _ = part_bytes(planar.record(0, 1))
    settings = PoolSettings(PoolSlots(1, 0, 1), staging=1, policy="lru")
    with Engine(planar.folder, budget_of(planar, settings), decode_threads=2, pools=settings) as engine:
        run(engine, planar, 0, [1])
        run(engine, planar, 0, [2])
        assert states(engine, 0) == "MSFMMMMM"
        start = engine.statistics.counters()
        run(engine, planar, 0, [1])  # changes places with 2
        assert states(engine, 0) == "MFSMMMMM"
        counters = engine.statistics.counters().since(start)
        assert (counters.exponent_read_bytes, counters.sign_mantissa_read_bytes) == (exponent, 0)
        run(engine, planar, 0, [2, 1])
        engine.account("cache", 1)
        assert states(engine, 0) == "M" * EXPERTS  # half of one slot is none


def test_policy_and_half_life_are_one_option(planar: PackedModel) -> None:
    settings = PoolSettings(PoolSlots(compressed=2), policy="fifo")
    for pools, options, policy in (
        (settings, {}, "fifo"),
        (settings, {"policy": "marking"}, "marking"),
        (settings, {"policy": "zipmoe", "half_life_steps": 3.0}, "zipmoe"),
        (PoolSlots(compressed=2), {}, "auto, now zipmoe with a half-life of 16 steps"),
        (PoolSlots(compressed=2), {"half_life_steps": 3.0}, "zipmoe"),
        (PoolSlots(compressed=2), {"policy": "lfu"}, "lfu"),
    ):
        with Engine(planar.folder, budget_of(planar, settings), decode_threads=1, pools=pools, **options) as engine:  # type: ignore[arg-type]
            assert engine.mode_line("exact", "eager").endswith(f"; policy {policy}")
    for wrong in ({"policy": "oracle"}, {"half_life_steps": 0.0}):
        with pytest.raises(InvalidArgumentError, match=r"policy must be one of auto, zipmoe, lru|above 0 steps"):
            PoolSettings(PoolSlots(), **wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match=r"policy must be one of auto, zipmoe, lru|above 0 steps"):
            Engine(planar.folder, budget_of(planar, settings), pools=settings, **wrong)  # type: ignore[arg-type]
