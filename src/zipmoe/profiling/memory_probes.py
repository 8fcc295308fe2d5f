"""Bandwidth of memory: reading and copying more than the caches hold, on one core and on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe import _native

MEMORY_BYTES = 128 << 20
"""Gone through from end to end; must be more than the caches."""
_UNIT_BYTES = 1 << 20


@dataclass
class MemoryProbe:
    """Passes over memory; unit: once through the buffer."""

    step: str
    """``"read"``, or ``"copy"`` from one half of the buffer to the other."""
    workers: int
    memory: npt.NDArray[np.uint8]
    work: _native.TimedWork

    @property
    def label(self) -> str:
        """For people."""
        return f"memory {self.step} on {self.workers} {'core' if self.workers == 1 else 'cores'}"

    @property
    def family(self) -> str:
        """All alike."""
        return "memory"

    @property
    def work_per_unit(self) -> float:
        """Bytes read, or bytes copied (each is read once and written once)."""
        return float(self.memory.nbytes if self.step == "read" else self.memory.nbytes // 2)

    @property
    def least_units(self) -> int:
        """One."""
        return 1

    def run(self, units: int) -> float:
        """Go through ``units`` times."""
        if self.step == "read":
            return self.work.read_memory(self.memory, units * (self.memory.nbytes // _UNIT_BYTES))
        half = self.memory.nbytes // 2
        return self.work.copy_memory(self.memory[:half], self.memory[half:], units * (half // _UNIT_BYTES))


def memory_probes(memory: npt.NDArray[np.uint8], worker_counts: Sequence[int]) -> list[MemoryProbe]:
    """Reading and copying with one worker and with all. ``memory``: a multiple of 2 MiB."""
    ends = sorted({worker_counts[0], worker_counts[-1]})
    work = {workers: _native.TimedWork(workers) for workers in ends}
    return [MemoryProbe(step, workers, memory, work[workers]) for workers in ends for step in ("read", "copy")]
