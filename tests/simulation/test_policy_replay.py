"""The policy that is chosen by replay, in the simulator: right choices, no worse than the best fixed one by much."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from small_traces import COSTS, EXPERT, trace_of

from zipmoe import _native
from zipmoe.planning.partition import PoolPlan
from zipmoe.simulation.replay import CacheSettings, ModelPools, replay

EXPERTS = 16
LAYERS = 3


def shifting(step: int, chance: random.Random) -> list[int]:
    """Two of four experts that are all that is asked for, until others are."""
    first = step // 10 * 4
    return [(first + n) % EXPERTS for n in sorted(chance.sample(range(4), 2))]


def favourites(step: int, chance: random.Random) -> list[int]:
    """One of two favourites, and a stranger."""
    return [step % 2, chance.randrange(2, EXPERTS)]


def requests(kinds: Sequence[object], steps: int) -> list[list[list[int]]]:
    chance = random.Random(8)
    return [[kind(step, chance) for _ in range(LAYERS)] for kind in kinds for step in range(steps)]  # type: ignore[operator]


@pytest.mark.parametrize("plan", [PoolPlan(compressed=4), PoolPlan(full=1, compressed=2, sign_mantissa=2)])
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_auto_comes_close_to_the_best_fixed_policy(plan: PoolPlan, scope: str) -> None:
    spreads = []
    for kinds in ([shifting], [favourites], [shifting, favourites, shifting]):
        trace = trace_of(requests(kinds, 200), experts=EXPERTS, top_k=2)

        def read_bytes(policy: str, half_life: float = 16.0) -> float:
            settings = CacheSettings(policy, half_life, scope=scope)
            return replay(trace, plan, COSTS, EXPERT, settings, warm_up_steps=40).read_bytes_per_step  # noqa: B023

        fixed = [read_bytes(*candidate) for candidate in _native.default_candidates()]
        assert read_bytes("auto") <= 1.03 * min(fixed)
        spreads.append(max(fixed) / min(fixed))
    assert max(spreads) > 1.05  # there was something to choose


def test_the_report_says_what_was_chosen() -> None:
    trace = trace_of(requests([shifting], 100), experts=EXPERTS, top_k=2)
    auto = replay(trace, PoolPlan(compressed=4), COSTS, EXPERT)
    assert auto.policy == "auto"
    assert auto.policy_changes >= 1
    assert auto.chosen_policy in ("lru", "lfuda", "zipmoe with a half-life of 4 steps")
    assert auto.to_json()["chosen_policy"] == auto.chosen_policy
    fixed = replay(trace, PoolPlan(compressed=4), COSTS, EXPERT, CacheSettings("lru"))
    assert (fixed.chosen_policy, fixed.policy_changes) == (None, 0)


def test_the_choice_minimises_what_it_is_told() -> None:
    """An expert in S costs as much as a miss to one, nothing to the other: who values S, values other policies."""
    chosen = []
    for costs in ((0, 0, 1, 1, 1), (0, 0, 0, 0, 1)):
        pools = ModelPools([EXPERTS], [PoolPlan(compressed=1, sign_mantissa=3)], CacheSettings("auto"), costs)
        totals = [0.0] * 2
        fixed = [
            ModelPools([EXPERTS], [PoolPlan(compressed=1, sign_mantissa=3)], CacheSettings(name), costs)
            for name in ("lru", "zipmoe")
        ]
        auto = 0.0
        for step in requests([favourites], 300):
            states, _ = pools.access(0, step[0])
            auto += sum(costs[state] for state in states)
            for number, one in enumerate(fixed):
                totals[number] += sum(costs[state] for state in one.access(0, step[0])[0])
        assert auto <= 1.05 * min(totals)
        chosen.append(auto)
    assert chosen[1] < chosen[0]


def test_impossible_replays_are_refused() -> None:
    pool = (4, (0, 2, 0, 0), (0, 0, 0, 0, 1))
    for options, message in (
        ({"candidates": [("oracle", 16)]}, "unknown eviction policy: oracle"),
        ({"candidates": []}, "first choice is not among the candidates"),
        ({"candidates": [("lru", 16)], "requests_per_step": 0}, "at least one request"),
        ({"candidates": [("lru", 16)], "window_steps": 4}, "window"),
        ({"candidates": [("lru", 16)], "margin": -1.0}, "not negative"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.ReplayedPools([pool], **{"requests_per_step": 1, **options})  # type: ignore[arg-type]
    pools = _native.ReplayedPools([pool], candidates=[("lru", 16)], requests_per_step=1)
    with pytest.raises(IndexError):
        pools.access(1, [0])
    with pytest.raises(ValueError, match="each expert once"):
        pools.access(0, [1, 1])
