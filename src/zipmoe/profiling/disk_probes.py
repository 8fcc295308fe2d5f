"""Disk: rate by block size and queue depth, direct and buffered, and the latency of one small read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zipmoe import _native
from zipmoe.errors import PackedFolderError, TruncatedShardError
from zipmoe.profiling.read_places import BlockPlaces, Place, RecordFiles, RecordPlaces
from zipmoe.profiling.rounds import Probe
from zipmoe.store.manifest import ALIGNMENT_BYTES, Record

BLOCK_BYTES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
QUEUE_DEPTHS = (1, 2, 4, 8)
READ_MEMORY_BYTES = 128 << 20
"""Blocks under way must fit into this; larger combinations of block and depth are not measured. Reads go through all of
it, so it is larger than what processors' caches keep: reads into cached memory are faster than an engine's are."""
LARGEST_BLOCK_BYTES = 64 << 20
"""Longer records are measured with reads of this length."""
LATENCY_BLOCK_BYTES = ALIGNMENT_BYTES
_CACHE_CHECKS = 4
"""Blocks per run of which it is looked up whether the page cache still holds them after it was told to drop them."""


class BlockReader(Protocol):
    """What reads and takes the time: the native core's TimedReads."""

    @property
    def fallback_reason(self) -> str:
        """Why reads are not direct; empty if they are."""
        ...

    def read(self, places: Sequence[Place], block_bytes: int, memory: npt.NDArray[np.uint8]) -> tuple[float, int, int]:
        """Read one block at each place, into one block of memory after the other.

        Returns seconds, bytes, errno (0: none).
        """
        ...


ReaderFactory = Callable[[Sequence[str], str, int], BlockReader]
"""Opens files with a mode (``"auto"`` or ``"buffered"``) and a queue depth."""


class Places(Protocol):
    """A supply of places to read at."""

    def take(self, number: int) -> list[Place]:
        """The next ``number`` places."""
        ...


class PageCache:
    """Drops what the page cache holds of blocks, and keeps the score of what stayed."""

    def __init__(self, files: RecordFiles) -> None:
        self._paths = [str(path) for path in files.paths]
        # To anybody else the kernel says that everything is cached.
        self._may_ask = [path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK) for path in files.paths]
        self.checked_bytes = 0
        self.still_cached_bytes = 0

    def drop(self, places: Sequence[Place], block_bytes: int) -> None:
        """Drop the blocks, and look whether some of them are gone."""
        by_file: dict[int, list[tuple[int, int]]] = {}
        for file, offset in places:
            by_file.setdefault(file, []).append((offset, block_bytes))
        for file, ranges in by_file.items():
            _native.drop_cached_pages(self._paths[file], ranges)
        for file, offset in places[:_CACHE_CHECKS]:
            if self._may_ask[file]:
                self.checked_bytes += block_bytes
                self.still_cached_bytes += _native.cached_bytes(self._paths[file], offset, block_bytes)

    @property
    def still_cached(self) -> float:
        """Share of the bytes looked up that could not be dropped."""
        return self.still_cached_bytes / self.checked_bytes if self.checked_bytes else 0.0


@dataclass
class ReadProbe(Probe):
    """Reads of one block length at one queue depth; unit: one read."""

    mode: str
    """``"direct"`` or ``"buffered"``."""
    block_bytes: int
    depth: int
    of_record: bool
    """Whether the block is the folder's own record of an expert."""
    reader: BlockReader
    places: Places
    memory: npt.NDArray[np.uint8]
    files: RecordFiles
    page_cache: PageCache | None
    """For buffered reads: told to drop the blocks before each run, outside of the time."""

    @property
    def label(self) -> str:
        """For people."""
        what = "one expert's record" if self.of_record else block_name(self.block_bytes)
        return f"{self.mode} reads of {what}, {self.depth} at a time"

    @property
    def family(self) -> str:
        """Mode: rates of direct and buffered reads differ most."""
        return self.mode

    @property
    def work_per_unit(self) -> float:
        """Bytes of a read."""
        return float(self.block_bytes)

    @property
    def least_units(self) -> int:
        """A full queue."""
        return self.depth

    def run(self, units: int) -> float:
        """Read ``units`` blocks.

        Raises:
            PackedFolderError: the disk reports an error.
            TruncatedShardError: a file has become shorter.
        """
        places = self.places.take(units)
        if self.page_cache is not None:
            self.page_cache.drop(places, self.block_bytes)
        seconds, read_bytes, error_number = self.reader.read(places, self.block_bytes, self.memory)
        check_read(self.files, places, units * self.block_bytes, read_bytes, error_number)
        return seconds


@dataclass
class LatencyProbe(Probe):
    """Single reads of one page on an otherwise idle queue; unit: one read."""

    mode: str
    reader: BlockReader
    places: Places
    memory: npt.NDArray[np.uint8]
    files: RecordFiles
    page_cache: PageCache | None
    latencies: list[float] = field(default_factory=list)
    """Seconds of every read, the warm-up's included."""

    @property
    def label(self) -> str:
        """For people."""
        return f"latency of {self.mode} reads"

    @property
    def least_units(self) -> int:
        """A few."""
        return 4

    def run(self, units: int) -> float:
        """Read ``units`` pages one after the other."""
        places = self.places.take(units)
        if self.page_cache is not None:
            self.page_cache.drop(places, LATENCY_BLOCK_BYTES)
        total = 0.0
        for place in places:
            seconds, read_bytes, error_number = self.reader.read([place], LATENCY_BLOCK_BYTES, self.memory)
            check_read(self.files, [place], LATENCY_BLOCK_BYTES, read_bytes, error_number)
            self.latencies.append(seconds)
            total += seconds
        return total


def check_read(files: RecordFiles, places: Sequence[Place], expected: int, read_bytes: int, error_number: int) -> None:
    """Raise PackedFolderError or TruncatedShardError unless all bytes came."""
    if error_number == 0 and read_bytes == expected:
        return
    names = sorted({str(files.paths[file]) for file, _ in places})
    where = repr(names[0]) if len(names) == 1 else f"one of {', '.join(map(repr, names))}"
    if error_number:
        raise PackedFolderError(
            f"cannot read {where}: {os.strerror(error_number)}", hint="the disk or the network file system has a fault"
        )
    raise TruncatedShardError(f"{where} became shorter while it was read", hint="copy or download the folder again")


@dataclass(frozen=True)
class DiskProbes:
    """Everything that is measured of the disk."""

    reads: list[ReadProbe]
    latencies: list[LatencyProbe]
    direct_refusal: str
    """Why there are no direct reads; empty if there are."""
    page_cache: PageCache


def disk_probes(
    files: RecordFiles,
    records: Sequence[Record],
    record_bytes: int,
    memory: npt.NDArray[np.uint8],
    open_reader: ReaderFactory = _native.TimedReads,
) -> DiskProbes:
    """Probes for all block sizes that the files are long enough for, small ones first.

    Args:
        files: files to read.
        records: experts whose records are read as they are.
        record_bytes: their length.
        memory: uint8, aligned to 4096, at least LARGEST_BLOCK_BYTES.
        open_reader: opens readers (tests pass one of their own).
    """
    paths = [str(path) for path in files.paths]
    refusal = open_reader(paths, "auto", 1).fallback_reason
    page_cache = PageCache(files)
    modes: Iterable[tuple[str, PageCache | None]] = [("buffered", page_cache)]
    if not refusal:
        modes = [("direct", None), *modes]
    record_block = min(record_bytes, LARGEST_BLOCK_BYTES)
    blocks = sorted({(block, False) for block in BLOCK_BYTES} | {(record_block, True)})
    reads = []
    latencies = []
    seed = 0
    for mode, cache in modes:
        readers = {depth: open_reader(paths, "auto" if mode == "direct" else mode, depth) for depth in QUEUE_DEPTHS}
        for block, of_record in blocks:
            for depth in QUEUE_DEPTHS:
                seed += 1
                places = RecordPlaces(files, records, block, seed) if of_record else BlockPlaces(files, block, seed)
                if places.count == 0 or block * depth > memory.nbytes:
                    continue
                reads.append(ReadProbe(mode, block, depth, of_record, readers[depth], places, memory, files, cache))
        pages = BlockPlaces(files, LATENCY_BLOCK_BYTES, seed)
        latencies.append(LatencyProbe(mode, readers[1], pages, memory, files, cache))
    return DiskProbes(reads, latencies, refusal, page_cache)


def block_name(block_bytes: int) -> str:
    """``64 KiB``, ``4 MiB``, or ``11.5 MiB``."""
    if block_bytes < 1 << 20:
        return f"{block_bytes / 1024:.4g} KiB"
    return f"{block_bytes / (1 << 20):.4g} MiB"
