"""The engine's pool under each policy: the same experts bit for bit, and the hits that the policy alone predicts."""

from __future__ import annotations

import random

import pytest
import torch
from packed_model import EXPERTS, GROUPS, PARAMETERS, PackedModel

from zipmoe import _native
from zipmoe.engine.cache_policy import PolicyChoice, policy_names
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.errors import InvalidArgumentError

SLOTS = 5


@pytest.mark.parametrize("policy", _native.cache_policies())
def test_hits_are_those_of_the_policy_and_experts_are_the_originals(model: PackedModel, policy: str) -> None:
    chance = random.Random(3)
    requests = [(step % len(GROUPS), sorted(chance.sample(range(EXPERTS), chance.randint(1, 3)))) for step in range(80)]
    pools = _native.LayerPools(
        len(GROUPS) * EXPERTS, (0, SLOTS, 0, 0), policy, tolerance=1e9, half_life_steps=4, requests_per_step=len(GROUPS)
    )
    expected = 0
    for group, experts in requests:
        states, _ = pools.access([group * EXPERTS + expert for expert in experts])
        expected += sum(state == 1 for state in states)
    half_life = 4 if policy == "zipmoe" else None
    with model.engine(SLOTS, policy=policy, half_life_steps=half_life, io_threads=1) as engine:  # reads end in order
        assert f"policy {policy}" in engine.mode_line("exact", "eager")
        for group, experts in requests:
            handle = engine.group(GROUPS[group])
            with engine.request(handle, experts, ascending=True) as request:
                for expert in request:
                    for name in PARAMETERS:
                        original = model.experts[GROUPS[group], expert, name]
                        assert torch.equal(engine.matrix(handle, expert, name), original)
        counters = engine.statistics.counters()
    assert counters.hits == expected
    assert counters.misses == sum(len(experts) for _, experts in requests) - expected


def test_the_default_is_chosen_by_replay_and_a_half_life_fixes_it(model: PackedModel) -> None:
    with model.engine(SLOTS) as engine:
        line = engine.mode_line("exact", "eager")
        assert line.endswith("; policy auto, now zipmoe with a half-life of 16 steps")
    with model.engine(SLOTS, half_life_steps=4) as engine:
        assert engine.mode_line("exact", "eager").endswith("; policy zipmoe")
        assert engine.statistics.report().policy == "zipmoe with a half-life of 4 steps"


def test_unknown_policies_are_refused(model: PackedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="policy must be one of auto, zipmoe, lru"):
        model.engine(4, policy="oracle")
    with pytest.raises(InvalidArgumentError, match="half-life of activation counts must be above 0 steps"):
        model.engine(4, half_life_steps=0.0)


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "zipmoe"])
def test_a_half_life_without_effect_is_refused(model: PackedModel, policy: str) -> None:
    """Wherever the two meet: in one place, or the policy in one and the half-life in another."""
    refused = pytest.raises(InvalidArgumentError, match=f"the policy '{policy}' has no half-life")
    slots = PoolSlots(compressed=2)
    with refused:
        PolicyChoice.of(policy, 4.0)
    with refused:
        PoolSettings(slots, policy=policy, half_life_steps=4.0)
    with refused:
        model.engine(SLOTS, policy=policy, half_life_steps=4.0)
    with refused:
        model.engine(SLOTS, policy=policy, pools=PoolSettings(slots, half_life_steps=4.0))
    with refused:
        model.engine(SLOTS, half_life_steps=4.0, pools=PoolSettings(slots, policy=policy))
