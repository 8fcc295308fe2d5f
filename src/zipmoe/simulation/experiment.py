"""One simulated experiment: warm up, plan from what was seen, measure the rest."""

from __future__ import annotations

from collections.abc import Sequence

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import ExpertState, PoolPlan
from zipmoe.planning.plan_report import PlanReport
from zipmoe.planning.planner import plan_pools
from zipmoe.planning.trace import RoutingTrace
from zipmoe.planning.workload import Workload
from zipmoe.simulation.expert_shape import ExpertOnDevice
from zipmoe.simulation.replay import CacheSettings, replay


def warm_up_steps(trace: RoutingTrace, fraction: float) -> int:
    """Steps of a warm-up of this share of the trace.

    Raises:
        InvalidArgumentError: a fraction outside [0, 1).
    """
    if not 0 <= fraction < 1:
        raise InvalidArgumentError(f"a warm-up of {fraction:g} is not a share of the trace", hint="at least 0, below 1")
    return int(len(trace.steps) * fraction)


def layer_budget_bytes(trace: RoutingTrace, expert: ExpertOnDevice, memory_share: float) -> int:
    """Pool memory of one layer: a share of its experts' BF16 bytes.

    Raises:
        InvalidArgumentError: a share outside (0, 1], or layers that differ.
    """
    if not 0 < memory_share <= 1:
        raise InvalidArgumentError(f"a memory share of {memory_share:g} is out of range", hint="above 0, at most 1")
    if len(set(trace.header.experts)) != 1:
        raise InvalidArgumentError("layers with different numbers of experts have no common share; give slots instead")
    return int(trace.header.experts[0] * expert.bytes.full * memory_share)


def even_plan(
    trace: RoutingTrace, expert: ExpertOnDevice, memory_share: float, pools: Sequence[ExpertState]
) -> PoolPlan:
    """The budget in equal parts for the given pools, rounded down to whole slots: a plan without planning."""
    budget = layer_budget_bytes(trace, expert, memory_share)
    slots = [0, 0, 0, 0]
    left = trace.header.experts[0]
    for pool in sorted(pools):
        slots[pool] = min(budget // len(pools) // expert.bytes.held(pool), left)
        left -= slots[pool]
    return PoolPlan(*slots)


def planned(
    trace: RoutingTrace,
    expert: ExpertOnDevice,
    memory_share: float,
    *,
    learn_steps: int,
    half_life_steps: float,
    pools: Sequence[ExpertState] | None = None,
) -> PoolPlan:
    """The planner's choice for a budget, from the first ``learn_steps`` steps of a trace only.

    Raises:
        InvalidArgumentError: too few steps to learn from, or pools that the codec does not have.
    """
    return _report(trace, expert, memory_share, learn_steps, half_life_steps, pools).plan


def planned_and_replayed(
    trace: RoutingTrace,
    expert: ExpertOnDevice,
    memory_share: float,
    *,
    learn_steps: int,
    settings: CacheSettings,
    pools: Sequence[ExpertState] | None = None,
) -> PoolPlan:
    """Of the planner's choice, its runner-ups and the pure plans, the one that replays the learnt steps fastest.

    The planner takes experts to lie where their rank belongs; a replay also sees what it costs to get there. As for
    ``planned``, nothing behind ``learn_steps`` is looked at.
    """
    report = _report(trace, expert, memory_share, learn_steps, settings.half_life_steps, pools)
    seen = RoutingTrace(trace.header, trace.steps[:learn_steps])
    others = [*report.runner_ups, *report.pure.values()]
    plans = list(dict.fromkeys([report.plan, *(candidate.plan for candidate in others)]))

    def seconds(plan: PoolPlan) -> float:
        return replay(seen, plan, expert.costs, expert.bytes, settings, warm_up_steps=learn_steps // 2).seconds_per_step

    return min(plans, key=seconds)


def _report(
    trace: RoutingTrace,
    expert: ExpertOnDevice,
    memory_share: float,
    learn_steps: int,
    half_life_steps: float,
    pools: Sequence[ExpertState] | None,
) -> PlanReport:
    if learn_steps < 2:
        raise InvalidArgumentError("there is nothing to plan from", hint="a longer --warm-up, or give --slots")
    seen = RoutingTrace(trace.header, trace.steps[:learn_steps])
    workload = Workload.running(seen, half_life_steps, int(min(learn_steps // 2, half_life_steps)))
    budget = layer_budget_bytes(trace, expert, memory_share)
    return plan_pools(
        workload, expert.costs, expert.bytes, budget, capabilities=expert.capabilities, pools=pools, worthwhile_gain=0.0
    )
