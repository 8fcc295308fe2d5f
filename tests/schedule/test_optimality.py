"""The guarantee of the paper against proven optima: makespan <= (3 - 1/L) OPT, and better than FIFO on average."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest

pytest.importorskip("ortools")

from optimal_makespan import optimal_makespan
from schedule_instances import MISS, TICK_SECONDS, Layer, Task, schedule, small_layer, ticks


def check_batch(seeds: range) -> None:
    affinity_ratios, fifo_ratios = [], []
    for seed in seeds:
        layer = small_layer(seed)
        native = schedule(layer)
        affinity, fifo = ticks(native.makespan), ticks(schedule(layer, "fifo").makespan)
        optimum = optimal_makespan(layer, math.ceil(native.lower_bound / TICK_SECONDS - 1e-4), min(affinity, fifo))
        assert affinity <= (3 - Fraction(1, layer.workers)) * optimum, f"seed {seed}: {affinity} against {optimum}"
        if optimum > 0:
            affinity_ratios.append(affinity / optimum)
            fifo_ratios.append(fifo / optimum)
    assert statistics.fmean(affinity_ratios) < statistics.fmean(fifo_ratios)


def test_bound_and_mean() -> None:
    check_batch(range(150))


@pytest.mark.slow
def test_bound_and_mean_on_many() -> None:
    check_batch(range(150, 2150))


def test_the_guarantee_needs_tensors_of_like_cost() -> None:
    """A known counterexample: the paper's u, rho and c are one constant each, here they differ sixtyfold.

    All experts execute equally long, so the order is that of their ids: first 60 ticks of reading, then 60 of
    decompression, and only then all short tasks and their executions.
    """
    costs = [(60, 1), (1, 60), (1, 1), (1, 1), (1, 1), (1, 1)]
    tasks = tuple(Task(expert, 0, MISS, read, 1, decompress, 0) for expert, (read, decompress) in enumerate(costs))
    layer = Layer(tasks, dict.fromkeys(range(6), 10), shards=1, workers=1)
    affinity = ticks(schedule(layer).makespan)
    assert (affinity, optimal_makespan(layer, 0, affinity)) == (172, 85)  # more than 3 - 1/1 times as long
