"""Replay of a routing trace through pools, policy and scheduler of every sparse layer.

One step after the other, one layer after the other, as a forward pass: the layer's experts are looked up in its pools,
the states found are scheduled on the machine model (one disk, L decompression workers, one execution resource), and the
pools change afterwards. A layer ends with its last execution; nothing is fetched ahead of the router.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zipmoe import _native
from zipmoe.engine.cache_policy import (
    AUTO_POLICY,
    DEFAULT_HALF_LIFE_STEPS,
    DEFAULT_POLICY,
    PolicyChoice,
    checked_half_life,
    checked_policy,
)
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.layer_costs import LayerCosts, ScheduledMakespan
from zipmoe.planning.partition import ExpertBytes, ExpertState, PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.layer_work import LayerWork
from zipmoe.simulation.simulation_report import SimulationReport

SCOPES = ("layer", "model")
MISSED_SHARE = (0.0, 0.0, 0.5, 0.5, 1.0)
"""Costs by state where nothing is known of bytes and rates: the share of an expert's parts that must be read."""


@dataclass(frozen=True)
class CacheSettings:
    """How the pools are driven."""

    policy: str = DEFAULT_POLICY
    """A name of ``policy_names()``."""
    half_life_steps: float = DEFAULT_HALF_LIFE_STEPS
    """Steps after which an activation counts half (``zipmoe``); infinity: never."""
    tolerance: float | None = None
    """delta of the rank thresholds (``zipmoe``), in experts; None: 10 % of the experts that share the pools."""
    seed: int = 0
    """Of ``marking``."""
    scope: str = "layer"
    """``layer``: every layer has pools of its own; ``model``: all layers share them, with the slots of all plans."""

    def __post_init__(self) -> None:
        checked_policy(self.policy)
        checked_half_life(self.half_life_steps)
        if self.tolerance is not None and not self.tolerance >= 0:
            raise InvalidArgumentError(f"a tolerance of {self.tolerance:g} experts is negative")
        if self.scope not in SCOPES:
            raise InvalidArgumentError(f"scope {self.scope!r} is unknown", hint=f"choose {' or '.join(SCOPES)}")


class ModelPools:
    """The pools of all sparse layers of a model."""

    def __init__(
        self,
        experts: Sequence[int],
        plans: Sequence[PoolPlan],
        settings: CacheSettings,
        state_costs: Sequence[float] = MISSED_SHARE,
    ) -> None:
        """Empty pools.

        Args:
            experts: of each layer.
            plans: slots of each layer; with scope ``model`` they are added up.
            settings: policy and its parameters.
            state_costs: what an expert costs that is found in F, C, S, E, or not at all, in any unit: what the policy
                ``auto`` keeps low.
        """
        if len(plans) != len(experts):
            raise InvalidArgumentError(f"{len(plans)} plans for {len(experts)} layers")
        if settings.scope == "layer":
            shared = [(count, plan.slots) for count, plan in zip(experts, plans, strict=True)]
            self._firsts = [0] * len(experts)
        else:
            full, compressed, sign_mantissa, exponent = (int(n) for n in np.sum([plan.slots for plan in plans], axis=0))
            shared = [(sum(experts), (full, compressed, sign_mantissa, exponent))]
            self._firsts = [int(n) for n in np.cumsum([0, *experts[:-1]])]
        self._replayed: _native.ReplayedPools | None = None
        self._pools: list[_native.LayerPools] = []
        self._shared = len(shared) == 1
        if settings.policy == AUTO_POLICY:
            self._replayed = _native.ReplayedPools(
                [(count, slots, state_costs) for count, slots in shared],
                candidates=PolicyChoice.of(settings.policy, None).candidates,
                requests_per_step=len(experts),
                tolerance=settings.tolerance,
                seed=settings.seed,
            )
            return
        self._pools = [
            _native.LayerPools(
                count,
                slots,
                settings.policy,
                tolerance=settings.tolerance,
                half_life_steps=settings.half_life_steps,
                requests_per_step=len(experts) // len(shared),
                seed=settings.seed + number,
            )
            for number, (count, slots) in enumerate(shared)
        ]

    def access(self, layer: int, ids: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Execute a layer: states of its experts before, and moves (expert, from, to) made afterwards.

        With scope ``model`` the experts in the moves are numbered through all layers.
        """
        first = self._firsts[layer]
        wanted = [first + expert for expert in ids]
        pool = 0 if self._shared else layer
        return self._pools[pool].access(wanted) if self._replayed is None else self._replayed.access(pool, wanted)

    @property
    def chosen(self) -> tuple[str, int] | None:
        """Under ``auto``: the policy in force, in words, and how often it changed; else None."""
        return None if self._replayed is None else (self._replayed.policy, self._replayed.policy_changes)


@dataclass
class _Totals:
    steps: int = 0
    tokens: int = 0
    states: Counter[int] = field(default_factory=Counter)
    read_bytes: int = 0
    layer_seconds: float = 0.0
    work: LayerWork = field(default_factory=LayerWork)
    admissions: int = 0
    promotions: int = 0
    demotions: int = 0
    evictions: int = 0


def replay(
    trace: RoutingTrace,
    plans: PoolPlan | Sequence[PoolPlan],
    costs: LayerCosts,
    expert: ExpertBytes,
    settings: CacheSettings | None = None,
    *,
    warm_up_steps: int = 0,
    other_seconds: float = 0.0,
    order: str = "cache_affinity",
    counts: Sequence[bool] | None = None,
) -> SimulationReport:
    """Replay a trace, beginning with empty pools.

    Args:
        trace: all its steps are replayed, in order.
        plans: slots of every layer's pools; one plan for all or one for each.
        costs: constants of a layer's work on the machine; ``costs.shards`` 0 is a codec without chunks.
        expert: bytes of an expert in each state.
        settings: policy; None: the default.
        warm_up_steps: first steps, which fill the pools and are not counted.
        other_seconds: time of a step outside of the experts, during which the disk and the workers are idle.
        order: ``cache_affinity`` or ``fifo``.
        counts: for every step whether it is counted once the warm-up is over; None: all are.

    Raises:
        InvalidArgumentError: nothing to count, more slots than experts, or S and E pools for a codec without chunks.
    """
    settings = settings or CacheSettings()
    experts = trace.header.experts
    layer_plans = [plans] * len(experts) if isinstance(plans, PoolPlan) else list(plans)
    for plan, count in zip(layer_plans, experts, strict=False):
        if plan.total_slots > count:
            raise InvalidArgumentError(
                f"a plan of {plan.describe()} has more slots than the {count} experts of a layer",
                hint="a smaller memory share, or fewer slots",
            )
        if costs.shards == 0 and plan.sign_mantissa + plan.exponent > 0:
            raise InvalidArgumentError(
                f"a plan of {plan.describe()} needs chunks that can be held apart, which this codec does not have",
                hint="use pools F and C, or a separable codec such as zstd",
            )
    if not 0 <= warm_up_steps < len(trace.steps):
        raise InvalidArgumentError(
            f"{len(trace.steps)} steps leave nothing to count after {warm_up_steps} steps of warm-up",
            hint="a longer trace, or a smaller --warm-up",
        )
    if counts is not None and (len(counts) != len(trace.steps) or not any(counts[warm_up_steps:])):
        raise InvalidArgumentError("no step of the trace is to be counted", hint="a longer trace")
    state_costs = [LayerWork.of(costs, [state], 1.0).seconds(costs.workers) for state in ExpertState]
    pools = ModelPools(experts, layer_plans, settings, state_costs)
    known: dict[tuple[int, tuple[int, ...]], tuple[float, LayerWork]] = {}
    totals = _Totals()
    for number, step in enumerate(trace.steps):
        assignments = step.tokens * trace.header.top_k
        counted = number >= warm_up_steps and (counts is None or counts[number])
        totals.steps += counted
        totals.tokens += step.tokens * counted
        for layer, ids in enumerate(step.layers):
            states, moves = pools.access(layer, ids)
            if not counted:
                continue
            key = (assignments, tuple(states))
            if key not in known:
                seconds = ScheduledMakespan(costs, assignments, order)(np.array(states, dtype=np.uint8))
                known[key] = seconds, LayerWork.of(costs, states, assignments)
            seconds, work = known[key]
            totals.layer_seconds += seconds
            totals.work += work
            totals.states.update(states)
            totals.read_bytes += sum(expert.read(ExpertState(state)) for state in states)
            for _, before, after in moves:
                totals.admissions += before == ExpertState.MISS
                totals.evictions += after == ExpertState.MISS
                totals.promotions += after < before != ExpertState.MISS
                totals.demotions += before < after != ExpertState.MISS
    return _report(totals, costs, layer_plans, expert, settings, other_seconds, pools.chosen)


def _report(
    totals: _Totals,
    costs: LayerCosts,
    plans: Sequence[PoolPlan],
    expert: ExpertBytes,
    settings: CacheSettings,
    other_seconds: float,
    chosen: tuple[str, int] | None,
) -> SimulationReport:
    requested = totals.states.total()
    seconds = totals.layer_seconds + other_seconds * totals.steps
    return SimulationReport(
        policy=settings.policy,
        chosen_policy=chosen[0] if chosen else None,
        policy_changes=chosen[1] if chosen else 0,
        scope=settings.scope,
        plan=plans[0] if len(set(plans)) == 1 else None,
        held_bytes=sum(plan.held_bytes(expert) for plan in plans),
        steps=totals.steps,
        tokens=totals.tokens,
        seconds_per_step=seconds / totals.steps,
        read_bytes_per_step=totals.read_bytes / totals.steps,
        hit_rates={state: totals.states[state] / requested for state in ExpertState},
        disk_utilisation=totals.work.io_seconds / seconds if seconds else 0.0,
        worker_utilisation=totals.work.decompress_seconds / (costs.workers * seconds) if seconds else 0.0,
        execution_utilisation=totals.work.execution_seconds / seconds if seconds else 0.0,
        admissions_per_step=totals.admissions / totals.steps,
        promotions_per_step=totals.promotions / totals.steps,
        demotions_per_step=totals.demotions / totals.steps,
        evictions_per_step=totals.evictions / totals.steps,
    )
