"""Which experts make room for others: what one option offers with the single pool and with the pools F, C, S, E."""

from __future__ import annotations

from dataclasses import dataclass

from zipmoe import _native
from zipmoe.engine.option_checks import one_of
from zipmoe.errors import InvalidArgumentError

AUTO_POLICY = "auto"
"""Whichever policy would have had to read least in ghost caches that see the same requests (docs/pools.md)."""
DEFAULT_POLICY = AUTO_POLICY
"""Close to the best fixed policy in replays of real routing, whichever that is (docs/results/policy_replay.md)."""
POLICY_WITH_HALF_LIFE = "zipmoe"
DEFAULT_HALF_LIFE_STEPS = 16.0
"""Steps of the model after which an activation counts half (docs/results/ablation.md: 8 to 32 are close)."""


def policy_names() -> list[str]:
    """What can be chosen: ``auto`` and the policies of the native core."""
    return [AUTO_POLICY, *_native.cache_policies()]


def checked_policy(name: str) -> str:
    """The name of a policy; InvalidArgumentError, naming the choices, if there is none of this name."""
    return one_of("policy", name, policy_names())


def checked_half_life(steps: float) -> float:
    """A half-life; InvalidArgumentError unless it is above 0 (infinity: counts never decay)."""
    if not steps > 0:
        raise InvalidArgumentError(f"the half-life of activation counts must be above 0 steps, not {steps:g}")
    return steps


def checked_pair(policy: str | None, half_life_steps: float | None) -> None:
    """What a caller asked for, each or both: InvalidArgumentError if one is wrong, or if the policy has no half-life.

    Args:
        policy: None: the default, which a half-life makes the policy that has one.
        half_life_steps: None: the default.
    """
    if policy is not None:
        checked_policy(policy)
    if half_life_steps is None:
        return
    checked_half_life(half_life_steps)
    if policy not in (None, POLICY_WITH_HALF_LIFE):
        raise InvalidArgumentError(
            f"the policy {policy!r} has no half-life" + (" of its own" if policy == AUTO_POLICY else ""),
            hint=f"leave it out, or choose the policy {POLICY_WITH_HALF_LIFE}",
        )


@dataclass(frozen=True)
class PolicyChoice:
    """The policy of an engine."""

    name: str
    """One of ``policy_names``."""
    half_life_steps: float
    """Of the policy that has one."""

    @classmethod
    def of(cls, policy: str | None, half_life_steps: float | None) -> PolicyChoice:
        """What was asked for, completed by the defaults; a half-life alone asks for the policy that has one.

        Raises:
            InvalidArgumentError: an unknown policy, or a half-life that is not above 0 or that the policy has not.
        """
        checked_pair(policy, half_life_steps)
        if policy is None:
            policy = DEFAULT_POLICY if half_life_steps is None else POLICY_WITH_HALF_LIFE
        steps = DEFAULT_HALF_LIFE_STEPS if half_life_steps is None else half_life_steps
        return cls(policy, steps)

    @property
    def candidates(self) -> list[tuple[str, float]]:
        """Policies, with their half-lives, of which a replay chooses; empty: the policy is fixed."""
        return _native.default_candidates() if self.name == AUTO_POLICY else []

    @property
    def first(self) -> str:
        """The policy that rules at first."""
        return self.candidates[0][0] if self.candidates else self.name

    def describe(self, in_force: str) -> str:
        """For the mode line.

        Args:
            in_force: the policy that rules now, in words.
        """
        return f"{self.name}, now {in_force}" if self.name == AUTO_POLICY else self.name
