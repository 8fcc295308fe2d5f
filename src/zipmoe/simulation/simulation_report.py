"""What a replay found, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zipmoe.planning.partition import ExpertState, PoolPlan


@dataclass(frozen=True)
class SimulationReport:
    """Means over the counted steps."""

    policy: str
    chosen_policy: str | None
    """Of the policy ``auto``: the one that was in force at the end, in words."""
    policy_changes: int
    """How often it changed, warm-up included."""
    scope: str
    plan: PoolPlan | None
    """Of every layer; None if layers differ."""
    held_bytes: int
    """Memory of the pools of all layers."""
    steps: int
    """Counted ones, without warm-up."""
    tokens: int
    seconds_per_step: float
    """Sparse layers one after the other, and what the caller said the rest of a step takes."""
    read_bytes_per_step: float
    hit_rates: Mapping[ExpertState, float]
    """Share of the activations that found their expert in F, C, S, E, or not at all (M)."""
    disk_utilisation: float
    """Share of the time that the disk was reading."""
    worker_utilisation: float
    """Mean share of the time that a decompression worker was decompressing."""
    execution_utilisation: float
    """Share of the time that experts were executed or recombined."""
    admissions_per_step: float
    """Experts that entered a pool from outside."""
    promotions_per_step: float
    """Moves to a pool that leaves less work."""
    demotions_per_step: float
    """Moves to a pool that leaves more work: parts are dropped, nothing is read."""
    evictions_per_step: float
    """Experts that left memory, those dropped right after use not counted: they never entered."""

    @property
    def hit_rate(self) -> float:
        """Share of the activations of which anything was in memory."""
        return 1 - self.hit_rates[ExpertState.MISS]

    @property
    def seconds_per_token(self) -> float:
        """Time per token, all sequences of a batch counted."""
        return self.seconds_per_step * self.steps / self.tokens

    @property
    def read_bytes_per_token(self) -> float:
        """Bytes read per token."""
        return self.read_bytes_per_step * self.steps / self.tokens

    def to_json(self) -> dict[str, Any]:
        """A JSON value: times in seconds, sizes in bytes, pools by letter."""
        value = {field.name: getattr(self, field.name) for field in fields(self)}
        value["plan"] = None if self.plan is None else dict(zip("FCSE", self.plan.slots, strict=True))
        value["hit_rates"] = {state.letter: rate for state, rate in self.hit_rates.items()}
        value["hit_rate"] = self.hit_rate
        value["seconds_per_token"] = self.seconds_per_token
        value["read_bytes_per_token"] = self.read_bytes_per_token
        return value
