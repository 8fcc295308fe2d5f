"""p: seconds to execute one expert, by the number of tokens that are routed to it; and what a call of torch costs.

The products are those of exact mode: ``torch.nn.functional.linear`` of BF16 rows with each matrix of the expert, the
weights marked as parameters are (torch chooses kernels by it). Gating and the rest of the expert are a thousandth.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from zipmoe.profiling.rounds import Clock, Probe
from zipmoe.profiling.touched_memory import TouchedMemory

TOKENS = (1, 2, 4, 8, 16, 32, 64)
LEAST_WEIGHT_BYTES = 96 << 20
"""Different experts are executed in turn, at least this much of them, so that weights come from memory as they do in a
model."""


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of one expert: BF16 [rows, columns] each."""

    matrices: tuple[torch.Tensor, ...]


LARGEST_NUMBER_OF_EXPERTS = 4096
"""Experts are not multiplied further than this: those of toy models stay in the caches, as they do when they run."""


def experts_in_turn(expert_bytes: int) -> int:
    """How many experts of this many BF16 bytes are executed in turn."""
    return min(LARGEST_NUMBER_OF_EXPERTS, -(-LEAST_WEIGHT_BYTES // expert_bytes))


def execution_memory_bytes(expert_bytes: int, matrices: int) -> int:
    """Memory for these experts, each of ``matrices`` matrices."""
    return experts_in_turn(expert_bytes) * (expert_bytes + 4096 * matrices)


def expert_weights(
    shapes: Sequence[tuple[str, int, int]], sample: npt.NDArray[np.uint16], memory: TouchedMemory
) -> list[ExpertWeights]:
    """Experts of these shapes in ``memory``, filled with the weights of ``sample`` (uint16 [n]) over and over."""
    expert_bytes = 2 * sum(rows * columns for _, rows, columns in shapes)
    experts = []
    for _ in range(experts_in_turn(expert_bytes)):
        matrices = []
        for _, rows, columns in shapes:
            patterns = memory.take(2 * rows * columns).view(np.uint16)
            for begin in range(0, patterns.size, sample.size):
                part = patterns[begin : begin + sample.size]
                part[:] = sample[: part.size]
            weights = torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16).view(rows, columns)
            matrices.append(weights.detach().requires_grad_())
        experts.append(ExpertWeights(tuple(matrices)))
    return experts


CONTEXT = 128
"""Positions that attention looks at."""
EXPERTS, TOP_K = 64, 4
_HEAD = 64


class _SmallOperations(torch.nn.Module):
    """What a layer of most families does between the products with its large matrices, for one row: norms, the longer
    context, attention, router. Torch runs some of it on several threads, which must be woken, and some on one.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self._heads = max(1, width // _HEAD)
        self._width = self._heads * _HEAD
        self._context = torch.ones(1, self._heads, CONTEXT, _HEAD, dtype=torch.bfloat16)
        self._norm = torch.ones(self._width, dtype=torch.bfloat16)
        self._router = torch.ones(EXPERTS, self._width, dtype=torch.bfloat16)

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        """BF16 [1, width] to the same."""
        states = self._normed(row).view(1, 1, self._heads, _HEAD).transpose(1, 2)
        keys = torch.cat([self._context, states], dim=2)
        values = torch.cat([self._context, states], dim=2)
        attended = functional.scaled_dot_product_attention(states, keys, values)
        row = row + attended.transpose(1, 2).reshape(1, self._width)
        weights, experts = torch.topk(functional.linear(self._normed(row), self._router).softmax(dim=-1), TOP_K)
        return row * weights[:, torch.sort(experts)[1][0, 0]]

    def _normed(self, rows: torch.Tensor) -> torch.Tensor:
        wide = rows.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self._norm * (wide * torch.rsqrt(variance + 1e-6)).to(torch.bfloat16)

    def row(self) -> torch.Tensor:
        """An input."""
        return torch.ones(1, self._width, dtype=torch.bfloat16)


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations as those of models were counted (``planning/step_costs.py``)."""

    operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return function(*args, **(kwargs or {}))


class DispatchProbe(Probe):
    """What a step pays for each of its many small torch operations and the Python around them; unit: those of a layer.

    They alternate with products, which are not timed: code and data of small operations lie in the caches only until
    weights have gone through them, and threads fall asleep meanwhile.
    """

    def __init__(self, width: int, product: Callable[[], object], clock: Clock = time.perf_counter) -> None:
        """Make a layer whose hidden state has about ``width`` values.

        Args:
            width: columns.
            product: executes an expert.
            clock: seconds.
        """
        self._clock = clock
        self._product = product
        self._layer = _SmallOperations(width)
        self._row = self._layer.row()
        with torch.no_grad(), _Count() as count:  # type: ignore[no-untyped-call]
            self._layer(self._row)
        self._operations = count.operations

    @property
    def label(self) -> str:
        """For people."""
        return "small torch operations"

    @property
    def work_per_unit(self) -> float:
        """Operations of a layer."""
        return float(self._operations)

    @property
    def least_units(self) -> int:
        """A few."""
        return 8

    def run(self, units: int) -> float:
        """Pass through the layer ``units`` times."""
        total = 0.0
        with torch.no_grad():
            for _ in range(units):
                self._product()
                began = self._clock()
                self._layer(self._row)
                total += self._clock() - began
        return total


class ExecutionProbe(Probe):
    """One expert on some tokens; unit: one execution."""

    def __init__(
        self, tokens: int, experts: Sequence[ExpertWeights], clock: Clock = time.perf_counter, seed: int = 0
    ) -> None:
        """Make the inputs; ``experts`` are executed in turn."""
        self.tokens = tokens
        self._experts = experts
        self._clock = clock
        self._next = 0
        self.executions: list[float] = []
        """Seconds of every execution, the warm-up's included: a waiting thread of torch's pool makes a few of them
        a thousand times longer on a busy machine, which a median over means would not forgive."""
        generator = torch.Generator().manual_seed(seed)
        widths = {int(matrix.shape[1]) for matrix in experts[0].matrices}
        self._inputs = {
            width: torch.randn(tokens, width, generator=generator).to(torch.bfloat16) for width in sorted(widths)
        }

    @property
    def label(self) -> str:
        """For people."""
        return f"execution of one expert on {self.tokens} {'token' if self.tokens == 1 else 'tokens'}"

    def run(self, units: int) -> float:
        """Execute ``units`` experts."""
        total = 0.0
        with torch.no_grad():
            for _ in range(units):
                expert = self._experts[self._next % len(self._experts)]
                self._next += 1
                began = self._clock()
                for weights in expert.matrices:
                    functional.linear(self._inputs[weights.shape[1]], weights)
                self.executions.append(self._clock() - began)
                total += self.executions[-1]
        return total
