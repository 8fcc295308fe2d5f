"""Where the disk probes read: aligned blocks all over the folder's record files, in an order without repetition."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from zipmoe.store.manifest import ALIGNMENT_BYTES, Record

Place = tuple[int, int]
"""Index of the file, offset in bytes."""
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class RecordFiles:
    """The files that hold records, in the order in which readers open them."""

    paths: tuple[Path, ...]
    file_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Of all files."""
        return sum(self.file_bytes)


class PlaceSequence:
    """An endless sequence of places that visits every one of a set before it repeats itself.

    Steps of about the golden ratio of the whole, so that neighbours in the sequence lie far apart on the disk.
    """

    def __init__(self, count: int, seed: int) -> None:
        """``count`` places, at least one; sequences of different seeds start at different places."""
        self._count = count
        self._position = random.Random(seed).randrange(count)
        self._stride = max(1, round(count * _GOLDEN_RATIO))
        while math.gcd(self._stride, count) != 1:
            self._stride += 1

    def __next__(self) -> int:
        """Number of the next place, 0 .. count - 1."""
        number = self._position
        self._position = (self._position + self._stride) % self._count
        return number


class BlockPlaces:
    """All blocks of one length at multiples of that length, in all files."""

    def __init__(self, files: RecordFiles, block_bytes: int, seed: int) -> None:
        """Check ``count`` before use: files may be too short for the block."""
        self._ends = list(accumulate(bytes_ // block_bytes for bytes_ in files.file_bytes))
        self._block_bytes = block_bytes
        self.count = self._ends[-1] if self._ends else 0
        """Different places."""
        self._sequence = PlaceSequence(self.count, seed) if self.count else None

    def take(self, number: int) -> list[Place]:
        """The next ``number`` places."""
        if self._sequence is None:
            raise ValueError(f"no file holds a block of {self._block_bytes} bytes")
        return [self._place(next(self._sequence)) for _ in range(number)]

    def _place(self, index: int) -> Place:
        file = bisect_right(self._ends, index)
        first = self._ends[file - 1] if file else 0
        return file, (index - first) * self._block_bytes


class RecordPlaces:
    """Where records of experts begin."""

    def __init__(self, files: RecordFiles, records: Sequence[Record], block_bytes: int, seed: int) -> None:
        """Leaves out records after which their file is shorter than the block."""
        numbers = {path.name: index for index, path in enumerate(files.paths)}
        self._places = [
            (numbers[record.file], record.offset)
            for record in records
            if record.offset + block_bytes <= files.file_bytes[numbers[record.file]]
        ]
        self.count = len(self._places)
        """Different places."""
        self._sequence = PlaceSequence(self.count, seed) if self.count else None

    def take(self, number: int) -> list[Place]:
        """The next ``number`` places."""
        if self._sequence is None:
            raise ValueError("no record is long enough")
        return [self._places[next(self._sequence)] for _ in range(number)]


def record_files(folder: Path, records: Sequence[Record]) -> RecordFiles:
    """The files of these records, with their lengths rounded down to whole aligned blocks."""
    paths = tuple(folder / name for name in sorted({record.file for record in records}))
    lengths = tuple(path.stat().st_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES for path in paths)
    return RecordFiles(paths, lengths)
