"""From BF16 matrices to the bytes of one record, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.codecs.registry import encode_level
from zipmoe.store.manifest import (
    ALIGNMENT_BYTES,
    SECTION_ALIGNMENT_BYTES,
    Extent,
    MatrixEntry,
    Record,
    Section,
)
from zipmoe.store.record_shard import align

READABLE_TAIL_BYTES = 64
"""Kernels may read this far behind the end of a section."""


@dataclass(frozen=True)
class EncodedRecord:
    """A record that does not have a place in a file yet."""

    data: npt.NDArray[np.uint8]
    extents: tuple[Extent, ...]
    matrices: tuple[MatrixEntry, ...]


def bfloat16_bits(matrix: torch.Tensor) -> npt.NDArray[np.uint16]:
    """The bit patterns of a BF16 matrix, shape kept."""
    if matrix.dtype != torch.bfloat16:
        raise ValueError(f"expected a bfloat16 tensor, got {matrix.dtype}")
    return matrix.contiguous().view(torch.int16).numpy().view(np.uint16)


def encode_record(matrices: list[tuple[str, torch.Tensor]], settings: CodecSettings, shards: int) -> EncodedRecord:
    """Encode named BF16 matrices (rows, columns) into one record.

    Extents are aligned to 4096, sections to 64, and 64 zero bytes follow the last section of each extent.
    """
    level, huffman_only = encode_level(settings)
    encoded = [
        _native.encode(settings.name, bfloat16_bits(matrix), level, huffman_only, shards) for _, matrix in matrices
    ]
    kinds = [kind for kind, _ in encoded[0][0]]
    placements: list[tuple[int, npt.NDArray[np.uint8]]] = []
    bounds: list[tuple[str, int, int]] = []
    sections: list[list[Section]] = [[] for _ in matrices]
    position = 0
    for index, kind in enumerate(kinds):
        begin = position = align(position)
        for matrix_index, (parts, _) in enumerate(encoded):
            position = align(position, SECTION_ALIGNMENT_BYTES)
            data = parts[index][1]
            placements.append((position, data))
            sections[matrix_index].append(Section(position, data.nbytes))
            position += data.nbytes
        position += READABLE_TAIL_BYTES
        bounds.append((kind, begin, position - begin))
    record = np.zeros(align(position, ALIGNMENT_BYTES), dtype=np.uint8)
    for offset, data in placements:
        record[offset : offset + data.nbytes] = data
    extents = tuple(
        Extent(kind, begin, length, int(_native.xxh3_64(record[begin : begin + length])))
        for kind, begin, length in bounds
    )
    entries = tuple(
        MatrixEntry(name, int(m.shape[0]), int(m.shape[1]), tuple(s), tuple(int(n) for n in shard_bytes))
        for (name, m), s, (_, shard_bytes) in zip(matrices, sections, encoded, strict=True)
    )
    return EncodedRecord(record, extents, entries)


def decode_matrix(data: npt.NDArray[np.uint8], entry: MatrixEntry, codec: str) -> torch.Tensor:
    """Decode one matrix of a record's bytes to a BF16 tensor (rows, columns), after validating its encoding.

    Raises:
        ValueError: the bytes are not a valid encoding.
    """
    sections = [data[s.offset : s.offset + s.length] for s in entry.sections]
    shards = list(entry.shard_bytes)
    _native.validate(codec, entry.rows, entry.columns, sections, shards)
    out = np.empty((entry.rows, entry.columns), dtype=np.uint16)
    _native.decode(codec, entry.rows, entry.columns, sections, shards, 0, entry.rows, out)
    return torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)


def damaged_extent(data: npt.NDArray[np.uint8], record: Record) -> Extent | None:
    """The first extent whose checksum does not match ``data`` (the record's bytes); None when all match."""
    for extent in record.extents:
        if int(_native.xxh3_64(data[extent.offset : extent.offset + extent.length])) != extent.xxh3_64:
            return extent
    return None
