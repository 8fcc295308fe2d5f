"""Places, rates and failures of the disk probes; the native reads under them."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from profiling_machine import FakeDisk

from zipmoe import _native
from zipmoe.errors import PackedFolderError, TruncatedShardError
from zipmoe.profiling.disk_probes import QUEUE_DEPTHS, DiskProbes, block_name, disk_probes
from zipmoe.profiling.expert_sample import most_common_kind
from zipmoe.profiling.read_places import BlockPlaces, PlaceSequence, RecordFiles, RecordPlaces, record_files
from zipmoe.profiling.rounds import run_rounds
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    return TouchedMemory(8 * MIB).take(8 * MIB)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000])
def test_every_place_once_before_any_again(count: int) -> None:
    sequence = PlaceSequence(count, seed=count)
    assert sorted(next(sequence) for _ in range(count)) == list(range(count))
    assert len({next(sequence) for _ in range(count)}) == count


def test_blocks_lie_inside_the_files_at_their_multiples() -> None:
    files = RecordFiles((Path("a"), Path("b"), Path("c")), (10 * 4096, 4096, 25 * 4096))
    places = BlockPlaces(files, 3 * 4096, seed=1)
    assert places.count == 3 + 0 + 8
    taken = places.take(places.count)
    assert set(taken) == {(0, i * 3 * 4096) for i in range(3)} | {(2, i * 3 * 4096) for i in range(8)}


def test_block_longer_than_all_files() -> None:
    places = BlockPlaces(RecordFiles((Path("a"),), (4096,)), 8192, seed=0)
    assert places.count == 0
    with pytest.raises(ValueError, match="8192"):
        places.take(1)


def test_record_places_are_the_records(zstd_folder: PackedFolder) -> None:
    kind = most_common_kind(zstd_folder.manifest)
    files = record_files(zstd_folder.path, zstd_folder.manifest.records())
    places = RecordPlaces(files, kind.records, kind.record_bytes, seed=0)
    expected = {(str(zstd_folder.path / record.file), record.offset) for record in kind.records}
    assert {(str(files.paths[file]), offset) for file, offset in places.take(places.count)} <= expected
    assert places.count >= len(kind.records) - 2


def _fake(folder: PackedFolder, memory: np.ndarray, disk: FakeDisk) -> DiskProbes:
    kind = most_common_kind(folder.manifest)
    files = record_files(folder.path, folder.manifest.records())
    return disk_probes(files, kind.records, kind.record_bytes, memory, disk.open)


def test_a_known_disk_gives_its_exact_rates(zstd_folder: PackedFolder, memory: np.ndarray) -> None:
    disk = FakeDisk(bytes_per_second=5e8, deepest=4)
    probes = _fake(zstd_folder, memory, disk)
    results = run_rounds(probes.reads, 2.0, clock=disk.clock)
    assert {probe.mode for probe in probes.reads} == {"direct", "buffered"}
    assert {probe.depth for probe in probes.reads} == set(QUEUE_DEPTHS)
    assert probes.direct_refusal == ""
    for probe, found in zip(probes.reads, results.samples, strict=True):
        assert found is not None
        expected = 5e8 * min(probe.depth, 4) / (2 if probe.mode == "buffered" else 1)
        assert found.rate().median == pytest.approx(expected)
        assert found.work % probe.block_bytes == 0
    warm_up = sum(probe.least_units * probe.block_bytes for probe in probes.reads)
    assert disk.read_bytes == sum(found.work for found in results.samples if found) + warm_up


def test_latencies_are_those_of_single_reads(zstd_folder: PackedFolder, memory: np.ndarray) -> None:
    disk = FakeDisk(bytes_per_second=4096 / 100e-6)
    latencies = _fake(zstd_folder, memory, disk).latencies
    run_rounds(latencies, 0.1, clock=disk.clock)
    assert {probe.mode: max(probe.latencies) for probe in latencies} == pytest.approx(
        {"direct": 100e-6, "buffered": 200e-6}
    )


def test_without_direct_reads_only_buffered_ones_are_measured(zstd_folder: PackedFolder, memory: np.ndarray) -> None:
    probes = _fake(zstd_folder, memory, FakeDisk(refusal="the file system refuses direct I/O: Invalid argument"))
    assert {probe.mode for probe in probes.reads} == {"buffered"}
    assert [probe.mode for probe in probes.latencies] == ["buffered"]
    assert "refuses direct I/O" in probes.direct_refusal


def test_blocks_under_way_fit_into_the_memory(zstd_folder: PackedFolder) -> None:
    memory = TouchedMemory(2 * MIB).take(64 * KIB * 3)
    probes = _fake(zstd_folder, memory, FakeDisk())
    assert all(probe.block_bytes * probe.depth <= memory.nbytes for probe in probes.reads)
    assert {probe.depth for probe in probes.reads if probe.block_bytes == 64 * KIB} == {1, 2}


def test_a_fault_of_the_disk_is_one_clear_error(zstd_folder: PackedFolder, memory: np.ndarray) -> None:
    probes = _fake(zstd_folder, memory, FakeDisk(error_number=errno.EIO, short_by=4096))
    with pytest.raises(PackedFolderError, match=r"cannot read .*packed.*Input/output error") as caught:
        probes.reads[0].run(1)
    assert caught.value.hint


def test_a_file_that_became_shorter(zstd_folder: PackedFolder, memory: np.ndarray) -> None:
    probes = _fake(zstd_folder, memory, FakeDisk(short_by=4096))
    with pytest.raises(TruncatedShardError, match="became shorter"):
        probes.latencies[0].run(1)


# --- native


@pytest.fixture
def numbered_file(tmp_path: Path) -> Path:
    path = tmp_path / "numbered"
    np.arange(64 * 4096 // 8, dtype=np.uint64).tofile(path)
    return path


@pytest.mark.parametrize("mode", ["auto", "buffered"])
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_native_reads_bring_the_bytes(numbered_file: Path, memory: np.ndarray, mode: str, depth: int) -> None:
    reads = _native.TimedReads([str(numbered_file)], mode, depth)
    assert reads.depth == depth
    memory[:] = 0
    seconds, count, error_number = reads.read([(0, 3 * 4096)], 8192, memory)
    assert (count, error_number) == (8192, 0)
    assert seconds > 0
    slots = memory[: depth * 8192].view(np.uint64).reshape(depth, 1024)
    expected = np.arange(3 * 512, 5 * 512, dtype=np.uint64)
    assert [bool((slot == expected).all()) for slot in slots].count(True) == 1
    places = [(0, page * 4096) for page in range(60)]
    assert reads.read(places, 4096, memory)[1:] == (60 * 4096, 0)


def test_native_reads_stop_at_the_end_of_the_file(numbered_file: Path, memory: np.ndarray) -> None:
    reads = _native.TimedReads([str(numbered_file)], "auto", 1)
    assert reads.read([(0, 63 * 4096)], 8192, memory)[1:] == (4096, 0)


def test_native_reads_refuse_nonsense(numbered_file: Path, memory: np.ndarray, tmp_path: Path) -> None:
    reads = _native.TimedReads([str(numbered_file)], "auto", 2)
    for places, block, buffer in [
        ([(1, 0)], 4096, memory),
        ([(0, 100)], 4096, memory),
        ([(0, 0)], 1000, memory),
        ([(0, 0)], 0, memory),
        ([(0, 0)], 4096, memory[:4096]),
        ([(0, 0)], 4096, memory[64:]),
    ]:
        with pytest.raises(ValueError, match=r"multiple|memory|file"):
            reads.read(places, block, buffer)
    with pytest.raises(ValueError, match="I/O mode"):
        _native.TimedReads([str(numbered_file)], "fast", 1)
    with pytest.raises(OSError, match="cannot open") as caught:
        _native.TimedReads([str(tmp_path / "nowhere")], "auto", 1)
    assert caught.value.errno == errno.ENOENT


def test_cached_pages_can_be_seen_and_dropped(numbered_file: Path) -> None:
    with numbered_file.open("rb+") as file:
        file.flush()
        import os

        os.fsync(file.fileno())
    assert numbered_file.read_bytes()
    assert _native.cached_bytes(str(numbered_file), 0, 64 * 4096) == 64 * 4096
    assert _native.cached_bytes(str(numbered_file), 4096, 100) == 100
    assert _native.cached_bytes(str(numbered_file), 0, 0) == 0
    _native.drop_cached_pages(str(numbered_file), [(0, 64 * 4096)])
    # A file system in memory has nowhere to drop them to.
    assert _native.cached_bytes(str(numbered_file), 0, 64 * 4096) in (0, 64 * 4096)
    with pytest.raises(OSError, match="cannot open"):
        _native.cached_bytes(str(numbered_file) + "x", 0, 1)


def test_names_of_blocks() -> None:
    assert [block_name(n) for n in (64 * KIB, MIB, 4 * MIB, 143360, 12087296)] == [
        "64 KiB",
        "1 MiB",
        "4 MiB",
        "140 KiB",
        "11.53 MiB",
    ]
