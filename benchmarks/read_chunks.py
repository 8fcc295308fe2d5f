"""How the executor's reads are cut, and what the checksum costs then (docs/results/read_chunks.md).

Reads whole records of experts, at random, directly from a packed folder, through the executor's own readers, with and
without checksums: one record at a time, three at a time (what a layer misses), and twelve. Every read goes to the next
place of 384 MiB. All cuts run in turn, in another order every round; printed are milliseconds per record, medians, and
the median of the ratios to the reference within a round.

Run: python benchmarks/read_chunks.py PACKED_FOLDER [--rounds 12]
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from zipmoe import _native
from zipmoe.profiling.read_places import RecordPlaces, record_files
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.manifest import ALIGNMENT_BYTES
from zipmoe.store.packed_folder import PackedFolder

MIB = 1 << 20
MEMORY_BYTES = 384 * MIB
BURSTS = {1: 6, 3: 2, 12: 1}
"""Records at a time, and how often in a round."""


@dataclass(frozen=True)
class Cut:
    """How reads are cut and carried out."""

    backend: str
    parallel: int
    """Threads, or the depth of the queue."""
    longest_bytes: int
    shortest_bytes: int
    """As long as the longest: chunks do not become shorter towards the end of a read."""
    checksums: bool = True

    @property
    def label(self) -> str:
        """For people."""
        length = f"{self.longest_bytes / MIB:.3g} MiB"
        if self.shortest_bytes < self.longest_bytes:
            length = f"halves of the rest, {length} to {self.shortest_bytes / MIB:.3g} MiB"
        return f"{self.backend} {self.parallel}, {length}{'' if self.checksums else ', no checksums'}"


REFERENCE = Cut("threads", 4, 4 * MIB, 4 * MIB)


def cuts(record_bytes: int, refusal: str) -> list[Cut]:
    """All that is compared."""
    lengths = [1 * MIB, 2 * MIB, 3 * MIB, 4 * MIB]
    # Equal chunks, as many as the threads or twice that.
    lengths += [-(-record_bytes // parts // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for parts in (4, 6)]
    found = [Cut("threads", threads, length, length) for threads in (2, 3, 4) for length in lengths]
    tapered = [(4 * MIB, MIB // 2), (4 * MIB, MIB), (2 * MIB, MIB // 2)]
    found += [Cut("threads", threads, *lengths) for threads in (2, 3, 4) for lengths in tapered]
    found += [Cut("threads", 4, 4 * MIB, least, checksums=False) for least in (MIB // 2, 4 * MIB)]
    if not refusal:
        found += [Cut("uring", 8, 2 * MIB, least) for least in (MIB // 2, 2 * MIB)]
        found += [Cut("uring", 8, 4 * MIB, MIB // 2)]
        found += [Cut("uring", 8, 2 * MIB, 2 * MIB, checksums=False)]
    return found


def measure(folder: Path, rounds: int) -> dict[Cut, dict[int, list[float]]]:
    """Seconds per record, by cut and records at a time; one entry per round."""
    opened = PackedFolder.open(folder)
    records = [record for group in opened.manifest.expert_groups for record in group.records]
    record_bytes = min(record.length for record in records)
    files = record_files(opened.path, records)
    paths = [str(path) for path in files.paths]
    memory = TouchedMemory(MEMORY_BYTES).take(MEMORY_BYTES)
    places = RecordPlaces(files, records, record_bytes, seed=1)
    refusal = _native.uring_refusal()
    if refusal:
        print(f"io_uring is left out: {refusal}", file=sys.stderr)
    order = cuts(record_bytes, refusal)
    found: dict[Cut, dict[int, list[float]]] = {cut: {burst: [] for burst in BURSTS} for cut in order}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):  # the first one warms up
        shuffle(order)
        for cut in order:
            reader = _native.TimedReader(
                paths,
                cut.backend,
                parallel=cut.parallel,
                block_bytes=cut.longest_bytes,
                least_block_bytes=cut.shortest_bytes,
            )
            for burst, repetitions in BURSTS.items():
                seconds = 0.0
                for _ in range(repetitions):
                    took, _, error = reader.read(places.take(burst), record_bytes, memory, cut.checksums)
                    if error:
                        raise OSError(error, os.strerror(error))
                    seconds += took
                if number > 0:
                    found[cut][burst].append(seconds / repetitions / burst)
    return found


def print_table(found: dict[Cut, dict[int, list[float]]]) -> None:
    """A Markdown table."""
    print("| cut | " + " | ".join(f"{burst} at a time: ms | ratio" for burst in BURSTS) + " |")
    print("|---" * (1 + 2 * len(BURSTS)) + "|")
    for cut, by_burst in found.items():
        cells = []
        for burst, seconds in by_burst.items():
            ratios = [ours / theirs for ours, theirs in zip(seconds, found[REFERENCE][burst], strict=True)]
            cells.append(f"{1e3 * statistics.median(seconds):.2f} | {statistics.median(ratios):.3f}")
        print(f"| {cut.label} | {' | '.join(cells)} |")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="packed folder, larger than what the disk caches")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores; ratios to {REFERENCE.label}\n")
    print_table(measure(arguments.folder, arguments.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
