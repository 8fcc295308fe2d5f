"""Workloads that move away from what a plan was made for (ZipMoE paper, appendix E.2): f~ = (1 - a) f + a mean(f)."""

from __future__ import annotations

import numpy as np

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.expected_cost import ExpectedCost
from zipmoe.planning.layer_costs import MakespanBound, ScheduledMakespan
from zipmoe.planning.partition import PoolPlan
from zipmoe.planning.trace import RoutingTrace, TraceStep
from zipmoe.planning.workload import Workload
from zipmoe.simulation.expert_shape import ExpertOnDevice


def shifted_trace(trace: RoutingTrace, amount: float, seed: int) -> RoutingTrace:
    """A trace in which the set of each step and layer is, with probability ``amount``, a uniformly drawn one.

    The marginals are then exactly (1 - a) f + a mean(f) in expectation, every set keeps its size, and what is left of
    the trace keeps its order. A larger amount replaces all the sets that a smaller one does, with the same draws.

    Args:
        trace: the workload as learnt.
        amount: a, from 0 (the trace as it is) to 1 (uniform routing).
        seed: the same one draws the same sets.

    Raises:
        InvalidArgumentError: ``amount`` is outside [0, 1].
    """
    if not 0 <= amount <= 1:
        raise InvalidArgumentError(f"a workload shift of {amount} is outside 0..1")
    random = np.random.default_rng(seed)
    steps = []
    for step in trace.steps:
        layers = []
        for ids, experts in zip(step.layers, trace.header.experts, strict=True):
            drawn = random.choice(experts, size=len(ids), replace=False)
            moved = random.random() < amount
            layers.append(tuple(int(expert) for expert in np.sort(drawn)) if moved else ids)
        steps.append(TraceStep(step.step, step.tokens, tuple(layers)))
    return RoutingTrace(trace.header, tuple(steps))


def expected_step_seconds(workload: Workload, expert: ExpertOnDevice, plan: PoolPlan) -> float:
    """What the planner's cost model expects of a plan, the same for all layers, under any workload.

    Args:
        workload: popularity of the ranks, for example ``Workload.shifted``.
        expert: bytes and costs of an expert on the machine.
        plan: slots of each layer; need not be on the planner's grid.

    Returns:
        Seconds of all sparse layers per step.
    """
    law, _ = workload.maximum_entropy_law()
    cost = ExpectedCost(
        law,
        expert.capabilities.pools,
        ScheduledMakespan(expert.costs, workload.assignments),
        MakespanBound(expert.costs, workload.assignments),
        1,
    )
    return float(cost.seconds(np.array([plan.slots], dtype=np.int64)).sum())
