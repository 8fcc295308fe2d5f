"""The two rates that bound a token's time, measured between the runs that they are compared with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zipmoe.profiling.disk_probes import READ_MEMORY_BYTES, ReadProbe, block_name, disk_probes
from zipmoe.profiling.expert_sample import most_common_kind
from zipmoe.profiling.memory_probes import MEMORY_BYTES, memory_probes
from zipmoe.profiling.read_places import record_files
from zipmoe.profiling.rounds import run_rounds
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder

_DISK_SECONDS = 2.0
_MEMORY_SECONDS = 0.6


@dataclass(frozen=True)
class MachineRates:
    """What memory and disk gave at one moment."""

    memory_bytes_per_second: float
    """Reading with all cores."""
    disk_bytes_per_second: float
    """Whole records of experts at the best queue depth."""
    disk_reads: str
    """What was read how, for people."""


class RateProbe:
    """Measures the rates again and again with memory that it touched once."""

    def __init__(self, folder: PackedFolder) -> None:
        """Open the folder's record files."""
        kind = most_common_kind(folder.manifest)
        self._memory = TouchedMemory(READ_MEMORY_BYTES + MEMORY_BYTES)
        files = record_files(folder.path, folder.manifest.records())
        disk = disk_probes(files, kind.records, kind.record_bytes, self._memory.take(READ_MEMORY_BYTES))
        mode = "buffered" if disk.direct_refusal else "direct"
        self._reads: list[ReadProbe] = [probe for probe in disk.reads if probe.mode == mode and probe.of_record]
        workers = len(os.sched_getaffinity(0))
        probes = memory_probes(self._memory.take(MEMORY_BYTES), (workers,))
        self._passes = [probe for probe in probes if probe.step == "read"]

    def measure(self) -> MachineRates:
        """About three seconds of both."""
        reads = run_rounds(self._reads, _DISK_SECONDS)
        rates = [
            (found.rate().median, f"{probe.mode} reads of {block_name(probe.block_bytes)}, {probe.depth} at a time")
            for probe, found in zip(self._reads, reads.samples, strict=True)
            if found is not None
        ]
        disk, how = max(rates) if rates else (0.0, "nothing could be read")
        passes = run_rounds(self._passes, _MEMORY_SECONDS)
        memory = max((found.rate().median for found in passes.samples if found is not None), default=0.0)
        return MachineRates(memory, disk, how)
