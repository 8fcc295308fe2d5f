"""The manifest ``zipmoe.json``: what a packed folder contains and where (docs/format.md).

All offsets and lengths are bytes. A *record* is one contiguous, 4096-aligned run of bytes in one file: all matrices
of one expert, or one block of rows of a dense matrix. Its *extents* are the parts that can be read and checked alone
(``packed``; or ``E`` and ``SM``). Each matrix of the record occupies one *section* in every extent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from zipmoe.codecs.codec_settings import CodecSettings

MANIFEST_NAME = "zipmoe.json"
JOURNAL_NAME = "zipmoe-pack.journal"
FORMAT_VERSION = 1
ALIGNMENT_BYTES = 4096
SECTION_ALIGNMENT_BYTES = 64
DENSE_BLOCK_BYTES = 32 << 20
"""A dense matrix is cut into blocks of rows of at most this many bytes of BF16, each packed as a record of its own."""
RECORD_PREFIX = "zipmoe."
"""Every record is a U8 tensor of this name prefix in its safetensors file."""


@dataclass(frozen=True)
class Section:
    """Where one matrix lies inside one extent; ``offset`` is relative to the record."""

    offset: int
    length: int


@dataclass(frozen=True)
class MatrixEntry:
    """One BF16 matrix of a record: ``rows`` outputs by ``columns`` inputs, as the module holds it (row-major)."""

    name: str
    rows: int
    columns: int
    sections: tuple[Section, ...]
    """One per extent of the record, in the extents' order."""
    shard_bytes: tuple[int, ...] = ()
    """Compressed bytes of each E-chunk shard; shard s of K holds rows ``rows*s//K`` up to ``rows*(s+1)//K``."""


@dataclass(frozen=True)
class Extent:
    """A part of a record that is read and verified alone; ``offset`` is relative to the record."""

    kind: str
    offset: int
    length: int
    xxh3_64: int


@dataclass(frozen=True)
class Record:
    """One expert, or one block of rows of a dense matrix, on disk."""

    name: str
    """Tensor name in the safetensors file, e.g. ``zipmoe.model.layers.0.mlp.experts.17``."""
    file: str
    offset: int
    length: int
    extents: tuple[Extent, ...]
    matrices: tuple[MatrixEntry, ...]


@dataclass(frozen=True)
class ExpertGroup:
    """All experts of one sparse layer."""

    path: str
    """Module path of the experts module, e.g. ``model.layers.0.mlp.experts``."""
    parameters: tuple[str, ...]
    """Names of the packed parameters relative to ``path``, in the order of each record's matrices. For modules that
    hold one sub-module per expert the name contains ``{expert}``, e.g. ``expert_{expert}.wi.weight``."""
    records: tuple[Record, ...]
    """Index = expert id."""
    tied_paths: tuple[str, ...] = ()
    """Other experts modules of the model that are tied to this one."""


@dataclass(frozen=True)
class DenseMatrix:
    """A packed matrix that every token may need (attention projection, shared expert, embedding, language-model
    head)."""

    parameter: str
    """Full parameter name in the module tree, e.g. ``model.layers.0.self_attn.q_proj.weight``."""
    tied_parameters: tuple[str, ...]
    """Other parameters of the model that are tied to this one."""
    rows: int
    columns: int
    blocks: tuple[Record, ...]
    """Consecutive blocks of rows, each a record with one matrix."""


@dataclass(frozen=True)
class UnpackedReason:
    """Why some tensors were left as they are."""

    reason: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class FileEntry:
    """One safetensors file of the folder."""

    bytes: int
    xxh3_64: int | None
    """Of the whole file; None for files of records, whose extents have checksums of their own."""


@dataclass(frozen=True)
class Manifest:
    """Contents of ``zipmoe.json``."""

    zipmoe_version: str
    model_type: str
    architecture: str
    source_fingerprint: str
    """xxh3-64 (hex) over the names, dtypes, shapes and byte lengths of all source tensors plus samples of their
    data."""
    source_bytes: int
    codec: CodecSettings
    files: dict[str, FileEntry]
    """Every safetensors file of the folder, packed and plain."""
    expert_groups: tuple[ExpertGroup, ...]
    dense: tuple[DenseMatrix, ...]
    unpacked: tuple[UnpackedReason, ...]
    guard_tensor: str
    """Name of the wrong-shaped tensor that makes Transformers refuse the folder when ZipMoE is not imported."""
    ignored_source_keys: tuple[str, ...] = ()
    """Checkpoint keys that the model itself ignores (for example multi-token prediction layers) and that were
    dropped."""
    sidecar_files: dict[str, int] = field(default_factory=dict)
    """xxh3-64 of every other file that was copied (tokenizer, generation config, ...), checked by ``zipmoe verify``."""
    format_version: int = FORMAT_VERSION

    def records(self) -> list[Record]:
        """All records: experts by group and id, then dense matrices."""
        experts = [record for group in self.expert_groups for record in group.records]
        return experts + [block for matrix in self.dense for block in matrix.blocks]
