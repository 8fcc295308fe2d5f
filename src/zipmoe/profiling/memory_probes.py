"""Bandwidth of memory: reading and copying more than the caches hold, on one core and on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe import _native
from zipmoe.profiling.rounds import Probe

MEMORY_BYTES = 128 << 20
"""Gone through from end to end; must be more than the caches."""
_UNIT_BYTES = 16 << 20
_NATIVE_UNIT_BYTES = 1 << 20


@dataclass
class MemoryProbe(Probe):
    """Passes over memory; unit: 16 MiB of the buffer (or what there is), each run going on where the last one ended."""

    step: str
    """``"read"``, or ``"copy"`` from one half of the buffer to the other."""
    workers: int
    memory: npt.NDArray[np.uint8]
    work: _native.TimedWork
    next_unit: int = 0

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
        return float(self._unit_bytes)

    def run(self, units: int) -> float:
        """Read or copy ``units`` pieces, the end of the buffer being followed by its beginning."""
        seconds = 0.0
        while units > 0:
            first = self.next_unit % self._units
            count = min(units, self._units - first)
            seconds += self._pass(first * self._unit_bytes, count * self._unit_bytes)
            self.next_unit += count
            units -= count
        return seconds

    @property
    def _length(self) -> int:
        return self.memory.nbytes if self.step == "read" else self.memory.nbytes // 2

    @property
    def _unit_bytes(self) -> int:
        return min(_UNIT_BYTES, self._length)

    @property
    def _units(self) -> int:
        return self._length // self._unit_bytes

    def _pass(self, begin: int, count: int) -> float:
        native_units = count // _NATIVE_UNIT_BYTES
        source = self.memory[begin : begin + count]
        if self.step == "read":
            return self.work.read_memory(source, native_units)
        half = self.memory.nbytes // 2
        return self.work.copy_memory(source, self.memory[half + begin : half + begin + count], native_units)


def memory_probes(memory: npt.NDArray[np.uint8], worker_counts: Sequence[int]) -> list[MemoryProbe]:
    """Reading and copying with one worker and with all. ``memory``: a multiple of 2 MiB."""
    ends = sorted({worker_counts[0], worker_counts[-1]})
    work = {workers: _native.TimedWork(workers) for workers in ends}
    return [MemoryProbe(step, workers, memory, work[workers]) for workers in ends for step in ("read", "copy")]
