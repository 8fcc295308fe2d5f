"""What ends up in the destination: the pack's own files, the source's side files, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_checkpoint import save_tiny_checkpoint

from zipmoe.errors import AlreadyPackedError, InvalidArgumentError, ManifestError, PackMismatchError, ZipMoEError
from zipmoe.store import pack as pack_module
from zipmoe.store.manifest import JOURNAL_NAME, MANIFEST_NAME, CodecSettings
from zipmoe.store.pack import PackProgress, pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify

FX3 = CodecSettings("fx3", None, 1)


class _StopError(Exception):
    pass


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_packing_into_a_folder_inside_of_the_source(tiny_source: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    pack(tiny_source, tmp_path / "reference", FX3)
    pack(source, source / "packed", FX3)
    assert _names(source / "packed") == _names(tmp_path / "reference")


@pytest.mark.parametrize("name", [MANIFEST_NAME, JOURNAL_NAME])
def test_side_files_do_not_replace_what_the_pack_writes(tiny_source: Path, tmp_path: Path, name: str) -> None:
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    (source / name).write_text("{}")
    pack(source, tmp_path / "packed", FX3)
    folder = PackedFolder.open(tmp_path / "packed")
    assert name not in folder.manifest.sidecar_files
    assert verify(folder, against=source).changed_side_files == ()
    assert not (tmp_path / "packed" / JOURNAL_NAME).exists()


def test_names_and_texts_that_are_not_unicode(tiny_source: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_source, tmp_path / "source"))
    name = os.fsdecode(b"note \xff.partial")
    (source / name).write_text("kept")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "note": "\ud800"}))
    pack(source, tmp_path / "packed", FX3)
    assert (tmp_path / "packed" / name).read_text() == "kept"
    assert PackedFolder.open(tmp_path / "packed").config()["note"] == "\ud800"
    assert verify(PackedFolder.open(tmp_path / "packed")).changed_side_files == ()


def test_changed_configuration_is_reported(tiny_packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_packed, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": 1}))
    assert verify(PackedFolder.open(copy)).changed_side_files == ("config.json",)


def test_partial_files_of_an_earlier_run_are_removed(tiny_source: Path, tmp_path: Path) -> None:
    def stop(progress: PackProgress) -> None:
        raise _StopError

    with pytest.raises(_StopError):
        pack(tiny_source, tmp_path / "packed", FX3, report=stop)
    (tmp_path / "packed" / ".removed.txt.partial").write_text("half")
    pack(tiny_source, tmp_path / "packed", FX3)
    assert not [name for name in _names(tmp_path / "packed") if name.endswith(".partial")]


@pytest.mark.parametrize("offset", [20, -1, None])
def test_damage_to_a_finished_file_of_an_interrupted_pack_is_noticed(
    tiny_source: Path, tmp_path: Path, offset: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "RECORD_SHARD_SOURCE_BYTES", 40_000)

    def stop(progress: PackProgress) -> None:
        if list((tmp_path / "packed").glob("packed-00002-*")):
            raise _StopError

    with pytest.raises(_StopError):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=stop)
    path = next((tmp_path / "packed").glob("packed-00001-*"))
    data = bytearray(path.read_bytes())
    if offset is None:
        data += b"more"
    else:
        data[offset] ^= 1
    path.write_bytes(data)
    if offset == -1:  # padding behind the last section: no byte that anything reads
        pack(tiny_source, tmp_path / "packed", FX3)
        return
    with pytest.raises((PackMismatchError, ManifestError)):
        pack(tiny_source, tmp_path / "packed", FX3)


def test_source_changed_between_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint samples the ends of every tensor; a change in the middle is found by comparing."""
    monkeypatch.setattr(pack_module, "FLUSH_BYTES", 1)
    source = save_tiny_checkpoint(tmp_path / "source", max_shard_size="1GB", hidden_size=256, moe_intermediate_size=256)
    seen = 0

    def stop(progress: PackProgress) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise _StopError

    with pytest.raises(_StopError):
        pack(source, tmp_path / "packed", FX3, jobs=1, report=stop)
    state = load_file(source / "model.safetensors")
    state["model.layers.0.mlp.experts.0.gate_proj.weight"][128] += 1
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PackMismatchError, match=r"experts\.0' .* is not what .* holds now"):
        pack(source, tmp_path / "packed", FX3, jobs=1)
    assert not (tmp_path / "packed" / MANIFEST_NAME).exists()


@pytest.mark.parametrize("change", [{"file": "packed-00009-of-00009.safetensors"}, {"length": 1 << 20}])
def test_journal_that_contradicts_the_files(
    tiny_source: Path, tmp_path: Path, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_module, "FLUSH_BYTES", 1)

    def stop(progress: PackProgress) -> None:
        if progress.done_bytes:
            raise _StopError

    with pytest.raises(_StopError):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1, report=stop)
    journal = tmp_path / "packed" / JOURNAL_NAME
    first, record = journal.read_text().splitlines()
    journal.write_text(f"{first}\n{json.dumps({**json.loads(record), **change})}\n")
    with pytest.raises(ZipMoEError):
        pack(tiny_source, tmp_path / "packed", FX3, jobs=1)
    assert not (tmp_path / "packed" / MANIFEST_NAME).exists()


def test_journal_that_is_no_journal(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / JOURNAL_NAME).write_text("[]\n")
    with pytest.raises(PackMismatchError, match="is damaged"):
        pack(tiny_source, tmp_path, FX3)


def test_another_process_finished_meanwhile(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_pack = pack_module.plan_pack

    def plan_while_another_process_packs(*arguments: object, **options: object) -> object:
        monkeypatch.undo()
        pack(tiny_source, tmp_path / "packed", FX3)
        return plan_pack(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pack_module, "plan_pack", plan_while_another_process_packs)
    with pytest.raises(AlreadyPackedError):
        pack(tiny_source, tmp_path / "packed", FX3)
    assert not (tmp_path / "packed" / JOURNAL_NAME).exists()
    assert verify(PackedFolder.open(tmp_path / "packed"), against=tiny_source).records > 0


def test_destinations_that_cannot_be_made(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "at all")
    for destination in (tmp_path / "file" / "packed", tmp_path / "dangling"):
        with pytest.raises(InvalidArgumentError, match="create"):
            pack(tiny_source, destination, FX3)


def test_source_and_destination_with_blanks_and_umlauts(tmp_path: Path) -> None:
    source = save_tiny_checkpoint(tmp_path / "das Mädchen")
    (source / "empty.txt").write_text("")
    pack(source, tmp_path / "模型 packed", FX3)
    assert verify(PackedFolder.open(tmp_path / "模型 packed"), against=source).changed_side_files == ()
