"""Safetensors files whose tensors are records: U8, contiguous, at 4096-aligned offsets (docs/format.md).

The header comes first in the file but the records' lengths are known last, so its space is reserved (names are known)
and padded with spaces, as the safetensors format allows.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import ManifestError, TruncatedShardError
from zipmoe.store.durable_files import flush_to_device, partial_path, publish
from zipmoe.store.manifest import ALIGNMENT_BYTES

PACK_ID_KEY = "zipmoe_pack_id"
_HEADER_LENGTH = struct.Struct("<Q")
_LARGEST_OFFSET = 10**15
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_REPACK_HINT = "download this file again, or pack the model again"


def align(offset: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The smallest multiple of ``alignment`` that is not below ``offset``."""
    return -(-offset // alignment) * alignment


def pack_identity(fingerprint: str, settings: CodecSettings) -> str:
    """What every file of records of one pack carries in its metadata under ``PACK_ID_KEY``.

    Args:
        fingerprint: of the source checkpoint (16 hex digits).
        settings: codec, level and shards of the pack.
    """
    return f"{fingerprint}-{settings.name}-{settings.level}-{settings.shards}"


def _header(records: Iterable[tuple[str, int, int]], pack_id: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", PACK_ID_KEY: pack_id}}
    for name, begin, end in records:
        header[name] = {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
    return json.dumps(header, separators=(",", ":")).encode()


class RecordShardWriter:
    """Writes one file of records under its partial name.

    Args:
        path: final path.
        names: names of all records that the file will get, in order.
        pack_id: identifies the pack; kept in the safetensors metadata.
        done: lengths of the records that an interrupted run wrote already; anything behind them is cut off.
    """

    def __init__(self, path: Path, names: list[str], pack_id: str, done: list[int]) -> None:
        self.path = path
        self._names = names
        self._pack_id = pack_id
        self._lengths = list(done)
        worst = _header(((n, _LARGEST_OFFSET, 2 * _LARGEST_OFFSET) for n in names), pack_id)
        self._data_begin = align(_HEADER_LENGTH.size + len(worst))
        self._unflushed = 0
        partial = partial_path(path)
        self._file: IO[bytes] = partial.open("r+b" if partial.exists() else "w+b")
        end = self._data_begin + sum(done)
        if done and os.fstat(self._file.fileno()).st_size < end:
            self._file.close()
            raise TruncatedShardError(
                f"{str(partial)!r} is shorter than the journal says",
                hint="delete the destination folder and pack again",
            )
        self._file.truncate(end)
        self._file.seek(end)

    @property
    def unflushed_bytes(self) -> int:
        """Bytes written since the last ``flush``."""
        return self._unflushed

    def append(self, data: npt.NDArray[np.uint8]) -> int:
        """Write the next record (a multiple of 4096 bytes); returns its file offset."""
        if data.nbytes % ALIGNMENT_BYTES:
            raise ValueError(f"a record of {data.nbytes} bytes is not padded to {ALIGNMENT_BYTES}")
        offset = self._data_begin + sum(self._lengths)
        self._file.write(data.data)
        self._lengths.append(data.nbytes)
        self._unflushed += data.nbytes
        return offset

    def read_back(self, offset: int, length: int) -> npt.NDArray[np.uint8]:
        """Bytes that an earlier run wrote."""
        return np.frombuffer(os.pread(self._file.fileno(), length, offset), dtype=np.uint8)

    def flush(self) -> None:
        """Make everything appended so far durable and let the page cache forget it."""
        flush_to_device(self._file)
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._unflushed = 0

    def finish(self) -> int:
        """Write the header and give the file its final name; returns its length in bytes."""
        if len(self._lengths) != len(self._names):
            raise ValueError(f"{self.path.name}: {len(self._lengths)} of {len(self._names)} records written")
        begins = np.concatenate([[0], np.cumsum(self._lengths)]).tolist()
        header = _header(zip(self._names, begins[:-1], begins[1:], strict=True), self._pack_id)
        padded = header.ljust(self._data_begin - _HEADER_LENGTH.size)
        self._file.seek(0)
        self._file.write(_HEADER_LENGTH.pack(len(padded)) + padded)
        self.flush()
        self._file.close()
        publish(self.path)
        return int(self._data_begin + begins[-1])

    def close(self) -> None:
        """Close without finishing; what was flushed stays for the next run."""
        self._file.close()


def read_record_shard_header(path: Path) -> tuple[str | None, dict[str, tuple[int, int]]]:
    """Pack id and, for every record of a finished file, its (file offset, length).

    Raises:
        ManifestError: the header is not one that ``RecordShardWriter`` writes.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_HEADER_LENGTH.size)
        length = _HEADER_LENGTH.unpack(prefix)[0] if len(prefix) == _HEADER_LENGTH.size else size
        if length > min(MAX_HEADER_BYTES, size - _HEADER_LENGTH.size):
            raise ManifestError(f"{str(path)!r} has no valid safetensors header", hint=_REPACK_HINT)
        text = file.read(length)
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        records = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if entry["dtype"] != "U8" or entry["shape"] != [end - begin] or not 0 <= begin <= end:
                raise ValueError(f"entry {name!r} is not a record")
            records[name] = (_HEADER_LENGTH.size + length + begin, end - begin)
        pack_id = metadata.get(PACK_ID_KEY)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{str(path)!r} has a damaged safetensors header: {error}", hint=_REPACK_HINT) from error
    return pack_id, records
