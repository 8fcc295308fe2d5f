"""Rate of torch's BF16 product with as many rows as a prompt has tokens, on matrices of the model's shapes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zipmoe.profiling.expert_sample import most_common_kind
from zipmoe.profiling.rounds import Probe
from zipmoe.store.manifest import Manifest

_WEIGHT_BYTES = 48 << 20
"""Of each shape, by turns: weights come from memory, as those of a prompt do."""
_LARGEST_MATRIX_BYTES = 64 << 20
"""The vocabulary's matrices are larger; a prompt multiplies a single row with them."""
_SHAPES_MAX = 3


@dataclass
class ProductProbe(Probe):
    """``F.linear`` with one shape; unit: one product."""

    inputs: torch.Tensor
    """[tokens, columns]"""
    weights: list[torch.Tensor]
    """[rows, columns] each"""
    threads: int
    next_matrix: int = 0

    @property
    def label(self) -> str:
        """For people."""
        rows, columns = self.weights[0].shape
        return f"products of {len(self.inputs)} tokens with {rows} x {columns}"

    @property
    def family(self) -> str:
        """All alike."""
        return "products"

    @property
    def work_per_unit(self) -> float:
        """Operations: a multiplication and an addition for every weight and token."""
        return 2.0 * len(self.inputs) * self.weights[0].numel()

    @property
    def least_units(self) -> int:
        """One."""
        return 1

    def run(self, units: int) -> float:
        """Multiply; the matrices by turns."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with torch.inference_mode():
                began = time.perf_counter()
                for _ in range(units):
                    torch.nn.functional.linear(self.inputs, self.weights[self.next_matrix % len(self.weights)])
                    self.next_matrix += 1
                return time.perf_counter() - began
        finally:
            torch.set_num_threads(before)


def product_shapes(manifest: Manifest) -> tuple[tuple[int, int], ...]:
    """Rows and columns of the largest matrices that all or many tokens of a prompt pass."""
    shapes = {(rows, columns) for _, rows, columns in most_common_kind(manifest).shapes}
    shapes |= {(matrix.rows, matrix.columns) for matrix in manifest.dense}
    small = [shape for shape in shapes if 2 * shape[0] * shape[1] <= _LARGEST_MATRIX_BYTES]
    return tuple(sorted(small, key=lambda shape: (-shape[0] * shape[1], shape))[:_SHAPES_MAX])


def product_probes(shapes: Sequence[tuple[int, int]], tokens: int, threads: int) -> list[ProductProbe]:
    """One probe for each shape; random weights."""
    generator = torch.Generator().manual_seed(0)
    probes = []
    for rows, columns in shapes:
        weights = torch.empty(rows, columns, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
        inputs = torch.empty(tokens, columns, dtype=torch.bfloat16).normal_(generator=generator)
        copies = max(1, _WEIGHT_BYTES // weights.nbytes)
        probes.append(ProductProbe(inputs, [weights.clone() for _ in range(copies)], threads))
    return probes
