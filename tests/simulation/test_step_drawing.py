"""Drawn steps agree with the counts exactly, and with the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.published_traces import PromptCounts
from zipmoe.planning.trace import TraceError
from zipmoe.simulation.step_drawing import draw_sets, draw_steps


@given(st.integers(0, 1 << 32))
@settings(max_examples=200, deadline=None)
def test_every_step_has_distinct_experts_and_counts_come_out(seed: int) -> None:
    random = np.random.default_rng(seed)
    experts, steps = int(random.integers(1, 12)), int(random.integers(1, 15))
    size = int(random.integers(1, experts + 1))
    skew = random.dirichlet(np.full(experts, 0.3)) + 1e-9
    truth = [random.choice(experts, size, replace=False, p=skew / skew.sum()) for _ in range(steps)]
    counts = np.bincount(np.concatenate(truth), minlength=experts)
    sets = draw_sets(counts, steps, size, random)
    assert sets.shape == (steps, size)
    assert (np.diff(sets, axis=1) > 0).all()
    assert (np.bincount(sets.ravel(), minlength=experts) == counts).all()


def test_all_arrangements_are_drawn_alike() -> None:
    random = np.random.default_rng(1)
    seen: dict[bytes, int] = {}
    for _ in range(3000):
        drawn = draw_sets(np.array([1, 1, 1]), 3, 1, random).tobytes()
        seen[drawn] = seen.get(drawn, 0) + 1
    assert len(seen) == 6
    assert all(abs(count - 500) < 100 for count in seen.values())  # 5 standard deviations


def test_impossible_counts_are_refused() -> None:
    random = np.random.default_rng(0)
    with pytest.raises(TraceError):
        draw_sets(np.array([3, 1]), 2, 2, random)
    with pytest.raises(TraceError):
        draw_sets(np.array([1, 1]), 2, 2, random)


def counts() -> PromptCounts:
    table = np.zeros((3, 2, 4), dtype=np.int64)
    table[0] = [[2, 2, 0, 0], [1, 1, 1, 1]]
    table[1] = [[2, 2, 0, 0], [1, 1, 0, 0]]  # layers of different lengths: left out
    table[2] = [[0, 0, 3, 3], [3, 1, 1, 1]]
    return PromptCounts("small", 2, table)


def test_prompts_follow_each_other_and_incomplete_ones_are_left_out() -> None:
    trace = draw_steps(counts(), seed=7)
    assert len(trace.steps) == 5
    assert [step.layers[0] for step in trace.steps] == [(0, 1)] * 2 + [(2, 3)] * 3
    assert trace.activations(1)[2:].sum(axis=0).tolist() == [3, 1, 1, 1]
    assert trace == draw_steps(counts(), seed=7)
    assert trace != draw_steps(counts(), seed=8)
    assert len(draw_steps(counts(), seed=7, limit=1).steps) == 2
    with pytest.raises(InvalidArgumentError):
        draw_steps(counts(), seed=7, limit=0)
    with pytest.raises(TraceError, match="no prompt"):
        draw_steps(PromptCounts("small", 2, counts().counts[1:2]), seed=7)
