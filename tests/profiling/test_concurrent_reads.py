"""How many reads at a time a disk wants."""

from __future__ import annotations

import errno

import numpy as np
import pytest
from profiling_machine import FakeEngineDisk

from zipmoe import _native
from zipmoe.errors import PackedFolderError
from zipmoe.profiling.concurrent_read_probes import (
    CONCURRENT_READS,
    ConcurrentReadProbe,
    best_number,
    concurrent_read_probes,
)
from zipmoe.profiling.expert_sample import most_common_kind
from zipmoe.profiling.read_places import record_files
from zipmoe.profiling.rounds import run_rounds
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder

BACKENDS = ["threads"] if _native.uring_refusal() else ["threads", "uring"]


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    return TouchedMemory(8 << 20).take(8 << 20)


def probes_of(folder: PackedFolder, memory: np.ndarray, **arguments: object) -> list[ConcurrentReadProbe]:
    kind = most_common_kind(folder.manifest)
    files = record_files(folder.path, folder.manifest.records())
    return concurrent_read_probes(files, kind.records, kind.record_bytes, memory, **arguments)  # type: ignore[arg-type]


def test_a_known_disk_gives_its_exact_rates(fx3_folder: PackedFolder, memory: np.ndarray) -> None:
    disk = FakeEngineDisk(bytes_per_second=5e8)
    probes = probes_of(fx3_folder, memory, open_reader=disk.open)
    assert [(p.backend, p.parallel) for p in probes] == [(b, n) for b in BACKENDS for n in CONCURRENT_READS]
    for probe, found in zip(probes, run_rounds(probes, 2.0, clock=disk.clock).samples, strict=True):
        assert found is not None
        assert found.rate().median == pytest.approx(5e8 * min(probe.parallel, disk.deepest[probe.backend]))
    assert disk.checksums == {True}  # as the engine reads


def test_the_engines_own_reader_reads_what_is_there(fx3_folder: PackedFolder, memory: np.ndarray) -> None:
    for probe in probes_of(fx3_folder, memory):
        assert probe.run(probe.least_units) > 0


def test_a_run_keeps_all_reads_under_way(fx3_folder: PackedFolder, memory: np.ndarray) -> None:
    for probe in probes_of(fx3_folder, memory):
        assert probe.least_units == max(2, 2 * probe.parallel)  # its records are shorter than what reads are cut into
        probe.record_bytes = 16 << 20  # 4 chunks of the threads', 8 of io_uring's
        chunks = {"threads": 4, "uring": 8}[probe.backend]
        assert probe.least_units == max(2, -(-2 * probe.parallel // chunks))


def test_a_disk_that_fails_is_named(fx3_folder: PackedFolder, memory: np.ndarray) -> None:
    probe = probes_of(fx3_folder, memory, open_reader=FakeEngineDisk(error_number=errno.EIO).open)[0]
    with pytest.raises(PackedFolderError, match="Input/output error"):
        probe.run(1)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({1: 1.0, 2: 2.0, 4: 3.0, 8: 3.0}, 4),
        ({1: 2.95, 2: 3.0, 4: 2.9}, 1),  # 2 % of the best rate do not pay for another thread
        ({1: 2.93, 2: 3.0, 4: 2.9}, 2),
        ({1: 1.0}, 1),
        ({16: 5.0, 1: 4.0}, 16),
    ],
)
def test_the_smallest_number_that_is_good_enough(rates: dict[int, float], expected: int) -> None:
    assert best_number(rates) == expected
