"""What the probes of execution time, and what they do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from profiling_machine import FakeClock

from zipmoe import _native
from zipmoe.profiling.execution_probes import DispatchProbe, ExpertWeights
from zipmoe.profiling.fused_probes import UNPACKED, FusedProbe, FusedWeights, unpacked_experts


def test_small_operations_alternate_with_products_that_are_not_timed() -> None:
    clock = FakeClock()
    products = []

    def product() -> None:
        clock.now += 5.0
        products.append(clock.now)

    probe = DispatchProbe(16, product, clock)
    assert probe.run(3) == 0  # the fake clock sees nothing else pass
    assert probe.work_per_unit > 20
    assert len(products) == 3


def _weights(*shapes: tuple[int, int]) -> FusedWeights:
    generator = torch.Generator().manual_seed(0)
    matrices = tuple(torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_() for shape in shapes)
    return unpacked_experts([ExpertWeights(matrices), ExpertWeights(matrices)])


@pytest.mark.parametrize(
    "shapes",
    [((64, 48), (48, 32)), ((32, 48), (48, 32)), ((32, 48), (32, 48), (48, 32)), ((48, 32), (48, 64))],
    ids=["gated", "not gated", "three matrices", "transposed"],
)
def test_experts_of_any_shapes_are_executed_in_turn(shapes: tuple[tuple[int, int], ...]) -> None:
    weights = _weights(*shapes)
    assert (weights.form, weights.expert_bytes) == (UNPACKED, 2 * sum(rows * columns for rows, columns in shapes))
    assert len(weights.experts) == 2
    probe = FusedProbe(2, weights, _native.ComputeThreads(1), FakeClock())
    assert probe.run(3) == 0
    assert len(probe.executions) == 3
    assert probe.work_per_unit == weights.expert_bytes


def test_the_whole_network_is_computed() -> None:
    """Packed and BF16 experts give the same bits, so that both probes do the same work."""
    bits = [
        np.asarray(matrix[0], np.uint16).reshape(matrix[1], matrix[2])
        for matrix in _weights((64, 48), (48, 32)).experts[0]
    ]
    sections = []
    for matrix in bits:
        ((_, section),), _ = _native.encode("fx3", matrix)
        padded = np.zeros(section.nbytes + 64, np.uint8)
        padded[: section.nbytes] = section
        sections.append((padded[: section.nbytes], *matrix.shape, None))
    packed = FusedWeights("fx3", sum(s[0].nbytes for s in sections), (tuple(sections),))
    results = []
    for weights in (packed, _weights((64, 48), (48, 32))):
        probe = FusedProbe(1, weights, _native.ComputeThreads(1))
        probe.run(1)
        results.append(probe._outputs[48].copy())
    assert np.array_equal(*results)
    assert results[0].any()
