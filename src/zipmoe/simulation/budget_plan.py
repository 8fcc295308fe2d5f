"""The plan of a run: which pools a packed folder gets in the memory that a budget leaves for experts.

The planner proposes: its choice, the next best partitions and the pure ones. With a trace these are replayed, and the
fastest is taken; without one the planner's own expectation decides. All times are of whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zipmoe.engine.cache_policy import DEFAULT_HALF_LIFE_STEPS
from zipmoe.engine.pool_budget import pools_bytes, single_pool_holds_all
from zipmoe.engine.pool_slots import PoolSlots
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.folder_plan import FolderCosts, plan_folder, workload_of
from zipmoe.planning.packed_products import ALL_PRODUCTS, PackedProducts
from zipmoe.planning.partition import POOLS, ExpertState, PoolPlan
from zipmoe.planning.plan_report import Candidate, PlanReport
from zipmoe.planning.step_costs import StepCosts, dense_bytes, step_costs
from zipmoe.planning.trace import RoutingTrace
from zipmoe.planning.workload import Workload
from zipmoe.simulation.replayed_choice import LearntSteps
from zipmoe.store.manifest import Manifest

PROPOSALS = 8
"""Partitions of the grid that are replayed beside the planner's choice and the pure ones."""
EQUALLY_FAST = 0.02
"""Partitions whose experts' times are closer than this are equally fast: the trace is one of many possible ones."""
LEAST_REPLAYED_STEPS = 8
"""Fewer counted steps say less than the rank model does."""


@dataclass(frozen=True)
class PlanRequest:
    """What a plan is made for."""

    manifest: Manifest
    profile: DeviceProfile
    top_k: int
    """Experts per token."""
    free_bytes: int
    """Memory for the pools of all layers, staging included."""
    trace: RoutingTrace | None = None
    """Routing of this model; None: all experts alike."""
    half_life_steps: float = DEFAULT_HALF_LIFE_STEPS
    pools: tuple[ExpertState, ...] | None = None
    """Restrict the pools; None: all that the codec has."""
    looked_up: Collection[str] = ()
    """Full names of embeddings (``dense_bytes``)."""
    products: PackedProducts = ALL_PRODUCTS
    """Which ones of the run read the packed form, if the codec has kernels for that."""


@dataclass(frozen=True)
class StepForecast:
    """One partition, the same for all layers, and what a step takes with it."""

    plan: PoolPlan
    held_bytes: int
    """All layers together."""
    expected_seconds: float
    """The experts' part, by the rank model."""
    replayed_seconds: float | None
    """The experts' part, by replay; None: not replayed."""
    other_seconds: float
    """The rest of a step."""
    hit_rates: Mapping[ExpertState, float] | None
    """By replay."""
    read_bytes: float | None
    """Per step, by replay."""

    @property
    def expert_seconds(self) -> float:
        """The experts' part by the better of the two forecasts: the replay, if there is one."""
        return self.expected_seconds if self.replayed_seconds is None else self.replayed_seconds

    @property
    def step_seconds(self) -> float:
        """The whole step."""
        return self.expert_seconds + self.other_seconds

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "plan": dict(zip("FCSE", self.plan.slots, strict=True)),
            "held_bytes": self.held_bytes,
            "step_seconds": self.step_seconds,
            "expert_seconds": self.expert_seconds,
            "other_seconds": self.other_seconds,
            "expected_expert_seconds": self.expected_seconds,
            "replayed_expert_seconds": self.replayed_seconds,
        }


@dataclass(frozen=True)
class BudgetPlan:
    """The result."""

    chosen: StepForecast
    """The fastest partition (within ``EQUALLY_FAST``), or the one whose price was asked for."""
    runner_ups: tuple[StepForecast, ...]
    """The other proposals, the fastest first; pure ones are among them."""
    pure: Mapping[str, StepForecast]
    """The whole budget in one pool, by its letter; ``none``: no cache at all."""
    single_pool: StepForecast | None
    """One pool of whole records for all layers, if it holds every expert."""
    rest: StepCosts
    """What ``other_seconds`` consists of."""
    report: PlanReport
    """The planner's own, with all partitions of the grid."""
    workload: Workload
    replayed_steps: int
    """Steps that were counted in each replay; 0: nothing was replayed."""
    fits: bool
    """Whether the chosen pools fit into the memory: only a partition that was asked for may not."""
    planning_seconds: float

    @property
    def slots(self) -> PoolSlots | None:
        """The pools to run with; None: the single pool is faster."""
        if self.single_pool is not None and self.single_pool.step_seconds < self.chosen.step_seconds:
            return None
        return PoolSlots(*self.chosen.plan.slots)

    def to_json(self) -> dict[str, Any]:
        """What ``zipmoe plan --json`` prints: times in seconds, sizes in bytes, pools by letter."""
        hit_rates = self.chosen.hit_rates or self.report.hit_rates
        read_bytes = self.chosen.read_bytes
        return {
            **self.report.to_json(),
            **self.chosen.to_json(),
            "hit_rates": {state.letter: hit_rates[state] for state in ExpertState},
            "read_bytes_per_step": self.report.read_bytes_per_step if read_bytes is None else read_bytes,
            "rest_seconds": {
                "decode": self.rest.decode_seconds,
                "execute": self.rest.execute_seconds,
                "dispatch": self.rest.dispatch_seconds,
            },
            "replayed_steps": self.replayed_steps,
            "fits": self.fits,
            "single_pool": self.slots is None,
            "runner_ups": [forecast.to_json() for forecast in self.runner_ups],
            "pure": {name: forecast.to_json() for name, forecast in self.pure.items()},
            "planning_seconds": self.planning_seconds,
        }


def plan_for_budget(request: PlanRequest, asked: PoolSlots | None = None) -> BudgetPlan:
    """Choose the pools of a run, or forecast those that are asked for.

    Args:
        request: folder, machine, memory and routing.
        asked: forecast exactly this partition instead of choosing one.

    Raises:
        InvalidArgumentError: layers with different numbers of experts, a trace of another model, pools that the codec
            does not have, or a machine that was not measured with the codec.
    """
    began = time.perf_counter()
    workload = workload_of(request.manifest, request.top_k, request.trace, request.half_life_steps)
    folder = FolderCosts.of(request.manifest, request.profile, request.products)
    given = None if asked is None else _given(asked, workload, folder)
    rest = _rest(request, workload)
    everything = PoolPlan(compressed=workload.experts)
    in_one_pool = (
        request.pools is None and asked is None and single_pool_holds_all(request.manifest, request.free_bytes)
    )
    extra = [plan for plan in (given, everything if in_one_pool else None) if plan is not None]
    report = _fitting_report(request, workload, rest.seconds, extra)
    learnt = None if request.trace is None else LearntSteps.of(request.trace)
    if learnt is not None and learnt.counted < LEAST_REPLAYED_STEPS:
        learnt = None
    forecasts = {plan: _forecast(candidate, request, folder, learnt) for plan, candidate in _proposals(report).items()}
    fitting = [forecast for plan, forecast in forecasts.items() if _fits(request, plan)]
    chosen = forecasts[given] if given is not None else _best(fitting)
    return BudgetPlan(
        chosen=chosen,
        runner_ups=tuple(sorted((forecast for forecast in fitting if forecast is not chosen), key=_price)),
        pure={name: forecasts[candidate.plan] for name, candidate in report.pure.items()},
        single_pool=forecasts[everything] if in_one_pool else None,
        rest=rest,
        report=report,
        workload=workload,
        replayed_steps=learnt.counted if learnt is not None else 0,
        fits=_fits(request, chosen.plan),
        planning_seconds=time.perf_counter() - began,
    )


def _given(asked: PoolSlots, workload: Workload, folder: FolderCosts) -> PoolPlan:
    plan = PoolPlan(*asked.within(workload.experts).experts)
    folder.capabilities.allowed([pool for pool, slots in zip(POOLS, plan.slots, strict=True) if slots] or None)
    return plan


def _rest(request: PlanRequest, workload: Workload) -> StepCosts:
    sizes = workload.size_law()
    return step_costs(
        request.profile,
        request.manifest.codec.name,
        dense_bytes(request.manifest, request.looked_up),
        len(request.manifest.expert_groups),
        float((sizes @ range(sizes.shape[1])).mean()),
        products=request.products,
    )


def _fitting_report(
    request: PlanRequest, workload: Workload, other_seconds: float, asked: Sequence[PoolPlan]
) -> PlanReport:
    """The planner's report, made for less memory as long as its choice does not fit with its staging."""
    layers = len(request.manifest.expert_groups)
    given = request.free_bytes - pools_bytes(request.manifest, PoolSlots())
    while True:
        report = plan_folder(
            request.manifest,
            request.profile,
            workload,
            max(given // layers, 1),
            request.pools,
            products=request.products,
            other_seconds=other_seconds,
            asked=asked,
            runner_ups=PROPOSALS,
        )
        surplus = pools_bytes(request.manifest, PoolSlots(*report.plan.slots)) - request.free_bytes
        if surplus <= 0 or not report.plan.total_slots:
            return report
        given -= surplus


def _fits(request: PlanRequest, plan: PoolPlan) -> bool:
    return plan.total_slots == 0 or pools_bytes(request.manifest, PoolSlots(*plan.slots)) <= request.free_bytes


def _proposals(report: PlanReport) -> dict[PoolPlan, Candidate]:
    choice = Candidate(report.plan, report.plan.held_bytes(report.expert), report.expert_seconds, report.other_seconds)
    proposals = [choice, *report.runner_ups, *report.pure.values(), *report.asked]
    return {candidate.plan: candidate for candidate in proposals}


def _forecast(
    candidate: Candidate, request: PlanRequest, folder: FolderCosts, learnt: LearntSteps | None
) -> StepForecast:
    found = None if learnt is None else learnt.replayed(candidate.plan, folder, request.half_life_steps)
    return StepForecast(
        plan=candidate.plan,
        held_bytes=candidate.held_bytes * len(request.manifest.expert_groups),
        expected_seconds=candidate.expert_seconds,
        replayed_seconds=None if found is None else found.seconds_per_step,
        other_seconds=candidate.other_seconds,
        hit_rates=None if found is None else found.hit_rates,
        read_bytes=None if found is None else found.read_bytes_per_step,
    )


def _best(forecasts: Sequence[StepForecast]) -> StepForecast:
    """Of those that are as fast as the fastest: the fewest pools, then the one that the rank model expects most of."""
    limit = min(forecast.expert_seconds for forecast in forecasts) * (1 + EQUALLY_FAST)
    equal = [forecast for forecast in forecasts if forecast.expert_seconds <= limit]
    return min(equal, key=lambda f: (sum(n > 0 for n in f.plan.slots), f.expected_seconds, f.plan.slots))


def _price(forecast: StepForecast) -> tuple[float, int, tuple[int, ...]]:
    return forecast.step_seconds, forecast.held_bytes, forecast.plan.slots
