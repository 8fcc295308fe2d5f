"""The rates that bound a token's time and a prompt's, measured between the runs that they are compared with."""

from __future__ import annotations

import os
from dataclasses import dataclass

from zipmoe.bench.product_probe import ProductProbe, product_probes, product_shapes
from zipmoe.profiling.disk_probes import READ_MEMORY_BYTES, ReadProbe, block_name, disk_probes
from zipmoe.profiling.expert_sample import most_common_kind
from zipmoe.profiling.memory_probes import MEMORY_BYTES, memory_probes
from zipmoe.profiling.read_places import record_files
from zipmoe.profiling.rounds import run_rounds
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder

_DISK_SECONDS = 2.0
_MEMORY_SECONDS = 0.6
_PRODUCT_SECONDS = 0.9


@dataclass(frozen=True)
class MachineRates:
    """What memory and disk gave at one moment."""

    memory_bytes_per_second: float
    """Reading with all cores."""
    disk_bytes_per_second: float
    """Whole records of experts at the best queue depth."""
    disk_reads: str
    """What was read how, for people."""
    product_operations_per_second: float | None = None
    """Of torch's BF16 product with as many rows as a prompt has tokens, on the best of the model's shapes."""


class RateProbe:
    """Measures the rates again and again with memory that it touched once."""

    def __init__(self, folder: PackedFolder) -> None:
        """Open the folder's record files."""
        self._shapes = product_shapes(folder.manifest)
        self._products: dict[int, list[ProductProbe]] = {}
        kind = most_common_kind(folder.manifest)
        self._memory = TouchedMemory(READ_MEMORY_BYTES + MEMORY_BYTES)
        files = record_files(folder.path, folder.manifest.records())
        disk = disk_probes(files, kind.records, kind.record_bytes, self._memory.take(READ_MEMORY_BYTES))
        mode = "buffered" if disk.direct_refusal else "direct"
        self._reads: list[ReadProbe] = [probe for probe in disk.reads if probe.mode == mode and probe.of_record]
        self._workers = len(os.sched_getaffinity(0))
        probes = memory_probes(self._memory.take(MEMORY_BYTES), (self._workers,))
        self._passes = [probe for probe in probes if probe.step == "read"]

    def measure(self, prompt_tokens: int) -> MachineRates:
        """About four seconds of all; products with ``prompt_tokens`` rows."""
        reads = run_rounds(self._reads, _DISK_SECONDS)
        rates = [
            (found.rate().median, f"{probe.mode} reads of {block_name(probe.block_bytes)}, {probe.depth} at a time")
            for probe, found in zip(self._reads, reads.samples, strict=True)
            if found is not None
        ]
        disk, how = max(rates) if rates else (0.0, "nothing could be read")
        passes = run_rounds(self._passes, _MEMORY_SECONDS)
        memory = max((found.rate().median for found in passes.samples if found is not None), default=0.0)
        return MachineRates(memory, disk, how, self._product_rate(prompt_tokens))

    def _product_rate(self, tokens: int) -> float | None:
        if tokens not in self._products:
            self._products = {tokens: product_probes(self._shapes, tokens, self._workers)}
        products = run_rounds(self._products[tokens], _PRODUCT_SECONDS)
        return max((found.rate().median for found in products.samples if found is not None), default=None)
