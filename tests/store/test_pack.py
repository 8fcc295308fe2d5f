"""Packing: what is written, that it is all of the source, and that an interruption loses nothing."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_checkpoint import EXPERTS, LAYERS, save_tiny_checkpoint, tiny_model

from zipmoe.checkpoint.source import SourceCheckpoint
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import (
    AlreadyPackedError,
    DamagedCheckpointError,
    InvalidArgumentError,
    NotACheckpointError,
    NotAMixtureOfExpertsError,
    NotAPackedFolderError,
    NotEnoughDiskError,
    PackMismatchError,
    UnfinishedPackError,
    UnsupportedCheckpointError,
)
from zipmoe.store import pack as pack_module
from zipmoe.store.manifest import ALIGNMENT_BYTES, JOURNAL_NAME, MANIFEST_NAME
from zipmoe.store.pack import PackProgress, pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify

FX3 = CodecSettings("fx3", None, 1)
ALL_CODECS = [
    FX3,
    CodecSettings("zstd", 3, 4),
    CodecSettings("zstd", "huf", 1),
    CodecSettings("lz4", None, 2),
    CodecSettings("lz4hc", 9, 8),
]


@pytest.mark.parametrize("settings", ALL_CODECS, ids=lambda s: f"{s.name}-{s.level}-{s.shards}")
def test_every_bit_comes_back(tiny_source: Path, tmp_path: Path, settings: CodecSettings) -> None:
    pack(tiny_source, tmp_path / "packed", settings, jobs=2, min_dense_bytes=0)
    folder = PackedFolder.open(tmp_path / "packed")
    result = verify(folder, against=tiny_source, jobs=1)
    # gate_up and down of each expert; per layer q, k, v, o and three shared-expert matrices; embedding and head
    assert result.matrices_compared >= LAYERS * EXPERTS * 2 + LAYERS * 7 + 2
    packed_keys = len(json.loads((tiny_source / "model.safetensors.index.json").read_text())["weight_map"])
    assert result.plain_tensors_compared + LAYERS * EXPERTS * 3 + len(folder.manifest.dense) == packed_keys
    assert result.changed_side_files == ()


def test_special_bit_patterns_survive(tmp_path: Path) -> None:
    model = tiny_model()
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    with torch.no_grad():
        flat = model.model.layers[0].mlp.experts.gate_up_proj.view(-1)
        flat[: flat.numel()] = patterns[: flat.numel()]
        flat = model.model.layers[1].mlp.experts.gate_up_proj.view(-1)
        flat[: flat.numel()] = patterns[-flat.numel() :]
        flat = model.model.layers[1].mlp.experts.down_proj.view(-1)
        flat[: flat.numel()] = patterns[20000 : 20000 + flat.numel()]
    model.save_pretrained(tmp_path / "source")
    pack(tmp_path / "source", tmp_path / "packed", FX3, min_dense_bytes=0)
    assert verify(PackedFolder.open(tmp_path / "packed"), against=tmp_path / "source").matrices_compared > 0


def test_records_are_aligned_and_listed_like_ordinary_tensors(tiny_packed: Path) -> None:
    manifest = PackedFolder.open(tiny_packed).manifest
    weight_map = json.loads((tiny_packed / "model.safetensors.index.json").read_text())["weight_map"]
    for record in manifest.records():
        assert record.offset % ALIGNMENT_BYTES == 0
        assert record.length % ALIGNMENT_BYTES == 0
        assert weight_map[record.name] == record.file
        with safe_open(tiny_packed / record.file, framework="pt") as file:  # the library's own parser accepts the file
            assert file.get_slice(record.name).get_shape() == [record.length]
    assert set(weight_map.values()) == set(manifest.files)


def test_config_makes_transformers_refuse_without_zipmoe(tiny_packed: Path) -> None:
    config = json.loads((tiny_packed / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "zipmoe", "format_version": 1}
    assert config["experts_implementation"] == "zipmoe"
    manifest = PackedFolder.open(tiny_packed).manifest
    plain = next(name for name, entry in manifest.files.items() if entry.xxh3_64 is not None)
    with safe_open(tiny_packed / plain, framework="pt") as file:
        guard = file.get_tensor(manifest.guard_tensor)
    assert guard.shape == (1,)
    assert guard.dtype == torch.uint8


def test_side_files_are_copied_and_weights_are_not(tiny_source: Path, tiny_packed: Path) -> None:
    assert (tiny_packed / "notes.txt").read_text() == "a side file\n"
    source_weights = {p.name for p in tiny_source.glob("*.safetensors")}
    assert not source_weights & {p.name for p in tiny_packed.iterdir() if p.name.startswith("packed-")}
    assert not list(tiny_packed.glob(".*partial"))
    assert not (tiny_packed / JOURNAL_NAME).exists()


def test_progress_ends_at_the_total(tiny_source: Path, tmp_path: Path) -> None:
    seen: list[PackProgress] = []
    pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)


class _StopError(Exception):
    pass


def _interrupt_after(count: int) -> object:
    calls = 0

    def report(progress: PackProgress) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            raise _StopError

    return report


@pytest.mark.parametrize("settings", [FX3, CodecSettings("zstd", 3, 2)], ids=["fx3", "zstd"])
def test_interrupted_pack_continues_and_gives_the_same_folder(
    tiny_source: Path, tmp_path: Path, settings: CodecSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "FLUSH_BYTES", 1)  # every record is acknowledged at once
    monkeypatch.setattr(pack_module, "RECORD_SHARD_SOURCE_BYTES", 40_000)  # several files
    reference, resumed = tmp_path / "reference", tmp_path / "resumed"
    pack(tiny_source, reference, settings, jobs=1, min_dense_bytes=0)
    for count in (1, 4, 9, 14):
        with pytest.raises(_StopError):
            pack(tiny_source, resumed, settings, jobs=2, min_dense_bytes=0, report=_interrupt_after(count))  # type: ignore[arg-type]
        with pytest.raises(UnfinishedPackError):
            PackedFolder.open(resumed)
    seen: list[PackProgress] = []
    pack(tiny_source, resumed, settings, jobs=2, min_dense_bytes=0, report=seen.append)
    assert seen[-1].resumed_bytes > 0
    assert _contents(resumed) == _contents(reference)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_killed_process_leaves_nothing_that_looks_finished(tiny_source: Path, tmp_path: Path) -> None:
    script = f"""
import os, signal
from pathlib import Path
from zipmoe.store import pack as p
from zipmoe.codecs.codec_settings import CodecSettings
p.FLUSH_BYTES = 1
calls = 0
def report(progress):
    global calls
    calls += 1
    if calls == 5:
        os.kill(os.getpid(), signal.SIGKILL)
settings = CodecSettings("fx3", None, 1)
p.pack(Path({str(tiny_source)!r}), Path({str(tmp_path / "packed")!r}), settings, jobs=1, report=report)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert not (tmp_path / "packed" / MANIFEST_NAME).exists()
    assert not (tmp_path / "packed" / "config.json").exists()
    with pytest.raises(UnfinishedPackError, match="interrupted"):
        PackedFolder.open(tmp_path / "packed")
    pack(tiny_source, tmp_path / "packed", FX3, jobs=1)
    assert verify(PackedFolder.open(tmp_path / "packed"), against=tiny_source).records > 0


def test_resuming_with_other_parameters_or_another_source_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(_StopError):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=_interrupt_after(3))  # type: ignore[arg-type]
    with pytest.raises(PackMismatchError, match="codec"):
        pack(tiny_source, tmp_path / "packed", CodecSettings("zstd", 3, 1), jobs=1)
    other = save_tiny_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(PackMismatchError, match="source fingerprint"):
        pack(other, tmp_path / "packed", FX3, jobs=1)


def test_damage_to_an_interrupted_pack_is_noticed(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "FLUSH_BYTES", 1)
    with pytest.raises(_StopError):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=_interrupt_after(5))  # type: ignore[arg-type]
    partial = next((tmp_path / "packed").glob(".packed-*"))
    data = bytearray(partial.read_bytes())
    data[2 * ALIGNMENT_BYTES] ^= 1
    partial.write_bytes(data)
    with pytest.raises(PackMismatchError, match="damaged"):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1)


def test_torn_journal_line_is_ignored(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "FLUSH_BYTES", 1)
    with pytest.raises(_StopError):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=_interrupt_after(5))  # type: ignore[arg-type]
    with (tmp_path / "packed" / JOURNAL_NAME).open("ab") as journal:
        journal.write(b'{"name": "zipmoe.torn')
    pack(tiny_source, tmp_path / "packed", FX3, jobs=1)
    assert verify(PackedFolder.open(tmp_path / "packed"), against=tiny_source).records > 0


def test_two_packs_into_one_folder_at_once_are_refused(tiny_source: Path, tmp_path: Path) -> None:
    def pack_again(progress: PackProgress) -> None:
        with pytest.raises(PackMismatchError, match="another process is packing"):
            pack(tiny_source, tmp_path / "packed", FX3, jobs=1)

    pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=pack_again)


def test_full_disk_is_one_clear_error_and_can_be_continued(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipmoe.store.record_shard import RecordShardWriter

    append = RecordShardWriter.append
    calls = 0

    def append_until_full(self: RecordShardWriter, data: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(self, data)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordShardWriter, "append", append_until_full)
    with pytest.raises(NotEnoughDiskError, match="disk of"):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1)
    monkeypatch.undo()
    pack(tiny_source, tmp_path / "packed", FX3, jobs=1)
    assert verify(PackedFolder.open(tmp_path / "packed"), against=tiny_source).records > 0


def test_too_little_disk_is_refused_before_writing(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(NotEnoughDiskError, match=r"needs about .* are free"):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1)
    assert not list((tmp_path / "packed").glob("*.safetensors"))


def test_bad_sources(tiny_source: Path, tiny_packed: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    destination = tmp_path / "packed"
    with pytest.raises(NotACheckpointError):
        pack(tmp_path / "nowhere", destination, FX3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotACheckpointError, match=r"config\.json"):
        pack(tmp_path / "empty", destination, FX3)
    with pytest.raises(AlreadyPackedError):
        pack(tiny_packed, destination, FX3)
    dense = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    dense.to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    with pytest.raises(NotAMixtureOfExpertsError):
        pack(tmp_path / "dense", destination, FX3)
    tiny_model().float().save_pretrained(tmp_path / "float32")
    with pytest.raises(NotAMixtureOfExpertsError, match="BF16"):
        pack(tmp_path / "float32", destination, FX3)
    fp8 = save_tiny_checkpoint(tmp_path / "fp8")
    config = json.loads((fp8 / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (fp8 / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpointError, match="fp8"):
        pack(fp8, destination, FX3)
    assert not destination.exists()


def test_damaged_sources(tmp_path: Path) -> None:
    source = save_tiny_checkpoint(tmp_path / "source")
    shard = sorted(source.glob("*.safetensors"))[2]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(DamagedCheckpointError, match=shard.name):
        pack(source, tmp_path / "packed", FX3)
    shard.unlink()
    with pytest.raises(DamagedCheckpointError, match="missing"):
        pack(source, tmp_path / "packed", FX3)
    shard.write_bytes(whole)
    index = source / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    missing = "model.layers.0.mlp.experts.3.up_proj.weight"
    file = source / content["weight_map"].pop(missing)
    index.write_text(json.dumps(content))
    save_file({k: t for k, t in load_file(file).items() if k != missing}, file, metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpointError, match="experts"):
        pack(source, tmp_path / "packed", FX3)
    index.write_text('{"weight_map": {"a": "../../outside.safetensors"}}')
    with pytest.raises(DamagedCheckpointError, match="outside"):
        pack(source, tmp_path / "packed", FX3)


def test_bad_destinations(tiny_source: Path, tiny_packed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="is a file"):
        pack(tiny_source, tmp_path / "file", FX3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep me")
    with pytest.raises(InvalidArgumentError, match="not empty"):
        pack(tiny_source, tmp_path / "full", FX3)
    assert (tmp_path / "full" / "precious.txt").read_text() == "keep me"
    with pytest.raises(AlreadyPackedError):
        pack(tiny_source, tiny_packed, FX3)
    with pytest.raises(InvalidArgumentError, match="same folder"):
        pack(tiny_source, tiny_source, FX3)
    with pytest.raises(NotAPackedFolderError):
        PackedFolder.open(tiny_source)


def test_verify_against_another_checkpoint_is_refused(tiny_packed: Path, tmp_path: Path) -> None:
    from zipmoe.errors import ManifestError

    other = save_tiny_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ManifestError, match="not what this folder was packed from"):
        verify(PackedFolder.open(tiny_packed), against=other)


def test_large_dense_matrices_are_cut_into_blocks(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipmoe.store import pack_plan

    monkeypatch.setattr(pack_plan, "DENSE_BLOCK_BYTES", 4000)
    pack(tiny_source, tmp_path / "packed", CodecSettings("zstd", 1, 3), min_dense_bytes=0)
    folder = PackedFolder.open(tmp_path / "packed")
    embedding = next(m for m in folder.manifest.dense if m.parameter == "model.embed_tokens.weight")
    assert len(embedding.blocks) == 4  # 160 rows of 96 bytes: 41 rows a block
    assert sum(block.matrices[0].rows for block in embedding.blocks) == 160


@pytest.mark.parametrize("shift", range(0, 64, 8))
def test_plain_tensors_keep_their_alignment(tmp_path: Path, shift: int) -> None:
    """Transformers computes on the mapped file, and some float32 products depend on the alignment of their operands."""
    source = save_tiny_checkpoint(tmp_path / "source")
    for path in source.glob("*.safetensors"):  # the same tensors behind headers of other lengths
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = data[8 : 8 + length] + b" " * shift
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    pack(source, tmp_path / "packed", FX3, jobs=1)
    before = SourceCheckpoint(source).tensors
    manifest = PackedFolder.open(tmp_path / "packed").manifest
    compared = 0
    for name, entry in manifest.files.items():
        if entry.xxh3_64 is None:
            continue
        data = (tmp_path / "packed" / name).read_bytes()
        length = int.from_bytes(data[:8], "little")
        for key, tensor in json.loads(data[8 : 8 + length]).items():
            if key in before:
                assert (8 + length + tensor["data_offsets"][0]) % 64 == before[key].offset % 64
                compared += 1
    assert compared > 20
