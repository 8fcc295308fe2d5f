"""The optimum against exhaustive search, and above every policy."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from small_traces import COSTS, EXPERT, trace_of

from zipmoe import _native
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import PoolPlan
from zipmoe.simulation.belady import optimal_hit_rate, optimal_hits
from zipmoe.simulation.replay import CacheSettings, replay


def exhaustive_hits(requests: list[list[int]], slots: int, *, may_pass: bool, warm_up: int) -> int:
    """Most hits of any cache: tries every choice of what stays."""
    best = {frozenset[int](): 0}
    for number, wanted in enumerate(requests):
        after: dict[frozenset[int], int] = {}
        for resident, hits in best.items():
            now = hits + (len(resident & set(wanted)) if number >= warm_up else 0)
            must = frozenset() if may_pass else frozenset(wanted)
            choice = sorted((resident | set(wanted)) - must)
            for count in range(min(len(choice), slots - len(must)) + 1):
                for kept in combinations(choice, count):
                    state = must | set(kept)
                    after[state] = max(after.get(state, 0), now)
        best = after
    return max(best.values())


@pytest.mark.parametrize("may_pass", [True, False])
def test_optimum_equals_exhaustive_search(may_pass: bool) -> None:
    chance = random.Random(2)
    for _ in range(60):
        experts, size = chance.randint(3, 6), chance.randint(1, 2)
        slots = chance.randint(size, 4)
        warm_up = chance.choice([0, 4]) if may_pass else 0
        requests = [chance.sample(range(experts), size) for _ in range(10)]
        found = sum(optimal_hits(requests, slots, may_pass=may_pass, warm_up_requests=warm_up))
        assert found == exhaustive_hits(requests, slots, may_pass=may_pass, warm_up=warm_up)


@pytest.mark.parametrize("warm_up", [0, 50])
def test_no_policy_is_better(warm_up: int) -> None:
    chance = random.Random(4)
    trace = trace_of([[sorted(chance.sample(range(20), 3)) for _ in range(2)] for _ in range(100)], 20, 3)
    for slots in (1, 3, 6, 12):
        for scope in ("layer", "model"):
            total = slots * (2 if scope == "model" else 1)
            optimum = optimal_hit_rate(trace, total, scope=scope, warm_up_steps=warm_up)
            for policy in _native.cache_policies():
                settings = CacheSettings(policy, scope=scope)
                report = replay(trace, PoolPlan(compressed=slots), COSTS, EXPERT, settings, warm_up_steps=warm_up)
                assert report.hit_rate <= optimum


def test_requests_larger_than_the_cache_and_no_cache() -> None:
    assert optimal_hits([[0, 1, 2], [0, 1, 2]], 2) == [0, 2]
    assert optimal_hits([[0, 1, 2], [0, 1, 2]], 2, may_pass=False) == [0, 2]
    with pytest.raises(InvalidArgumentError, match="0 slots"):
        optimal_hits([[0]], 0)
