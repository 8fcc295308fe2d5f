"""Shifted traces have the marginals that were asked for; a plan is costed under a workload that it was not made for."""

from __future__ import annotations

import numpy as np
import pytest
from small_traces import COSTS, EXPERT, trace_of

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import CodecCapabilities, PoolPlan
from zipmoe.planning.planner import plan_pools
from zipmoe.planning.workload import Workload
from zipmoe.simulation.expert_shape import ExpertOnDevice
from zipmoe.simulation.workload_shift import expected_step_seconds, shifted_trace

CAPABILITIES = CodecCapabilities(separable=True, fused=False)
SMALL = ExpertOnDevice(EXPERT, COSTS, CAPABILITIES)


def test_nothing_moves_without_a_shift() -> None:
    trace = trace_of([[[0, 1], [2, 3]], [[0, 2], [1, 3]]], experts=4, top_k=2)
    assert shifted_trace(trace, 0.0, seed=3) == trace
    with pytest.raises(InvalidArgumentError, match=r"shift of 1\.5"):
        shifted_trace(trace, 1.5, seed=3)


def test_marginals_are_the_mixture() -> None:
    steps, amount = 20_000, 0.4
    trace = trace_of([[[0, 1]]] * steps, experts=8, top_k=2)
    moved = shifted_trace(trace, amount, seed=1)
    assert all(len(step.layers[0]) == 2 for step in moved.steps)
    frequency = moved.activations(0).mean(axis=0)
    uniform = amount * 2 / 8
    expected = np.array([1 - amount + uniform] * 2 + [uniform] * 6)
    assert np.abs(frequency - expected).max() < 5 * np.sqrt(0.25 / steps)


def test_a_larger_shift_contains_a_smaller_one() -> None:
    trace = trace_of([[[0, 1]]] * 400, experts=8, top_k=2)
    small, large = (shifted_trace(trace, amount, seed=1) for amount in (0.3, 0.7))
    moved = [n for n, step in enumerate(small.steps) if step != trace.steps[n]]
    assert 60 < len(moved) < 180
    assert all(small.steps[n] == large.steps[n] for n in moved)


def test_expected_seconds_are_the_planners() -> None:
    workload = Workload.uniform(layers=3, experts=6, top_k=2)
    report = plan_pools(workload, COSTS, EXPERT, 3 * EXPERT.full, capabilities=CAPABILITIES)
    assert expected_step_seconds(workload, SMALL, report.plan) == pytest.approx(report.step_seconds)
    # One expert per step: a miss takes 1.625 s, an expert in F 0.125 s, and half of the experts are in F.
    single = Workload.uniform(layers=2, experts=6, top_k=1)
    assert expected_step_seconds(single, SMALL, PoolPlan(full=3)) == pytest.approx(2 * (1.625 + 0.125) / 2)
