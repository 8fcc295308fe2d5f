"""The sample of the folder's weights, the codecs it is encoded with, and the native timed work."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from zipmoe import _native
from zipmoe.codecs.registry import codec_names
from zipmoe.errors import CorruptRecordError, TruncatedShardError
from zipmoe.profiling.codec_probes import BETWEEN_PRODUCTS, codec_memory_bytes, codec_probes, encode_sample
from zipmoe.profiling.expert_sample import SampleMatrix, most_common_kind, read_sample
from zipmoe.profiling.measure import exponent_ratios, worker_counts
from zipmoe.profiling.memory_probes import memory_probes
from zipmoe.profiling.operating_points import operating_points
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.manifest import CodecSettings
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_encoder import encode_record

TINY_EXPERTS = 12


@pytest.fixture(scope="module")
def memory() -> TouchedMemory:
    return TouchedMemory(16 << 20)


def test_sample_is_the_folders_experts(zstd_folder: PackedFolder, fx3_folder: PackedFolder) -> None:
    for folder in (zstd_folder, fx3_folder):
        kind = most_common_kind(folder.manifest)
        assert [name for name, _, _ in kind.shapes] == list(folder.manifest.expert_groups[0].parameters)
        assert len(kind.records) == TINY_EXPERTS
        sample = read_sample(folder, kind)
        assert [m.weights.shape for m in sample] == [(rows, columns) for _, rows, columns in kind.shapes] * TINY_EXPERTS
    both = [read_sample(folder, most_common_kind(folder.manifest)) for folder in (zstd_folder, fx3_folder)]
    assert all(np.array_equal(a.weights, b.weights) for a, b in zip(*both, strict=True))


def test_a_small_sample_is_one_expert(zstd_folder: PackedFolder) -> None:
    kind = most_common_kind(zstd_folder.manifest)
    assert len(read_sample(zstd_folder, kind, weights_wanted=1)) == len(kind.shapes)


def test_shards_of_a_cut_matrix_keep_their_length() -> None:
    cut = SampleMatrix("w", np.zeros((250, 4), np.uint16), all_rows=1000)
    assert [cut.shards(count) for count in (1, 4, 8)] == [1, 1, 2]
    assert SampleMatrix("w", np.zeros((8, 4), np.uint16), all_rows=8).shards(4) == 4


@pytest.mark.parametrize(("damage", "error"), [("flip", CorruptRecordError), ("truncate", TruncatedShardError)])
def test_a_damaged_record_is_refused(zstd_packed: Path, tmp_path: Path, damage: str, error: type[Exception]) -> None:
    copy = PackedFolder.open(Path(shutil.copytree(zstd_packed, tmp_path / "copy")))
    kind = most_common_kind(copy.manifest)
    file = copy.path / kind.records[0].file
    data = bytearray(file.read_bytes())
    at = kind.records[0].offset
    if damage == "flip":
        data[at + 100] ^= 1
    file.write_bytes(data if damage == "flip" else data[: at + 100])
    with pytest.raises(error, match=r"zipmoe\.model.*packed"):
        read_sample(copy, kind)


def test_operating_points_are_the_folders_and_every_codecs_default() -> None:
    keys = [point.key for point in operating_points(CodecSettings("fx3", None, 1))]
    assert keys[0] == "fx3"
    assert set(keys) == {*codec_names(), *(("zstd huf",) if "zstd" in codec_names() else ())}
    points = operating_points(CodecSettings("zstd", "huf", 2))
    assert [point.key for point in points if point.of_folder] == ["zstd"]
    assert len({point.key for point in points}) == len(points)
    assert "zstd 3" in {point.key for point in points}
    assert {point.settings.shards for point in points if point.separable} == {2}


def test_rho_of_the_sample_is_that_of_the_folder(zstd_folder: PackedFolder) -> None:
    kind = most_common_kind(zstd_folder.manifest)
    encoded = encode_sample(operating_points(zstd_folder.manifest.codec)[0], read_sample(zstd_folder, kind))
    ratios = exponent_ratios(kind)
    assert [ratio.matrix for ratio in ratios] == [name for name, _, _ in kind.shapes]
    assert all(0 < ratio.lowest <= ratio.mean <= ratio.highest for ratio in ratios)
    weights = [rows * columns for _, rows, columns in kind.shapes]
    mean = sum(ratio.mean * count for ratio, count in zip(ratios, weights, strict=True)) / sum(weights)
    assert encoded.exponent_ratio == pytest.approx(mean)
    assert sum(raw for _, raw in encoded.shards()) == encoded.weights
    compressed = sum(len(shard) for shard, _ in encoded.shards())
    assert compressed / encoded.weights == pytest.approx(encoded.exponent_ratio)


def test_every_step_runs_and_counts_its_bytes(zstd_folder: PackedFolder) -> None:
    sample = read_sample(zstd_folder, most_common_kind(zstd_folder.manifest))
    encoded = [encode_sample(point, sample) for point in operating_points(zstd_folder.manifest.codec)]
    memory = TouchedMemory(codec_memory_bytes(encoded, sample, 2))
    probes = codec_probes(encoded, sample, (1, 2), memory)
    weights = sum(matrix.weights.size for matrix in sample)
    assert {(probe.step, probe.workers) for probe in probes} == {
        *((step, count) for step in ("decompress", "decode", "recombine") for count in (1, 2)),
        (BETWEEN_PRODUCTS, 2),
    }
    assert len({probe.label for probe in probes}) == len(probes)
    for probe in probes:
        assert probe.work_per_unit == weights * (1 if probe.step == "decompress" else 2)
        assert probe.run(2) > 0


def test_worker_counts() -> None:
    assert [worker_counts(n) for n in (1, 2, 3, 6, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 6), (1, 2, 4, 8)]


# --- native


def test_native_decompression_fills_the_scratch(memory: TouchedMemory) -> None:
    memory.clear()
    weights = np.arange(64 * 32, dtype=np.uint16).reshape(64, 32) * 7
    sections, shard_bytes = _native.encode("zstd", weights, 3, False, 1)
    scratch = memory.take(4096)
    _native.TimedWork(1).decompress("zstd", [(sections[0][1], weights.size)], 1, scratch)
    assert np.array_equal(scratch[: weights.size], _native.split(weights.reshape(-1))[0])
    assert sum(shard_bytes) == sections[0][1].size


def test_native_recombination_and_decoding_give_the_weights(memory: TouchedMemory) -> None:
    memory.clear()
    weights = np.random.default_rng(0).integers(0, 1 << 16, (64, 32)).astype(np.uint16)
    scratch = memory.take(2 * 2 * weights.size)
    planes = _native.split(weights.reshape(-1))
    _native.TimedWork(1).recombine([planes], 1, scratch)
    assert np.array_equal(scratch[: 2 * weights.size].view(np.uint16), weights.reshape(-1))
    for codec in codec_names():
        sections, shards = _native.encode(codec, weights, 3, False, 1)
        out = np.zeros(weights.size, np.uint16)
        matrix = (64, 32, [data for _, data in sections], shards)
        assert _native.TimedDecoder(codec, 2).decode([matrix], 3, out) > 0
        assert np.array_equal(out, weights.reshape(-1))
        with pytest.raises(ValueError, match="too small"):
            _native.TimedDecoder(codec, 1).decode([matrix], 1, out[:-1].copy())


def test_native_copy_copies_and_read_reads(memory: TouchedMemory) -> None:
    memory.clear()
    piece = memory.take(4 << 20)
    piece[:] = 0
    piece[: 2 << 20] = np.arange(2 << 20, dtype=np.uint64).astype(np.uint8)
    probes = memory_probes(piece, (1, 2))
    assert [(probe.step, probe.workers, probe.work_per_unit) for probe in probes] == [
        ("read", 1, 4 << 20),
        ("copy", 1, 2 << 20),
        ("read", 2, 4 << 20),
        ("copy", 2, 2 << 20),
    ]
    assert all(probe.run(1) > 0 for probe in probes)
    assert np.array_equal(piece[: 2 << 20], piece[2 << 20 :])


def test_native_work_refuses_nonsense(memory: TouchedMemory) -> None:
    memory.clear()
    work = _native.TimedWork(2)
    assert work.workers == 2
    scratch = memory.take(8192)
    none = np.zeros(0, np.uint8)
    with pytest.raises(ValueError, match="no E-chunks"):
        work.decompress("fx3", [(none, 1)], 1, scratch)
    with pytest.raises(ValueError, match="no shards"):
        work.decompress("zstd", [], 1, scratch)
    with pytest.raises((ValueError, RuntimeError), match="scratch"):
        work.decompress("zstd", [(none, 1 << 20)], 1, scratch)
    with pytest.raises((ValueError, RuntimeError), match="zstd"):
        work.decompress("zstd", [(np.ones(50, np.uint8), 100)], 1, scratch)
    with pytest.raises(ValueError, match="no planes"):
        work.recombine([], 1, scratch)
    with pytest.raises(ValueError, match="length"):
        work.copy_memory(scratch[:100], scratch[200:400], 1)
    with pytest.raises(ValueError, match="no memory"):
        work.read_memory(none, 1)
    with pytest.raises(ValueError, match="no matrices"):
        _native.TimedDecoder("fx3", 1).decode([], 1, np.zeros(1, np.uint16))


def test_library_versions() -> None:
    assert _native.library_version("fx3") == ""
    assert _native.library_version("nothing") == ""
    if "zstd" in codec_names():
        assert _native.library_version("zstd").startswith("zstd 1.")
    assert _native.library_version("lz4") == _native.library_version("lz4hc")


def test_touched_memory_is_aligned_and_bounded() -> None:
    memory = TouchedMemory(1 << 20)
    assert memory.capacity_bytes >= 1 << 20
    first, second = memory.take(100, tail_bytes=64), memory.take(100)
    assert first.ctypes.data % 4096 == second.ctypes.data % 4096 == 0
    assert second.ctypes.data - first.ctypes.data == 4096
    with pytest.raises(MemoryError):
        memory.take(memory.capacity_bytes)
    memory.clear()
    assert memory.take(memory.capacity_bytes).nbytes == memory.capacity_bytes


def test_records_of_the_helper_are_what_the_probe_reads() -> None:
    """The encoder of records and that of the sample agree on every length."""
    import torch

    weights = (torch.randn(40, 32, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    settings = CodecSettings("zstd", 3, 2)
    record = encode_record([("w", weights)], settings, settings.shards)
    sample = [SampleMatrix("w", weights.view(torch.int16).numpy().view(np.uint16), 40)]
    encoded = encode_sample(operating_points(settings)[0], sample)
    assert encoded.matrices[0][3] == record.matrices[0].shard_bytes
