"""The same matrices packed and in BF16, so many that every product finds its weights in memory, not in a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.codecs.fx3_gemv import round_to_bfloat16
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.record_encoder import READABLE_TAIL_BYTES

_DISTINCT = 4
"""Matrices that are encoded; the others are copies of them."""
_STANDARD_DEVIATION = np.float32(0.02)
_MEGABYTE = 10**6

Words = npt.NDArray[np.uint16]


def gaussian_weights(rows: int, columns: int, seed: int) -> Words:
    """Weights of standard deviation 0.02 as BF16 patterns: uint16 [rows, columns]."""
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32)
    return round_to_bfloat16(values * _STANDARD_DEVIATION)


@dataclass(frozen=True)
class RotatingWeights:
    """Matrices of one shape."""

    rows: int
    columns: int
    sections: list[npt.NDArray[np.uint8]]
    """Packed (FX3)."""
    raw: list[Words]
    """BF16 patterns."""
    tensors: list[torch.Tensor]
    """The same memory as ``raw``."""

    @property
    def packed_bytes(self) -> float:
        """Of one matrix, mean."""
        return sum(section.nbytes for section in self.sections) / len(self.sections)

    @property
    def bfloat16_bytes(self) -> int:
        """Of one matrix."""
        return 2 * self.rows * self.columns


def memory_bytes(shapes: list[tuple[int, int]], megabytes: int) -> int:
    """Memory that ``lay_out`` needs for any of these shapes."""
    largest = max(2 * rows * columns for rows, columns in shapes)
    return int(1.8 * (megabytes * _MEGABYTE + _DISTINCT * largest))


def lay_out(rows: int, columns: int, megabytes: int, memory: TouchedMemory) -> RotatingWeights:
    """Encode some Gaussian matrices and copy them until the BF16 form fills ``megabytes``."""
    memory.clear()
    count = max(1, -(-megabytes * _MEGABYTE // (2 * rows * columns)))
    distinct = []
    for seed in range(min(_DISTINCT, count)):
        words = gaussian_weights(rows, columns, seed)
        distinct.append((words, _native.encode("fx3", words)[0][0][1]))
    sections, raw = [], []
    for number in range(count):
        words, section = distinct[number % len(distinct)]
        raw.append(memory.copy(words.view(np.uint8).ravel()).view(np.uint16).reshape(rows, columns))
        sections.append(memory.copy(section, tail_bytes=READABLE_TAIL_BYTES))
    tensors = [torch.from_numpy(words.view(np.int16)).view(torch.bfloat16) for words in raw]
    return RotatingWeights(rows, columns, sections, raw, tensors)
