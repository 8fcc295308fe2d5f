"""Compare the reader's backends: a pool of threads against io_uring (docs/results/io_backends.json).

Reads whole records of experts, at random, directly from a packed folder, through the executor's own readers, checksums
included: one record at a time, the four misses of a layer at a time, and four at a time while every core computes
something else. All configurations run in turn, in another order every round, and ratios are taken within a round. CPU
seconds are those of the whole process, kernel time included (in the third situation, where the cores compute, the share
of the computation that is left stands for them).

Run: python benchmarks/io_backends.py PACKED_FOLDER [--seconds 50] [--json docs/results/io_backends.json]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from zipmoe import _native
from zipmoe.profiling.read_places import RecordPlaces, record_files
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder

MIB = 1 << 20
WHOLE = 0
"""As block length: a record is one read."""
SLOTS = 8


@dataclass(frozen=True)
class Configuration:
    """A backend with parameters."""

    backend: str
    parallel: int
    """Threads, or the depth of the queue."""
    block_bytes: int
    completion_threads: int = 1
    """That compute checksums, with io_uring; 0: the thread of the ring does."""
    registered: bool = False
    """Whether the memory is registered with io_uring."""

    @property
    def label(self) -> str:
        """For people."""
        block = "whole record" if self.block_bytes == WHOLE else f"{self.block_bytes // MIB} MiB"
        extra = ", registered memory" if self.registered else ""
        if self.backend == "uring" and self.completion_threads != 1:
            extra += f", {self.completion_threads} completion threads"
        return f"{self.backend} {self.parallel} x {block}{extra}"


REFERENCE = Configuration("threads", 4, 4 * MIB)
CONFIGURATIONS = (
    *(Configuration("threads", threads, block * MIB) for threads in (1, 2, 4, 8) for block in (1, 4)),
    *(Configuration("uring", depth, block * MIB) for depth in (4, 8, 16, 32, 64) for block in (1, 2, 4)),
    Configuration("uring", 4, WHOLE),
    Configuration("uring", 8, 4 * MIB, completion_threads=0),
    Configuration("uring", 8, 4 * MIB, completion_threads=2),
    Configuration("uring", 8, 4 * MIB, registered=True),
)


@dataclass(frozen=True)
class Situation:
    """What is asked of the disk, and what else goes on."""

    label: str
    records_at_a_time: int
    repetitions: int
    busy_cores: bool


SITUATIONS = (
    Situation("one record at a time", 1, 6, False),
    Situation("four records at a time", 4, 2, False),
    Situation("four records at a time, busy cores", 4, 2, True),
)


@dataclass
class Measured:
    """One configuration in one situation; one entry per round."""

    bytes_per_second: list[float] = field(default_factory=list)
    cpu_seconds_per_gigabyte: list[float] = field(default_factory=list)
    computations_per_second: list[float] = field(default_factory=list)


class Computation:
    """Hashes on every core until it is told to stop; counts what it gets done."""

    def __init__(self) -> None:
        self.done = [0] * len(os.sched_getaffinity(0))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(core,)) for core in range(len(self.done))]

    def _work(self, core: int) -> None:
        data = bytes(MIB // 4)
        while not self._stop.is_set():
            hashlib.blake2b(data).digest()  # without the interpreter lock
            self.done[core] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Computes inside of the block."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()


class Bench:
    """Open readers on a packed folder, and the memory that they read into."""

    def __init__(self, folder: Path, configurations: tuple[Configuration, ...]) -> None:
        opened = PackedFolder.open(folder)
        records = [record for group in opened.manifest.expert_groups for record in group.records]
        self.record_bytes = min(record.length for record in records)
        files = record_files(opened.path, records)
        self.memory = TouchedMemory(SLOTS * self.record_bytes).take(SLOTS * self.record_bytes)
        self._places = RecordPlaces(files, records, self.record_bytes, seed=1)
        self._readers = {configuration: self._open(configuration, files.paths) for configuration in configurations}

    def _open(self, configuration: Configuration, paths: tuple[Path, ...]) -> _native.TimedReader:
        whole = -(-self.record_bytes // MIB) * MIB
        return _native.TimedReader(
            [str(path) for path in paths],
            configuration.backend,
            parallel=configuration.parallel,
            block_bytes=configuration.block_bytes or whole,
            completion_threads=configuration.completion_threads,
            memory=self.memory if configuration.registered else None,
        )

    def run(self, configuration: Configuration, situation: Situation, measured: Measured) -> None:
        """Read some records; appends to ``measured``."""
        groups = [self._places.take(situation.records_at_a_time) for _ in range(situation.repetitions)]
        if not situation.busy_cores:
            cpu = time.process_time()
            seconds, gigabytes = self._read(configuration, groups)
            measured.cpu_seconds_per_gigabyte.append((time.process_time() - cpu) / gigabytes)
        else:
            computation = Computation()
            with computation.running():
                before = sum(computation.done)
                seconds, gigabytes = self._read(configuration, groups)
                measured.computations_per_second.append((sum(computation.done) - before) / seconds)
        measured.bytes_per_second.append(gigabytes * 1e9 / seconds)

    def _read(self, configuration: Configuration, groups: list[list[tuple[int, int]]]) -> tuple[float, float]:
        total_seconds = 0.0
        total_bytes = 0
        for places in groups:
            seconds, read_bytes, error = self._readers[configuration].read(places, self.record_bytes, self.memory, True)
            if error:
                raise OSError(error, os.strerror(error))
            total_seconds += seconds
            total_bytes += read_bytes
        return total_seconds, total_bytes / 1e9


def measure(bench: Bench, configurations: tuple[Configuration, ...], seconds: float) -> dict[str, dict[str, Measured]]:
    """Rounds until the time is over; the first one warms up and is dropped."""
    results = {
        situation.label: {configuration.label: Measured() for configuration in configurations}
        for situation in SITUATIONS
    }
    order = [(situation, configuration) for situation in SITUATIONS for configuration in configurations]
    shuffle = random.Random(0).shuffle
    end = time.monotonic() + seconds
    warm = False
    while time.monotonic() < end:
        shuffle(order)
        for situation, configuration in order:
            measured = results[situation.label][configuration.label] if warm else Measured()
            bench.run(configuration, situation, measured)
        warm = True
    return results


def summary(results: dict[str, Measured]) -> dict[str, dict[str, float]]:
    """Medians, and medians of the ratios to the reference within a round."""
    reference = results[REFERENCE.label]
    table = {}
    for label, measured in results.items():
        row = {
            "gigabytes_per_second": statistics.median(measured.bytes_per_second) / 1e9,
            "rate_ratio": _ratio(measured.bytes_per_second, reference.bytes_per_second),
        }
        if measured.cpu_seconds_per_gigabyte:
            row["cpu_seconds_per_gigabyte"] = statistics.median(measured.cpu_seconds_per_gigabyte)
            row["cpu_ratio"] = _ratio(measured.cpu_seconds_per_gigabyte, reference.cpu_seconds_per_gigabyte)
        if measured.computations_per_second:
            row["computation_ratio"] = _ratio(measured.computations_per_second, reference.computations_per_second)
        table[label] = row
    return table


def _ratio(values: list[float], references: list[float]) -> float:
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


def _rounded(rounds: dict[str, list[float]]) -> dict[str, list[float]]:
    return {name: [float(f"{value:.4g}") for value in values] for name, values in rounds.items()}


def print_table(situation: str, table: dict[str, dict[str, float]], rounds: int) -> None:
    """One line per configuration."""
    print(f"\n{situation} ({rounds} rounds; ratios to {REFERENCE.label})")
    print(f"{'configuration':48}  GB/s  ratio  CPU s/GB  ratio  computed meanwhile")
    for label, row in table.items():
        cpu = f"{row['cpu_seconds_per_gigabyte']:8.4f}  {row['cpu_ratio']:5.3f}" if "cpu_ratio" in row else " " * 15
        computed = f"{row['computation_ratio']:5.3f}" if "computation_ratio" in row else ""
        print(f"{label:48}  {row['gigabytes_per_second']:4.2f}  {row['rate_ratio']:5.3f}  {cpu}  {computed}".rstrip())


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="packed folder, larger than what the disk caches")
    parser.add_argument("--seconds", type=float, default=50.0)
    parser.add_argument("--json", type=Path, help="write raw results here")
    arguments = parser.parse_args()
    refusal = _native.uring_refusal()
    if refusal:
        print(f"io_uring is left out: {refusal}", file=sys.stderr)
    configurations = tuple(each for each in CONFIGURATIONS if each.backend == "threads" or not refusal)
    bench = Bench(arguments.folder, configurations)
    results = measure(bench, configurations, arguments.seconds)
    tables = {situation: summary(measured) for situation, measured in results.items()}
    for situation, table in tables.items():
        print_table(situation, table, len(results[situation][REFERENCE.label].bytes_per_second))
    if arguments.json:
        document = {
            "machine": {"system": platform.platform(), "cores": len(os.sched_getaffinity(0)), "numpy": np.__version__},
            "record_bytes": bench.record_bytes,
            "checksums": True,
            "uring_refusal": refusal,
            "reference": REFERENCE.label,
            "summary": tables,
            "rounds": {
                situation: {label: _rounded(asdict(measured)) for label, measured in by_label.items()}
                for situation, by_label in results.items()
            },
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
