"""Which experts make room for others: what one option offers with the single pool and with the pools F, C, S, E."""

from __future__ import annotations

from zipmoe import _native
from zipmoe.engine.option_checks import one_of
from zipmoe.errors import InvalidArgumentError

DEFAULT_POLICY = "zipmoe"
"""The paper's decayed counts: more hits than LRU in replays of real routing (docs/simulation.md)."""
POLICY_WITH_HALF_LIFE = "zipmoe"
DEFAULT_HALF_LIFE_STEPS = 16.0
"""Steps of the model after which an activation counts half (docs/results/ablation.md: 8 to 32 are close)."""


def checked_policy(name: str) -> str:
    """The name of a policy; InvalidArgumentError, naming the choices, if there is none of this name."""
    return one_of("policy", name, _native.cache_policies())


def checked_half_life(steps: float) -> float:
    """A half-life; InvalidArgumentError unless it is above 0 (infinity: counts never decay)."""
    if not steps > 0:
        raise InvalidArgumentError(f"the half-life of activation counts must be above 0 steps, not {steps:g}")
    return steps


def checked_pair(policy: str | None, half_life_steps: float | None) -> None:
    """What a caller asked for, each or both: InvalidArgumentError if one is wrong, or if the policy has no half-life.

    Args:
        policy: None: the default.
        half_life_steps: None: the default.
    """
    name = DEFAULT_POLICY if policy is None else checked_policy(policy)
    if half_life_steps is None:
        return
    checked_half_life(half_life_steps)
    if name != POLICY_WITH_HALF_LIFE:
        raise InvalidArgumentError(
            f"the policy {name!r} has no half-life", hint=f"leave it out, or choose the policy {POLICY_WITH_HALF_LIFE}"
        )
