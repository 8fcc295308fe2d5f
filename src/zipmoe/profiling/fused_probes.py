"""Products with weights as they lie in memory (mode ``fast``, docs/compute.md): experts of the folder, packed and BF16.

Networks of experts are computed one after the other, as a request computes them, with the native core's own threads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.engine.fused_compute import FUSED_ROWS_MAX
from zipmoe.profiling.execution_probes import LEAST_WEIGHT_BYTES, ExpertWeights
from zipmoe.profiling.expert_sample import ExpertKind, read_record
from zipmoe.profiling.rounds import Clock, Probe
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_encoder import READABLE_TAIL_BYTES

UNPACKED = "BF16"
FUSED_TOKENS = tuple(
    tokens for tokens in (1, 2, 3, 4, 8, 16, 64) if tokens <= FUSED_ROWS_MAX[_native.gemv_instruction_set()]
)
"""Numbers of tokens that are measured; times between them are interpolated."""
_FORECAST_TOKENS = 512
FUSED_TOKENS_KNOWN = min(FUSED_ROWS_MAX[_native.gemv_instruction_set()], _FORECAST_TOKENS)
"""Up to this many the kernels are used, as far as anybody asks; beyond those measured time grows with the tokens."""

Matrix = tuple[npt.NDArray[np.uint8] | npt.NDArray[np.uint16], int, int, None]
"""Section or BF16 patterns (flat), rows, columns, no bias."""
FusedExpert = tuple[Matrix, ...]


@dataclass(frozen=True)
class FusedWeights:
    """Experts in one form."""

    form: str
    """The folder's codec, or ``UNPACKED``."""
    expert_bytes: int
    """Of one expert in this form, mean."""
    experts: tuple[FusedExpert, ...]


def fused_memory_bytes(kind: ExpertKind) -> int:
    """Memory for ``packed_experts``."""
    return _records(kind) * (max(record.length for record in kind.records) + READABLE_TAIL_BYTES + 4096)


def packed_experts(folder: PackedFolder, kind: ExpertKind, memory: TouchedMemory) -> FusedWeights:
    """Records of the folder, whose codec has kernels for them, in ``memory``: so many that they come from memory.

    Raises:
        TruncatedShardError, CorruptRecordError: a record is not what the manifest says.
    """
    count = _records(kind)
    experts, total = [], 0
    for number in range(count):
        record = kind.records[number * len(kind.records) // count]
        data = memory.copy(read_record(folder, record)[: record.length], tail_bytes=READABLE_TAIL_BYTES)
        matrices: list[Matrix] = []
        for entry in record.matrices:
            (section,) = entry.sections
            matrices.append((data[section.offset : section.offset + section.length], entry.rows, entry.columns, None))
            total += section.length
        experts.append(tuple(matrices))
    return FusedWeights(folder.manifest.codec.name, total // count, tuple(experts))


def unpacked_experts(experts: Sequence[ExpertWeights]) -> FusedWeights:
    """The same experts that torch multiplies."""
    found = [tuple(_bfloat16(matrix) for matrix in expert.matrices) for expert in experts]
    return FusedWeights(UNPACKED, sum(weights.nbytes for weights, _, _, _ in found[0]), tuple(found))


def _bfloat16(matrix: torch.Tensor) -> Matrix:
    rows, columns = matrix.shape
    patterns: npt.NDArray[np.uint16] = matrix.detach().view(torch.int16).numpy().view(np.uint16).reshape(-1)
    return patterns, rows, columns, None


def _records(kind: ExpertKind) -> int:
    return min(len(kind.records), -(-LEAST_WEIGHT_BYTES // kind.record_bytes))


class FusedProbe(Probe):
    """One expert on some tokens; unit: one execution."""

    def __init__(
        self,
        tokens: int,
        weights: FusedWeights,
        threads: _native.ComputeThreads,
        clock: Clock = time.perf_counter,
        seed: int = 0,
    ) -> None:
        """Make inputs and outputs; experts are computed in turn."""
        self.tokens = tokens
        self.weights = weights
        self._threads = threads
        self._clock = clock
        self._next = 0
        self.executions: list[float] = []
        """Seconds of every execution."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(rows, columns) for _, rows, columns, _ in weights.experts[0]]
        self._activation = _activation(shapes)
        self._inputs = {
            columns: torch.randn(tokens, columns, generator=generator).to(torch.bfloat16).view(torch.uint16).numpy()
            for columns in sorted({columns for _, columns in shapes})
        }
        self._outputs = {rows: np.empty((tokens, rows), dtype=np.uint16) for rows, _ in shapes}

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.weights.form} as it lies on {self.tokens} {'token' if self.tokens == 1 else 'tokens'}"

    @property
    def work_per_unit(self) -> float:
        """Bytes of an expert."""
        return float(self.weights.expert_bytes)

    def run(self, units: int) -> float:
        """Execute ``units`` experts."""
        total = 0.0
        for _ in range(units):
            expert = self.weights.experts[self._next % len(self.weights.experts)]
            self._next += 1
            began = self._clock()
            self._execute(expert)
            self.executions.append(self._clock() - began)
            total += self.executions[-1]
        return total

    def _execute(self, expert: FusedExpert) -> None:
        if self._activation is not None:
            x, out = self._inputs[expert[0][2]], self._outputs[expert[-1][1]]
            _native.compute_experts([(expert, x, out)], self._activation, self._threads)
            return
        for weights, rows, columns, _ in expert:
            x, out = self._inputs[columns], self._outputs[rows]
            if weights.dtype == np.uint8:
                _native.fx3_gemv(weights, rows, columns, x, out, self._threads)  # type: ignore[arg-type]
            else:
                _native.bfloat16_gemv(weights.reshape(rows, columns), x, out, self._threads)  # type: ignore[arg-type]


def _activation(shapes: Sequence[tuple[int, int]]) -> _native.GatedActivation | None:
    """What makes a network of two matrices of these shapes; None: they are multiplied one by one."""
    if len(shapes) != 2 or shapes[1][0] != shapes[0][1]:
        return None
    (first_rows, _), (_, inner) = shapes
    layout = {2 * inner: "halves", inner: "none"}.get(first_rows)
    return None if layout is None else _native.GatedActivation("silu", layout)
