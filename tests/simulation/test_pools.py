"""Policies and pools against slow references on random traces; determinism; errors."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_pools import ReferencePools

from zipmoe import _native

POLICIES = _native.cache_policies()


@given(st.sampled_from(POLICIES), st.integers(0, 1 << 32), st.booleans())
@settings(max_examples=400, deadline=None)
def test_native_pools_do_what_the_reference_does(policy: str, seed: int, single: bool) -> None:
    chance = random.Random(seed)
    experts = chance.randint(1, 14)
    slots = [0 if chance.random() < 0.4 else chance.randint(0, experts) for _ in range(4)]
    if single:
        slots = [0, chance.randint(1, experts), 0, 0]
    options = {
        "tolerance": float(chance.choice([0, 1, 2.5, experts])),
        "half_life_steps": chance.choice([1.0, 3.0, 16.0, math.inf]),
        "requests_per_step": chance.choice([1, 3]),
        "seed": chance.randint(0, 1 << 40),
    }
    if chance.random() < 0.5:
        options["staging"] = chance.randint(0, 3)
    native = _native.LayerPools(experts, tuple(slots), policy, **options)
    reference = ReferencePools(experts, slots, policy, **options)
    for _ in range(40):
        wanted = chance.sample(range(experts), chance.randint(1, min(experts, 5)))
        assert native.access(wanted) == reference.access(wanted)
        assert native.residencies == list(reference.state.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_requests_give_the_same_moves(policy: str) -> None:
    def moves(seed: int) -> list[object]:
        pools = _native.LayerPools(30, (3, 4, 5, 6), policy, seed=seed)
        chance = random.Random(1)
        return [pools.access(chance.sample(range(30), 4)) for _ in range(200)]

    assert moves(5) == moves(5)
    assert (moves(5) == moves(6)) == (policy != "marking")


def test_what_is_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown eviction policy: oracle"):
        _native.LayerPools(4, (0, 1, 0, 0), "oracle")
    with pytest.raises(ValueError, match="at least one expert"):
        _native.LayerPools(0, (0, 1, 0, 0))
    with pytest.raises(ValueError, match="half-life"):
        _native.LayerPools(4, (0, 1, 0, 0), half_life_steps=0)
    with pytest.raises(ValueError, match="tolerance"):
        _native.LayerPools(4, (0, 1, 0, 0), tolerance=-1)
    pools = _native.LayerPools(4, (0, 2, 0, 0))
    with pytest.raises(ValueError, match="each expert once"):
        pools.access([1, 1])
    with pytest.raises(IndexError):
        pools.access([4])
    assert pools.access([0, 1])[0] == [4, 4]
