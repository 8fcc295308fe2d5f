"""Reading and writing ``zipmoe.json``, with everything checked that can be checked without reading records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from zipmoe import _native
from zipmoe.errors import CodecUnavailableError, ManifestError, NotAPackedFolderError, UnfinishedPackError
from zipmoe.store.durable_files import write_json
from zipmoe.store.manifest import (
    ALIGNMENT_BYTES,
    FORMAT_VERSION,
    JOURNAL_NAME,
    MANIFEST_NAME,
    RECORD_PREFIX,
    SECTION_ALIGNMENT_BYTES,
    Manifest,
    MatrixEntry,
    Record,
)
from zipmoe.store.structured_json import StructureError, from_json, to_json

CHECKSUM_KEY = "checksum"
LARGEST_EXTENT = 1 << 40
_REPACK_HINT = "copy or download the folder again, or pack the model again"


def _checksum(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
    return f"{int(_native.xxh3_64(np.frombuffer(text, dtype=np.uint8))):016x}"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest durably; from then on the folder counts as packed.

    Raises:
        ManifestError: no reader would accept it.
    """
    try:
        _check(manifest)
    except StructureError as error:
        raise ManifestError(
            f"packing into {str(folder)!r} went wrong: {error}", hint="delete the folder and pack again"
        ) from error
    content = to_json(manifest)
    write_json(folder / MANIFEST_NAME, {**content, CHECKSUM_KEY: _checksum(content)}, indent=None)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of ``folder``.

    Raises:
        NotAPackedFolderError: no such folder, or no manifest in it.
        UnfinishedPackError: an interrupted pack.
        ManifestError: unreadable, of another version, damaged or contradictory.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise NotAPackedFolderError(
            f"{str(folder)!r} is not a folder", hint="pass a folder that `zipmoe pack` has written"
        )
    if not path.is_file():
        if (folder / JOURNAL_NAME).exists():
            raise UnfinishedPackError(
                f"{str(folder)!r} holds an interrupted pack",
                hint="run the same `zipmoe pack` command again: it continues",
            )
        raise NotAPackedFolderError(
            f"{str(folder)!r} has no {MANIFEST_NAME}: it is not a packed model",
            hint=f"pack it first: zipmoe pack {folder} NEW_FOLDER",
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise ManifestError(f"{str(path)!r} is not readable JSON: {error}", hint=_REPACK_HINT) from error
    return parse_manifest(content, str(path))


def parse_manifest(content: Any, where: str) -> Manifest:
    """Build a manifest from its JSON value; see ``read_manifest`` for the errors."""
    if not isinstance(content, dict):
        raise ManifestError(f"{where!r} does not hold a JSON object", hint=_REPACK_HINT)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise ManifestError(
            f"{where!r} has format version {version!r}, this ZipMoE reads version {FORMAT_VERSION}",
            hint="upgrade ZipMoE, or pack the model again",
        )
    content = dict(content)
    stated = content.pop(CHECKSUM_KEY, None)
    try:
        actual = _checksum(content)
    except RecursionError:
        actual = None
    if stated != actual or actual is None:
        raise ManifestError(f"{where!r} is damaged: its checksum does not match its content", hint=_REPACK_HINT)
    try:
        manifest = from_json(Manifest, content, "manifest")
        _check(manifest)
    except StructureError as error:
        raise ManifestError(f"{where!r} is damaged: {error}", hint=_REPACK_HINT) from error
    return manifest


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise StructureError(message)


def _check(manifest: Manifest) -> None:
    codec = next((c for c in _native.codecs() if c.name == manifest.codec.name), None)
    if codec is None:
        raise StructureError(f"unknown codec {manifest.codec.name!r}")
    if codec.unavailable_reason:
        raise CodecUnavailableError(
            f"this model is packed with {codec.name!r}, which is not available here: {codec.unavailable_reason}",
            hint="install the library and build ZipMoE again, or use a folder packed with fx3",
        )
    kinds = list(codec.section_kinds)
    _require(bool(manifest.expert_groups), "no expert group")
    names: set[str] = set()
    for record in manifest.records():
        _require(record.name not in names and record.name.startswith(RECORD_PREFIX), f"bad name {record.name!r}")
        names.add(record.name)
        _check_record(record, kinds, manifest)
    paths = [path for group in manifest.expert_groups for path in (group.path, *group.tied_paths)]
    _require(len(set(paths)) == len(paths), "two expert groups with one path")
    for name in manifest.files:
        _require(Path(name).name == name, f"{name!r} is not a plain file name")
    for group in manifest.expert_groups:
        for expert, record in enumerate(group.records):
            _require(record.name == f"{RECORD_PREFIX}{group.path}.{expert}", f"{record.name!r} is not expert {expert}")
        _require(bool(group.records) and bool(group.parameters), f"group {group.path!r} is empty")
        first = [(m.rows, m.columns) for m in group.records[0].matrices]
        for record in group.records:
            _require(tuple(m.name for m in record.matrices) == group.parameters, f"{record.name!r}: other matrices")
            _require([(m.rows, m.columns) for m in record.matrices] == first, f"{record.name!r}: other shapes")
    for matrix in manifest.dense:
        _require(bool(matrix.blocks), f"dense matrix {matrix.parameter!r} is empty")
        _require(all(len(b.matrices) == 1 for b in matrix.blocks), f"{matrix.parameter!r}: a block is one matrix")
        numbers = [f".{i}" for i in range(len(matrix.blocks))] if len(matrix.blocks) > 1 else [""]
        expected = [f"{RECORD_PREFIX}{matrix.parameter}{number}" for number in numbers]
        _require(
            [b.name for b in matrix.blocks] == expected, f"{matrix.parameter!r}: blocks of another matrix or order"
        )
        blocks = [block.matrices[0] for block in matrix.blocks]
        _require(sum(b.rows for b in blocks) == matrix.rows, f"{matrix.parameter!r}: rows do not add up")
        _require(all(b.columns == matrix.columns for b in blocks), f"{matrix.parameter!r}: columns differ")


def _check_record(record: Record, kinds: list[str], manifest: Manifest) -> None:
    where = record.name
    _require(record.file in manifest.files, f"{where}: file {record.file!r} is not listed")
    _require(Path(record.file).name == record.file, f"{where}: {record.file!r} is not a plain file name")
    aligned = record.offset % ALIGNMENT_BYTES == 0 and record.length % ALIGNMENT_BYTES == 0
    _require(aligned and record.length > 0, f"{where}: not aligned to {ALIGNMENT_BYTES}")
    _require(record.offset + record.length <= manifest.files[record.file].bytes, f"{where}: beyond the end of its file")
    _require([e.kind for e in record.extents] == kinds, f"{where}: extents are not {kinds}")
    position = 0
    for extent in record.extents:
        _require(extent.offset % ALIGNMENT_BYTES == 0 and extent.offset >= position, f"{where}: bad extent offset")
        position = extent.offset + extent.length
        _require(position <= record.length and extent.length < LARGEST_EXTENT, f"{where}: extent beyond the record")
        _require(extent.xxh3_64 < 1 << 64, f"{where}: bad checksum")
    _require(bool(record.matrices), f"{where}: no matrix")
    for entry in record.matrices:
        _check_matrix(entry, record, where)
    for index in range(len(kinds)):
        position = 0
        for entry in record.matrices:
            _require(entry.sections[index].offset >= position, f"{where}: sections overlap")
            position = entry.sections[index].offset + entry.sections[index].length


def _check_matrix(entry: MatrixEntry, record: Record, where: str) -> None:
    _require(0 < entry.rows < 1 << 31 and 0 < entry.columns < 1 << 31, f"{where}: bad shape of {entry.name!r}")
    _require(len(entry.sections) == len(record.extents), f"{where}: {entry.name!r} has the wrong number of sections")
    for section, extent in zip(entry.sections, record.extents, strict=True):
        inside = extent.offset <= section.offset and section.offset + section.length <= extent.offset + extent.length
        _require(inside and section.offset % SECTION_ALIGNMENT_BYTES == 0, f"{where}: section outside its extent")
    if entry.shard_bytes:
        _require(sum(entry.shard_bytes) == entry.sections[0].length, f"{where}: shards do not fill their section")
