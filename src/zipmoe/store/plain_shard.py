"""Ordinary safetensors files with the tensors that are not packed, streamed from the source in small pieces."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import torch

from zipmoe import _native
from zipmoe.checkpoint.source import SourceCheckpoint, TensorInfo
from zipmoe.store.durable_files import durable_writer
from zipmoe.store.manifest import RECORD_PREFIX, SECTION_ALIGNMENT_BYTES, FileEntry
from zipmoe.store.record_shard import align

PLAIN_SHARD_BYTES = 2 << 30
PIECE_BYTES = 32 << 20
FILLER_PREFIX = f"{RECORD_PREFIX}filler."
"""Names of the tensors that only keep others at their alignment."""
_HEADER_LENGTH = struct.Struct("<Q")


def write_plain_shard(
    path: Path,
    tensors: list[TensorInfo],
    source: SourceCheckpoint,
    guard: tuple[str, tuple[int, ...]] | None,
    advance: Callable[[int], None],
) -> tuple[FileEntry, list[str]]:
    """Copy ``tensors`` bit for bit under their original names.

    Transformers computes with plain tensors where they lie in the mapped file, and some float32 products of torch
    depend on the alignment of their operands. Every tensor therefore keeps its offset modulo 64 from the source file;
    small U8 tensors fill the gaps, because the safetensors format allows none.

    Args:
        path: the file; it appears only when it is complete.
        tensors: what to copy.
        source: where to copy from.
        guard: name and shape of a U8 tensor of zeros to add.
        advance: called with the number of source bytes just copied.

    Returns:
        Length and checksum of the file, and the names of all tensors in it.
    """
    entries = _layout(tensors, guard)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for entry in entries:
        header[entry.key] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.bytes],
        }
        position += entry.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(align(_HEADER_LENGTH.size + len(text), SECTION_ALIGNMENT_BYTES) - _HEADER_LENGTH.size)
    with durable_writer(path) as file:
        file.write(_HEADER_LENGTH.pack(len(text)) + text)
        for entry in entries:
            if entry.file:
                _copy(source, entry, file, advance)
            else:  # filler or guard; the guard may have the name of a tensor of the source
                file.write(bytes(entry.bytes))
    return FileEntry(path.stat().st_size, file_checksum(path)), [entry.key for entry in entries]


def _layout(tensors: list[TensorInfo], guard: tuple[str, tuple[int, ...]] | None) -> list[TensorInfo]:
    entries: list[TensorInfo] = []
    position = 0
    for info in tensors:
        gap = (info.offset - position) % SECTION_ALIGNMENT_BYTES
        if gap:
            entries.append(TensorInfo(f"{FILLER_PREFIX}{info.key}", "", "U8", (gap,), gap, 0))
        entries.append(info)
        position += gap + info.bytes
    if guard is not None:
        name, shape = guard
        entries.append(TensorInfo(name, "", "U8", shape, int(np.prod(shape)), 0))
    return entries


def _copy(source: SourceCheckpoint, info: TensorInfo, file: IO[bytes], advance: Callable[[int], None]) -> None:
    rows = info.shape[0] if info.shape else 1
    step = max(1, PIECE_BYTES // max(1, info.bytes // max(1, rows)))
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        tensor = source.read_rows(info.key, begin, end) if info.shape else source.read(info.key)
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        file.write(data.data)
        advance(data.nbytes)


def file_checksum(path: Path) -> int:
    """xxh3-64 of a whole file."""
    if path.stat().st_size == 0:
        return int(_native.xxh3_64(np.empty(0, dtype=np.uint8)))
    return int(_native.xxh3_64(np.memmap(path, dtype=np.uint8, mode="r")))
