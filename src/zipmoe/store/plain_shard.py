"""Ordinary safetensors files with the tensors that are not packed, streamed from the source in small pieces."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from zipmoe import _native
from zipmoe.checkpoint.source import SourceCheckpoint, TensorInfo
from zipmoe.store.durable_files import durable_writer
from zipmoe.store.manifest import FileEntry

SHARD_BYTES = 2 << 30
PIECE_BYTES = 32 << 20


def group_into_shards(tensors: list[TensorInfo], shard_bytes: int = SHARD_BYTES) -> list[list[TensorInfo]]:
    """Split ``tensors``, in order, into shards of at most ``shard_bytes`` (one tensor at least)."""
    shards: list[list[TensorInfo]] = [[]]
    total = 0
    for info in tensors:
        if shards[-1] and total + info.bytes > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(info)
        total += info.bytes
    return shards


def write_plain_shard(
    path: Path,
    tensors: list[TensorInfo],
    source: SourceCheckpoint,
    guard: tuple[str, tuple[int, ...]] | None,
    advance: Callable[[int], None],
) -> FileEntry:
    """Copy ``tensors`` bit for bit under their original names.

    Args:
        path: the file; it appears only when it is complete.
        tensors: what to copy.
        source: where to copy from.
        guard: name and shape of a U8 tensor of zeros to add.
        advance: called with the number of source bytes just copied.

    Returns:
        Length and checksum of the file.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    entries = [(info.key, info.dtype, info.shape, info.bytes) for info in tensors]
    if guard is not None:
        entries.append((guard[0], "U8", guard[1], int(np.prod(guard[1]))))
    for key, dtype, shape, length in entries:
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + length]}
        position += length
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with durable_writer(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for info in tensors:
            rows = info.shape[0] if info.shape else 1
            step = max(1, PIECE_BYTES // max(1, info.bytes // max(1, rows)))
            for begin in range(0, rows, step):
                tensor = (
                    source.read_rows(info.key, begin, min(rows, begin + step)) if info.shape else source.read(info.key)
                )
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                file.write(data.data)
                advance(data.nbytes)
        if guard is not None:
            file.write(bytes(int(np.prod(guard[1]))))
    return FileEntry(path.stat().st_size, file_checksum(path))


def file_checksum(path: Path) -> int:
    """xxh3-64 of a whole file."""
    if path.stat().st_size == 0:
        return int(_native.xxh3_64(np.empty(0, dtype=np.uint8)))
    return int(_native.xxh3_64(np.memmap(path, dtype=np.uint8, mode="r")))
