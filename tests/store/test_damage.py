"""A damaged folder is refused with the file's and the tensor's name; it never decodes to something else."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoint import save_tiny_checkpoint

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import (
    CorruptRecordError,
    ManifestError,
    MissingShardError,
    PackedFolderError,
    TruncatedShardError,
    ZipMoEError,
)
from zipmoe.store.manifest import MANIFEST_NAME
from zipmoe.store.manifest_file import CHECKSUM_KEY, _checksum, parse_manifest
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_shard import read_record_shard_header
from zipmoe.store.verify import verify


@pytest.fixture
def folder(tiny_packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_packed, tmp_path / "copy"))


def _flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def test_flipped_byte_anywhere_in_any_record_is_found(folder: Path) -> None:
    manifest = PackedFolder.open(folder).manifest
    generator = random.Random(0)
    for record in generator.sample(manifest.records(), 12):
        extent = generator.choice(record.extents)
        offset = record.offset + extent.offset + generator.randrange(extent.length)
        path = folder / record.file
        _flip(path, offset)
        with pytest.raises(CorruptRecordError) as error:
            verify(PackedFolder.open(folder), jobs=1)
        assert record.name in str(error.value)
        assert record.file in str(error.value)
        _flip(path, offset)
    assert verify(PackedFolder.open(folder)).records == len(manifest.records())


def test_flipped_byte_in_a_plain_tensor_is_found_when_the_folder_is_opened(folder: Path) -> None:
    manifest = PackedFolder.open(folder).manifest
    plain = next(name for name, entry in manifest.files.items() if entry.xxh3_64 is not None)
    for offset in (3, 40, manifest.files[plain].bytes - 5):
        _flip(folder / plain, offset)
        with pytest.raises(CorruptRecordError, match=plain):
            PackedFolder.open(folder)
        _flip(folder / plain, offset)


def test_missing_and_truncated_shards(folder: Path) -> None:
    for name in PackedFolder.open(folder).manifest.files:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1])
        with pytest.raises(TruncatedShardError, match=name):
            PackedFolder.open(folder)
        (folder / name).unlink()
        with pytest.raises(MissingShardError, match=name):
            PackedFolder.open(folder)
        (folder / name).write_bytes(data)
    PackedFolder.open(folder)


def test_wrong_version(folder: Path) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content["format_version"] = 99
    (folder / MANIFEST_NAME).write_text(json.dumps(content))
    with pytest.raises(ManifestError, match="version 99"):
        PackedFolder.open(folder)


def test_manifest_of_another_pack_of_the_same_shape(folder: Path, tmp_path: Path) -> None:
    other = save_tiny_checkpoint(tmp_path / "other", seed=5)
    pack(other, tmp_path / "other_packed", CodecSettings("fx3", None, 1), min_dense_bytes=0)
    shutil.copy(tmp_path / "other_packed" / MANIFEST_NAME, folder / MANIFEST_NAME)
    with pytest.raises(PackedFolderError):
        PackedFolder.open(folder)


def test_shard_of_another_pack_of_the_same_size(folder: Path, tmp_path: Path) -> None:
    header_pack_id, _ = read_record_shard_header(next(folder.glob("packed-*")))
    path = next(folder.glob("packed-*"))
    data = path.read_bytes()
    assert header_pack_id is not None
    path.write_bytes(data.replace(header_pack_id.encode(), ("0" * 16 + header_pack_id[16:]).encode(), 1))
    with pytest.raises(ManifestError, match="another pack"):
        PackedFolder.open(folder)


def test_config_of_another_model(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "mixtral"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ManifestError, match="mixtral"):
        PackedFolder.open(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"quantization_config": None}, "does not say that the folder is packed"),
    ],
)
def test_config_that_is_not_the_packs(folder: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ManifestError, match=message):
        PackedFolder.open(folder)


def test_index_without_the_plain_tensors(folder: Path) -> None:
    """Transformers would load random norms and routers from such a folder."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    for content in ({"weight_map": {k: v for k, v in index["weight_map"].items() if v.startswith("packed-")}}, {}):
        path.write_text(json.dumps(content))
        with pytest.raises(ManifestError, match=path.name):
            PackedFolder.open(folder)
    path.unlink()
    with pytest.raises(ManifestError, match=path.name):
        PackedFolder.open(folder)


def _edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content.pop(CHECKSUM_KEY)
    edit(content)
    (folder / MANIFEST_NAME).write_text(json.dumps({**content, CHECKSUM_KEY: _checksum(content)}))


def _swap_experts(content: dict[str, Any]) -> None:
    content["expert_groups"][0]["records"][:2] = content["expert_groups"][0]["records"][1::-1]


def _swap_layers(content: dict[str, Any]) -> None:
    first, second = content["expert_groups"]
    first["path"], second["path"] = second["path"], first["path"]


def _swap_dense(content: dict[str, Any]) -> None:
    dense = {matrix["parameter"]: matrix for matrix in content["dense"]}
    key, value = (dense[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "kv")
    key["parameter"], value["parameter"] = value["parameter"], key["parameter"]


@pytest.mark.parametrize("edit", [_swap_experts, _swap_layers, _swap_dense])
def test_matrices_of_one_shape_in_another_order_are_refused(
    folder: Path, edit: Callable[[dict[str, Any]], None]
) -> None:
    _edit_manifest(folder, edit)
    with pytest.raises(ManifestError, match=r"is not expert|of another matrix"):
        PackedFolder.open(folder)


def test_verify_compares_what_the_manifest_says_about_the_model(tiny_source: Path, folder: Path) -> None:
    def invent_tie(content: dict[str, Any]) -> None:
        content["dense"][0]["tied_parameters"] = ["model.norm.weight"]

    _edit_manifest(folder, invent_tie)
    with pytest.raises(ManifestError, match="does not follow from the checkpoint"):
        verify(PackedFolder.open(folder), against=tiny_source)


def test_every_single_flipped_bit_of_the_manifest_is_refused(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    original = path.read_bytes()
    generator = random.Random(1)
    for _ in range(400):
        offset, bit = generator.randrange(len(original) - 1), generator.randrange(8)
        data = bytearray(original)
        data[offset] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(ZipMoEError):
            PackedFolder.open(folder)
    path.write_bytes(original)
    PackedFolder.open(folder)


def _mutations(value: Any, generator: random.Random) -> Any:
    """The same JSON value with one thing somewhere changed to something hostile."""
    hostile = [None, -1, 0, 1, 2**31, 2**63, 2**64, 1.5, "", "../x", [], {}, True, [[]], "x" * 300]
    if isinstance(value, dict) and value and generator.random() < 0.9:
        key = generator.choice(list(value))
        changed = dict(value)
        action = generator.random()
        if action < 0.1:
            del changed[key]
        elif action < 0.15:
            changed["surprise"] = 1
        else:
            changed[key] = _mutations(value[key], generator)
        return changed
    if isinstance(value, list) and value and generator.random() < 0.9:
        index = generator.randrange(len(value))
        changed_list = list(value)
        action = generator.random()
        if action < 0.1:
            del changed_list[index]
        elif action < 0.2:
            changed_list.append(changed_list[index])
        else:
            changed_list[index] = _mutations(value[index], generator)
        return changed_list
    if isinstance(value, int) and generator.random() < 0.5:
        return value + generator.choice([-4096, -64, -1, 1, 64, 4096])
    return generator.choice(hostile)


def test_hostile_manifests_with_a_right_checksum_are_refused_or_harmless(folder: Path) -> None:
    """An attacker can compute the checksum: the structure alone must keep every read inside the files."""
    content = json.loads((folder / MANIFEST_NAME).read_text())
    content.pop(CHECKSUM_KEY)
    generator = random.Random(2)
    refused = 0
    for _ in range(1500):
        mutated = _mutations(content, generator)
        if isinstance(mutated, dict):
            mutated = {**mutated, CHECKSUM_KEY: _checksum(mutated)}
        try:
            manifest = parse_manifest(mutated, "fuzz")
        except ZipMoEError:
            refused += 1
            continue
        for record in manifest.records():
            assert record.offset + record.length <= manifest.files[record.file].bytes
            for entry in record.matrices:
                assert all(s.offset + s.length <= record.length for s in entry.sections)
    assert refused > 900


def test_hostile_shard_headers_are_refused(folder: Path) -> None:
    path = next(folder.glob("packed-*"))
    original = path.read_bytes()
    header_length = int.from_bytes(original[:8], "little")
    generator = random.Random(3)
    for _ in range(300):
        data = bytearray(original)
        for _ in range(generator.choice([1, 1, 2, 8])):
            data[generator.randrange(8 + min(header_length, 3000))] = generator.randrange(256)
        if bytes(data) == original:
            continue
        path.write_bytes(data)
        try:
            PackedFolder.open(folder)
        except ZipMoEError:
            continue
        # what is still accepted says the same as before, spelled differently
        assert read_record_shard_header(path)[1] == _parse(original, folder)
    path.write_bytes(original)


def _parse(data: bytes, folder: Path) -> dict[str, tuple[int, int]]:
    copy = folder / "copy.safetensors"
    copy.write_bytes(data)
    return read_record_shard_header(copy)[1]


def test_validly_checksummed_nonsense_is_not_decoded(tmp_path: Path) -> None:
    """Bytes whose checksum is right but which are no FX3 encoding raise instead of decoding to something."""
    generator = np.random.default_rng(0)
    weights = generator.integers(0, 65536, (64, 64), dtype=np.uint16)
    sections, shards = _native.encode("fx3", weights, 0, False, 1)
    blob = sections[0][1].copy()
    blob[4] ^= 0x40
    with pytest.raises(ValueError, match=r"\w"):
        _native.validate("fx3", 64, 64, [blob], shards)
