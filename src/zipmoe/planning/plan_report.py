"""What the planner found, for people and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zipmoe.planning.partition import ExpertBytes, ExpertState, PoolPlan


@dataclass(frozen=True)
class LayerForecast:
    """One layer under its plan."""

    plan: PoolPlan
    seconds: float
    """Expected makespan per step."""
    hit_rates: Mapping[ExpertState, float]
    """Share of the activations that find their expert in F, C, S, E, or not at all (M)."""
    read_bytes: float
    """Expected bytes read per step."""


@dataclass(frozen=True)
class Candidate:
    """A partition, the same for all layers, and its price."""

    plan: PoolPlan
    held_bytes: int
    """Per layer."""
    expert_seconds: float
    """Expected makespans of all layers together."""
    other_seconds: float = 0.0
    """The rest of a step."""

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return self.expert_seconds + self.other_seconds


@dataclass(frozen=True)
class PlanReport:
    """The result of planning; :meth:`to_json` is what ``--json`` prints."""

    layers: tuple[LayerForecast, ...]
    shared: bool
    """Whether all layers have the same plan."""
    step_seconds: float
    """Expected seconds per step: the sparse layers' makespans plus what the caller said the rest takes."""
    other_seconds: float
    """That rest."""
    runner_ups: tuple[Candidate, ...]
    """The next best partitions of the grid, best first."""
    pure: Mapping[str, Candidate]
    """The whole budget in one pool, by its letter; ``none``: no cache at all."""
    candidates: tuple[Candidate, ...]
    """All partitions of the grid, for plots."""
    asked: tuple[Candidate, ...]
    """The partitions whose price the caller asked for."""
    separate_gain: float
    """Share of the layers' time that separate plans per layer save over the best shared one, on paper."""
    budget_bytes: int
    """Per layer, as given."""
    expert: ExpertBytes
    experts: int
    pools: tuple[ExpertState, ...]
    """Pools that could be used."""
    cost: str
    """``scheduler``: makespans of the native scheduler; ``given``: of the function that the caller passed; ``bound``:
    the lower bound, because activated sets were too large to schedule pattern by pattern."""
    hit_law: str
    """``exact``: every hit pattern; ``sampled``: drawn activated sets, because patterns were too many."""
    workload: str
    notes: tuple[str, ...]

    @property
    def plan(self) -> PoolPlan:
        """The plan of the first layer: of all of them, if shared."""
        return self.layers[0].plan

    @property
    def expert_seconds(self) -> float:
        """The sparse layers' part of ``step_seconds``."""
        return sum(layer.seconds for layer in self.layers)

    @property
    def held_bytes(self) -> int:
        """Memory of the pools of all layers."""
        return sum(layer.plan.held_bytes(self.expert) for layer in self.layers)

    @property
    def read_bytes_per_step(self) -> float:
        """Expected bytes read per step, all layers."""
        return sum(layer.read_bytes for layer in self.layers)

    @property
    def hit_rates(self) -> dict[ExpertState, float]:
        """Mean over layers."""
        return {state: sum(layer.hit_rates[state] for layer in self.layers) / len(self.layers) for state in ExpertState}

    def to_json(self, *, with_candidates: bool = False) -> dict[str, Any]:
        """A JSON value: times in seconds, sizes in bytes, pools by letter."""
        value: dict[str, Any] = {
            "workload": self.workload,
            "budget_bytes_per_layer": self.budget_bytes,
            "held_bytes": self.held_bytes,
            "pools": "".join(pool.letter for pool in self.pools),
            "experts": self.experts,
            "expert_bytes": {pool.letter: self.expert.held(pool) for pool in self.pools},
            "shared": self.shared,
            "plan": _slots(self.plan) if self.shared else [_slots(layer.plan) for layer in self.layers],
            "step_seconds": self.step_seconds,
            "expert_seconds": self.expert_seconds,
            "other_seconds": self.other_seconds,
            "hit_rates": _by_letter(self.hit_rates),
            "read_bytes_per_step": self.read_bytes_per_step,
            "cost": self.cost,
            "hit_law": self.hit_law,
            "separate_gain": self.separate_gain,
            "layers": [
                {
                    "plan": _slots(layer.plan),
                    "seconds": layer.seconds,
                    "hit_rates": _by_letter(layer.hit_rates),
                    "read_bytes": layer.read_bytes,
                }
                for layer in self.layers
            ],
            "runner_ups": [_candidate(candidate) for candidate in self.runner_ups],
            "pure": {name: _candidate(candidate) for name, candidate in self.pure.items()},
            "notes": list(self.notes),
        }
        if with_candidates:
            value["candidates"] = [_candidate(candidate) for candidate in self.candidates]
        return value


def _slots(plan: PoolPlan) -> dict[str, int]:
    return dict(zip("FCSE", plan.slots, strict=True))


def _by_letter(rates: Mapping[ExpertState, float]) -> dict[str, float]:
    return {state.letter: rate for state, rate in rates.items()}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "plan": _slots(candidate.plan),
        "held_bytes_per_layer": candidate.held_bytes,
        "step_seconds": candidate.step_seconds,
        "expert_seconds": candidate.expert_seconds,
    }
