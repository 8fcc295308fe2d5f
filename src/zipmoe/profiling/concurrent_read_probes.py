"""How many reads at a time the disk wants: experts' records through the engine's own reader, by backend and number.

What the engine does beside reading belongs to it: long reads are cut as the engine cuts them, several records are under
way, and each one's checksum is computed while it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zipmoe import _native
from zipmoe.engine.io_backend import CHUNK_BYTES
from zipmoe.profiling.disk_probes import LARGEST_BLOCK_BYTES, Places, check_read
from zipmoe.profiling.read_places import Place, RecordFiles, RecordPlaces
from zipmoe.profiling.rounds import Probe
from zipmoe.store.manifest import Record

CONCURRENT_READS = (1, 2, 4, 8, 16)
GOOD_ENOUGH = 0.98
"""Of the best rate: more threads, or a longer queue, must gain more than this lacks."""
STEADY_SPREAD = 0.2
"""Of the rounds: with more, nothing is chosen."""


class EngineReader(Protocol):
    """What reads and takes the time: the native core's TimedReader."""

    def read(
        self, places: Sequence[Place], length: int, memory: npt.NDArray[np.uint8], checksums: bool
    ) -> tuple[float, int, int]:
        """Read ``length`` bytes at each place; returns seconds, bytes, errno (0: none)."""
        ...


EngineReaderFactory = Callable[[Sequence[str], str, int], EngineReader]
"""Opens files with a backend (``"threads"`` or ``"uring"``) and a number of reads at a time."""


def open_engine_reader(paths: Sequence[str], backend: str, parallel: int) -> EngineReader:
    """The engine's reader, past the page cache where that is possible."""
    return _native.TimedReader(paths, backend, parallel=parallel, block_bytes=CHUNK_BYTES[backend])


@dataclass
class ConcurrentReadProbe(Probe):
    """Records through one backend with so many reads at a time; unit: one record."""

    backend: str
    parallel: int
    record_bytes: int
    open_reader: Callable[[], EngineReader]
    """Called outside of the time, for each run: all readers at once would have a hundred threads, and every file of the
    folder open ten times."""
    places: Places
    memory: npt.NDArray[np.uint8]
    files: RecordFiles

    @property
    def label(self) -> str:
        """For people."""
        return f"records through {self.backend}, {self.parallel} reads at a time"

    @property
    def family(self) -> str:
        """Backend."""
        return f"records through {self.backend}"

    @property
    def work_per_unit(self) -> float:
        """Bytes of a record."""
        return float(self.record_bytes)

    @property
    def least_units(self) -> int:
        """Twice what is under way, and two records at least."""
        chunks = -(-self.record_bytes // CHUNK_BYTES[self.backend])
        return max(2, -(-2 * self.parallel // chunks))

    def run(self, units: int) -> float:
        """Read ``units`` records.

        Raises:
            PackedFolderError: the disk reports an error.
            TruncatedShardError: a file has become shorter.
        """
        places = self.places.take(units)
        seconds, read_bytes, error_number = self.open_reader().read(places, self.record_bytes, self.memory, True)
        check_read(self.files, places, units * self.record_bytes, read_bytes, error_number)
        return seconds


def concurrent_read_probes(
    files: RecordFiles,
    records: Sequence[Record],
    record_bytes: int,
    memory: npt.NDArray[np.uint8],
    open_reader: EngineReaderFactory = open_engine_reader,
) -> list[ConcurrentReadProbe]:
    """Probes of every backend that can be used here.

    Args:
        files: files to read; direct reads must be possible, as the page cache would answer otherwise.
        records: experts whose records are read.
        record_bytes: their length.
        memory: uint8, aligned to 4096, at least LARGEST_BLOCK_BYTES.
        open_reader: opens readers (tests pass one of their own).
    """
    length = min(record_bytes, LARGEST_BLOCK_BYTES)
    backends = ["threads"] if _native.uring_refusal() else ["threads", "uring"]
    paths = [str(path) for path in files.paths]
    found: list[ConcurrentReadProbe] = []
    for backend in backends:
        for parallel in CONCURRENT_READS:
            places = RecordPlaces(files, records, length, len(found))
            if places.count:
                opening = partial(open_reader, paths, backend, parallel)
                found.append(ConcurrentReadProbe(backend, parallel, length, opening, places, memory, files))
    return found


def best_number(rates: Mapping[int, float]) -> int:
    """The smallest number of reads at a time whose rate is good enough.

    Args:
        rates: bytes per second by number of reads.
    """
    enough = GOOD_ENOUGH * max(rates.values())
    return min(number for number, rate in rates.items() if rate >= enough)
