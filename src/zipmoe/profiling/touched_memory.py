"""Memory that is allocated once, touched once and used again by every measurement.

First use of fresh pages is slower than any disk on some virtual machines; nothing that is timed may meet it.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

_HUGE_PAGE_BYTES = 2 << 20


class TouchedMemory:
    """One anonymous mapping with huge pages where the kernel has them, cut into aligned pieces."""

    def __init__(self, capacity_bytes: int) -> None:
        """Allocate and touch ``capacity_bytes``."""
        rounded = -(-capacity_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        self._mapping = mmap.mmap(-1, rounded + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages: everything works, somewhat slower
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        everything = np.frombuffer(self._mapping, dtype=np.uint8)
        begin = -everything.ctypes.data % _HUGE_PAGE_BYTES
        self._bytes: npt.NDArray[np.uint8] = everything[begin : begin + rounded]
        self._bytes[:] = 1
        self._next = 0

    @property
    def capacity_bytes(self) -> int:
        """All of it."""
        return int(self._bytes.nbytes)

    def clear(self) -> None:
        """Give the memory to the next user: pieces handed out before are reused."""
        self._next = 0

    def take(self, byte_count: int, *, tail_bytes: int = 0) -> npt.NDArray[np.uint8]:
        """uint8 [byte_count], aligned to 4096, with ``tail_bytes`` more readable bytes behind it.

        Raises:
            MemoryError: less is left.
        """
        begin = self._next
        end = begin + byte_count + tail_bytes
        if end > self._bytes.nbytes:
            raise MemoryError(f"{byte_count} bytes are more than the {self._bytes.nbytes - begin} left")
        self._next = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        return self._bytes[begin : begin + byte_count]

    def copy(self, data: npt.NDArray[np.uint8], *, tail_bytes: int = 0) -> npt.NDArray[np.uint8]:
        """A copy of a one-dimensional uint8 array."""
        piece = self.take(data.nbytes, tail_bytes=tail_bytes)
        piece[:] = data
        return piece
