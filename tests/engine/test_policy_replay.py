"""An engine whose policy is chosen while it works: the same experts bit for bit, the residencies that the replay alone
predicts, also across changes of policy and of the pools' sizes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packed_model import EXPERTS, GROUPS, PARAMETERS, PackedModel, build

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.budget import PROCESS, MemoryBudget
from zipmoe.engine.engine import Engine
from zipmoe.engine.pool_memory_plan import PoolMemoryPlan
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots

SEPARABLE = next(c.name for c in _native.codecs() if c.separable and not c.unavailable_reason)
STEPS = 160


def workload() -> Iterator[tuple[int, list[int]]]:
    """(group, experts): working sets that follow each other, then two favourites among strangers."""
    chance = random.Random(4)
    for step in range(STEPS):
        for group in range(len(GROUPS)):
            if step < STEPS // 2:
                first = step // 10 * 2
                yield group, sorted({(first + chance.randrange(2)) % EXPERTS, (first + chance.randrange(2)) % EXPERTS})
            else:
                yield group, sorted({step % 2, 2 + (step * 5 + group) % (EXPERTS - 2)})


def use(engine: Engine, model: PackedModel, group: int, experts: list[int]) -> None:
    handle = engine.group(GROUPS[group])
    with engine.request(handle, experts, ascending=True) as request:
        for expert in request:
            for name in PARAMETERS:
                assert torch.equal(engine.matrix(handle, expert, name), model.experts[GROUPS[group], expert, name])


def test_the_single_pool_follows_its_replay(model: PackedModel) -> None:
    slots = 5
    experts = len(GROUPS) * EXPERTS
    twin = _native.ReplayedPools(
        [(experts, (0, slots, 0, 0), (0, 0, 0, 0, 1))],
        candidates=_native.default_candidates(),
        requests_per_step=len(GROUPS),
        tolerance=float(experts),
    )
    hits = requested = 0
    with model.engine(slots, policy="auto", io_threads=1) as engine:  # reads end in order
        for group, wanted in workload():
            states, _ = twin.access(0, [group * EXPERTS + expert for expert in wanted])
            hits += sum(state == 1 for state in states)
            requested += len(wanted)
            use(engine, model, group, wanted)
        counters, report = engine.statistics.counters(), engine.statistics.report()
    assert (counters.hits, counters.misses) == (hits, requested - hits)
    assert counters.policy_changes == twin.policy_changes >= 1
    assert (report.policy, report.policy_changes) == (twin.policy, twin.policy_changes)
    assert f"now {twin.policy}" in report.line()


@pytest.mark.parametrize("slots", [PoolSlots(0, 1, 1, 1), PoolSlots(0, 2), PoolSlots(0, 0, 2, 1)], ids=str)
def test_pools_follow_their_replay(tmp_path: Path, slots: PoolSlots) -> None:
    model = build(tmp_path, CodecSettings(SEPARABLE, {"zstd": 3, "lz4hc": 9}.get(SEPARABLE), 3))
    settings = PoolSettings(slots, staging=2)
    plan = PoolMemoryPlan.of(model.folder.manifest.expert_groups, settings, separable=True)
    fixed = {PROCESS: 100_000_000, "workspace": 50_000_000}
    arena = model.plan().dense_reservation_bytes + model.plan().scratch_reservation_bytes
    exponent, sign_mantissa = plan.classes[0].part_bytes
    twin = _native.ReplayedPools(
        [(EXPERTS, slots.experts, (0, 0, exponent, sign_mantissa, exponent + sign_mantissa))] * len(GROUPS),
        candidates=_native.default_candidates(),
        requests_per_step=len(GROUPS),
    )
    budget = MemoryBudget(sum(fixed.values()) + arena + plan.wanted_bytes, fixed)
    with Engine(model.folder, budget, decode_threads=2, pools=settings) as engine:
        for group, wanted in workload():
            twin.access(group, wanted)
            use(engine, model, group, wanted)
            handle = engine.group(GROUPS[group])
            found = [engine._native.residency(handle.records[expert]) for expert in range(EXPERTS)]
            assert found == twin.residencies(group)
        report = engine.statistics.report()
        assert (report.policy, report.policy_changes) == (twin.policy, twin.policy_changes)
        assert engine.mode_line("exact", "eager").endswith(f"; policy auto, now {twin.policy}")
    assert twin.policy_changes >= 1


def test_a_pool_that_gives_way_is_replayed_as_such(model: PackedModel) -> None:
    with model.engine(6, policy="auto") as engine:
        for number, (group, wanted) in enumerate(workload()):
            if number in (60, 200):  # the key-value cache grows, and gives the memory back
                engine.account("cache", model.record(0, 0).length * 3 if number == 60 else 0)
            use(engine, model, group, wanted)
        assert engine.statistics.counters().misses > 0


def test_nothing_changes_where_all_experts_fit(model: PackedModel) -> None:
    with model.engine(len(GROUPS) * EXPERTS, policy="auto") as engine:
        for group, wanted in workload():
            use(engine, model, group, wanted)
        counters = engine.statistics.counters()
    assert counters.policy_changes == 0
    assert counters.misses == len({(group, expert) for group, wanted in workload() for expert in wanted})
