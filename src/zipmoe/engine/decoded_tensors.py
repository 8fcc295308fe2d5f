"""Fresh tensors for decoded matrices that outlive the engine's scratch, and their place in the budget."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

ACCOUNTED_BYTES = 32 << 20
"""Smaller tensors are covered by the workspace; larger ones are reserved while they live."""
_ALIGNMENT_BYTES = 64
"""A misaligned weight changes the result of matrix products with one row."""


class DecodedTensors:
    """Allocates tensors and knows how many bytes of the large ones are still alive."""

    def __init__(self, reserve: Callable[[int], None]) -> None:
        """``reserve(bytes)``: makes the reservation of all living tensors that many bytes, or raises."""
        self._reserve = reserve
        self._living_bytes = 0
        # Tensors die in any thread and at any moment: there, only a note is left.
        self._died: deque[int] = deque()

    def settle(self) -> None:
        """Give back the reservations of tensors that died."""
        if not self._died:
            return
        while self._died:
            self._living_bytes -= self._died.popleft()
        self._reserve(self._living_bytes)

    def empty(self, rows: int, columns: int) -> torch.Tensor:
        """An uninitialised BF16 tensor [rows, columns], 64-byte aligned.

        Raises:
            BudgetExceededError: it is large and does not fit.
        """
        count = rows * columns * 2
        if count < ACCOUNTED_BYTES:
            return torch.empty((rows, columns), dtype=torch.bfloat16)
        self._reserve(self._living_bytes + count)
        self._living_bytes += count
        memory = np.empty(count + _ALIGNMENT_BYTES, dtype=np.uint8)
        weakref.finalize(memory, self._died.append, count)  # the tensor's storage keeps `memory` alive
        start = -memory.ctypes.data % _ALIGNMENT_BYTES
        return torch.from_numpy(memory[start : start + count]).view(torch.bfloat16).view(rows, columns)
