"""Budgets, plans without planning, planning from the warm-up, and its correction by replay."""

from __future__ import annotations

import random

import pytest
from small_traces import trace_of

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import ExpertState, PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.device_choice import load_device
from zipmoe.simulation.experiment import (
    even_plan,
    layer_budget_bytes,
    planned,
    planned_and_replayed,
    warm_up_steps,
)
from zipmoe.simulation.expert_shape import ExpertOnDevice, ExpertShape
from zipmoe.simulation.replay import CacheSettings, replay

SHAPE = ExpertShape(((100, 200), (200, 100)))


def moving_trace(steps: int = 80, seed: int = 1) -> RoutingTrace:
    """Popularity that wanders slowly through 16 experts."""
    chance = random.Random(seed)
    drawn = []
    for step in range(steps):
        weights = [4.0 if (expert - step // 8) % 16 < 5 else 1.0 for expert in range(16)]
        ids: set[int] = set()
        while len(ids) < 3:
            ids |= set(chance.choices(range(16), weights))
        drawn.append([sorted(ids)])
    return trace_of(drawn, experts=16, top_k=3)


def expert(codec: str) -> ExpertOnDevice:
    return ExpertOnDevice.of(SHAPE, load_device("jetson-orin"), codec, 2)


def test_bytes_and_budget() -> None:
    packed = expert("zstd")
    assert packed.bytes.full == 80_000
    assert packed.bytes.sign_mantissa == 40_000
    assert packed.bytes.exponent == 2 * 8104  # rho = 0.4052, rounded up per tensor
    fused = expert("fx3")
    assert (fused.bytes.sign_mantissa, fused.bytes.compressed, fused.costs.shards) == (0, 2 * 27_936, 0)
    trace = moving_trace()
    assert layer_budget_bytes(trace, packed, 0.25) == 16 * 80_000 // 4
    assert even_plan(trace, packed, 0.25, [ExpertState.FULL]) == PoolPlan(full=4)
    assert even_plan(trace, packed, 0.25, [ExpertState.COMPRESSED]) == PoolPlan(compressed=5)
    assert even_plan(trace, packed, 1.0, [ExpertState.EXPONENT]) == PoolPlan(exponent=16)
    assert warm_up_steps(trace, 0.5) == 40
    with pytest.raises(InvalidArgumentError, match="memory share of 0"):
        layer_budget_bytes(trace, packed, 0)
    with pytest.raises(InvalidArgumentError, match="warm-up of 1"):
        warm_up_steps(trace, 1)


@pytest.mark.parametrize("codec", ["zstd", "fx3"])
def test_plans_fit_the_budget_and_see_only_what_was_learnt(codec: str) -> None:
    packed, trace = expert(codec), moving_trace()
    other = RoutingTrace(trace.header, trace.steps[:40] + moving_trace(40, seed=9).steps)
    for share in (0.125, 0.5):
        options = {"learn_steps": 40, "half_life_steps": 16.0}
        plan = planned(trace, packed, share, **options)
        assert plan.held_bytes(packed.bytes) <= layer_budget_bytes(trace, packed, share)
        assert plan == planned(other, packed, share, **options)
        confirmed = planned_and_replayed(trace, packed, share, learn_steps=40, settings=CacheSettings())
        assert confirmed == planned_and_replayed(other, packed, share, learn_steps=40, settings=CacheSettings())
        learnt = RoutingTrace(trace.header, trace.steps[:40])
        seconds = [
            replay(learnt, candidate, packed.costs, packed.bytes, warm_up_steps=20).seconds_per_step
            for candidate in (confirmed, plan)
        ]
        assert seconds[0] <= seconds[1]
    with pytest.raises(InvalidArgumentError, match="nothing to plan from"):
        planned(trace, packed, 0.25, learn_steps=1, half_life_steps=16.0)


def test_a_fused_codec_is_planned_into_c() -> None:
    assert planned(moving_trace(), expert("fx3"), 0.25, learn_steps=40, half_life_steps=16.0) == PoolPlan(compressed=5)
