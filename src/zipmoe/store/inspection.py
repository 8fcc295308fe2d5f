"""What a packed folder contains, as numbers for ``zipmoe inspect``."""

from __future__ import annotations

from dataclasses import dataclass

from zipmoe.codecs.bfloat16_fields import BFLOAT16_BYTES
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.store.manifest import Record, UnpackedReason
from zipmoe.store.packed_folder import PackedFolder


@dataclass(frozen=True)
class PartSummary:
    """Size of one part of the model before and after packing."""

    name: str
    experts: int
    """0 for dense parts."""
    matrices: int
    bytes_before: int
    bytes_after: int
    """On disk, padding included."""

    @property
    def ratio(self) -> float:
        """Packed over original size."""
        return self.bytes_after / self.bytes_before if self.bytes_before else 1.0


@dataclass(frozen=True)
class FolderSummary:
    """Everything ``zipmoe inspect`` prints."""

    path: str
    architecture: str
    model_type: str
    codec: CodecSettings
    format_version: int
    zipmoe_version: str
    source_fingerprint: str
    layers: tuple[PartSummary, ...]
    dense: tuple[PartSummary, ...]
    unpacked: tuple[UnpackedReason, ...]
    ignored_source_keys: int
    ignored_source_bytes: int
    """Of the source, in none of the parts above: tensors that were dropped because the model itself ignores them."""
    source_bytes: int
    header_bytes: int
    """Of the folder, in none of the parts above: headers of the safetensors files, and the guard tensor."""
    folder_bytes: int

    @property
    def ratio(self) -> float:
        """All safetensors files of the folder over all tensors of the source."""
        return self.folder_bytes / self.source_bytes


def summarize(folder: PackedFolder) -> FolderSummary:
    """Add up the manifest of an opened folder."""
    manifest = folder.manifest
    layers = tuple(_part(group.path, len(group.records), list(group.records)) for group in manifest.expert_groups)
    dense = tuple(_part(matrix.parameter, 0, list(matrix.blocks)) for matrix in manifest.dense)
    unpacked = sum(reason.bytes for reason in manifest.unpacked)
    return FolderSummary(
        path=str(folder.path),
        architecture=manifest.architecture,
        model_type=manifest.model_type,
        codec=manifest.codec,
        format_version=manifest.format_version,
        zipmoe_version=manifest.zipmoe_version,
        source_fingerprint=manifest.source_fingerprint,
        layers=layers,
        dense=dense,
        unpacked=manifest.unpacked,
        ignored_source_keys=len(manifest.ignored_source_keys),
        ignored_source_bytes=manifest.source_bytes - sum(p.bytes_before for p in layers + dense) - unpacked,
        source_bytes=manifest.source_bytes,
        header_bytes=folder.file_bytes - sum(p.bytes_after for p in layers + dense) - unpacked,
        folder_bytes=folder.file_bytes,
    )


def _part(name: str, experts: int, records: list[Record]) -> PartSummary:
    matrices = [matrix for record in records for matrix in record.matrices]
    return PartSummary(
        name,
        experts,
        len(matrices),
        sum(m.rows * m.columns for m in matrices) * BFLOAT16_BYTES,
        sum(record.length for record in records),
    )
