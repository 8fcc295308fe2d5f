"""The original checkpoint on disk: its configuration and its tensors, read slice by slice and never mapped into
memory.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from zipmoe import _native
from zipmoe.errors import (
    AlreadyPackedError,
    DamagedCheckpointError,
    NotACheckpointError,
    UnsupportedCheckpointError,
)

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_FILE_NAME = "model.safetensors"
FINGERPRINT_SAMPLE_BYTES = 4096
QUANT_METHOD = "zipmoe"
"""``quant_method`` in the config.json of a packed folder."""

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor of the checkpoint is and what it looks like."""

    key: str
    file: str
    dtype: str
    """As safetensors spells it, e.g. ``BF16``."""
    shape: tuple[int, ...]
    bytes: int
    offset: int
    """Of the first byte in the file."""


class SourceCheckpoint:
    """A Hugging Face checkpoint folder with safetensors weights.

    Reading is thread-safe and goes through ``pread`` of exactly the bytes asked for: no page of the checkpoint is
    mapped into this process, and no tensor is read whole for the sake of a few rows.

    Raises:
        NotACheckpointError: no such folder, no configuration, or no safetensors weights.
        AlreadyPackedError: the folder is a packed one.
        UnsupportedCheckpointError: the checkpoint carries a quantisation of its own.
        DamagedCheckpointError: a file is missing, truncated, or does not hold what the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = _read_config(folder)
        _refuse_quantized(folder, self.config)
        self.tensors = _list_tensors(folder)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.bytes for info in self.tensors.values())

    def read(self, key: str) -> torch.Tensor:
        """The whole tensor ``key``."""
        info = self.tensors[key]
        return self._read_bytes(info, 0, info.bytes, info.shape)

    def read_rows(self, key: str, begin: int, end: int) -> torch.Tensor:
        """``tensor[begin:end]`` along the first dimension, reading only these bytes."""
        info = self.tensors[key]
        if not 0 <= begin <= end <= info.shape[0]:
            raise IndexError(f"rows {begin} to {end} of {key!r}, which has {info.shape[0]}")
        row_bytes = info.bytes // max(1, info.shape[0])
        return self._read_bytes(info, begin * row_bytes, (end - begin) * row_bytes, (end - begin, *info.shape[1:]))

    def _read_bytes(self, info: TensorInfo, offset: int, length: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = _TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise UnsupportedCheckpointError(
                f"tensor {info.key!r} has the dtype {info.dtype}, which ZipMoE cannot read",
                hint="ZipMoE packs BF16 weights; use the BF16 release of this model",
            )
        if length == 0:
            return torch.empty(shape, dtype=dtype)
        data = np.empty(length, dtype=np.uint8)
        path = self.folder / info.file
        try:
            # Opened for each read: a checkpoint may have more shards than a process may have open files.
            with path.open("rb", buffering=0) as file:
                file.seek(info.offset + offset)
                done = 0
                while done < length and (count := file.readinto(data[done:].data)):
                    done += count
        except OSError as error:
            raise DamagedCheckpointError(f"cannot read {str(path)!r}: {error.strerror}") from error
        if done < length:
            raise DamagedCheckpointError(
                f"shard {str(path)!r} ends inside tensor {info.key!r}", hint="download the checkpoint again"
            )
        return torch.from_numpy(data).view(dtype).reshape(shape)

    def fingerprint(self) -> str:
        """xxh3-64 (16 hex digits) over the names, dtypes and shapes of all tensors and over samples of their data.

        The first and the last 4 KiB of every tensor are sampled: enough to tell two trainings of one architecture apart
        without reading the checkpoint twice.
        """
        digest = bytearray()
        for key in sorted(self.tensors):
            info = self.tensors[key]
            digest += f"{key}|{info.dtype}|{info.shape}|".encode()
            rows = info.shape[0] if info.shape else 0
            if not info.shape:
                digest += self.read(key).reshape(1).view(torch.uint8).numpy().tobytes()
            elif info.bytes:
                row_bytes = max(1, info.bytes // rows)
                sample = min(rows, max(1, FINGERPRINT_SAMPLE_BYTES // row_bytes))
                for begin in dict.fromkeys((0, rows - sample)):
                    piece = self.read_rows(key, begin, begin + sample).contiguous().view(-1).view(torch.uint8)
                    head, tail = piece[:FINGERPRINT_SAMPLE_BYTES], piece[-FINGERPRINT_SAMPLE_BYTES:]
                    digest += head.numpy().tobytes() + tail.numpy().tobytes()
            if len(digest) > 1 << 20:  # fold, so that a checkpoint of many tensors does not pile up
                digest = bytearray(_xxh3(digest).to_bytes(8, "little"))
        return f"{_xxh3(digest):016x}"


def _xxh3(data: bytes | bytearray) -> int:
    return int(_native.xxh3_64(np.frombuffer(bytes(data), dtype=np.uint8)))


def expand_home(path: Path | str) -> Path:
    """``~`` and ``~name`` as the shell reads them; a name that nobody here has is left as it is, like in the shell."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def resolve_source(source: str) -> Path:
    """A local folder as it is; ``organisation/model`` is downloaded (or found in the cache) through the hub client.

    Raises:
        NotACheckpointError: neither exists.
    """
    path = expand_home(source)
    if path.is_dir():
        return path
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        from huggingface_hub import snapshot_download

        try:
            return Path(
                snapshot_download(source, ignore_patterns=["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack"])
            )
        except Exception as error:
            first_line = (str(error).splitlines() or [type(error).__name__])[0]
            raise NotACheckpointError(
                f"{source!r} is not a folder here and could not be downloaded: {first_line}",
                hint="check the spelling and the connection, or pass the path of a downloaded checkpoint",
            ) from error
    what = "is a file, not a folder" if path.exists() else "does not exist"
    raise NotACheckpointError(f"{source!r} {what}", hint="pass the folder that holds config.json and *.safetensors")


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise NotACheckpointError(
            f"{str(folder)!r} is not a folder", hint="pass the folder that holds config.json and *.safetensors"
        )
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise NotACheckpointError(
            f"{str(folder)!r} has no {CONFIG_NAME}", hint="pass the folder that holds config.json and *.safetensors"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise NotACheckpointError(f"{str(path)!r} is not readable JSON: {error}") from error
    if not isinstance(config, dict):
        raise NotACheckpointError(f"{str(path)!r} does not hold a JSON object")
    return config


def _refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    text_config = config.get("text_config")
    nested = text_config.get("quantization_config") if isinstance(text_config, dict) else None
    quantization = config.get("quantization_config") or nested
    if not quantization:
        return
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    if method == QUANT_METHOD:
        raise AlreadyPackedError(
            f"{str(folder)!r} is already packed", hint=f"run it: zipmoe run {folder} --prompt '...'"
        )
    raise UnsupportedCheckpointError(
        f"{str(folder)!r} is a quantised checkpoint ({method}); ZipMoE packs BF16 weights",
        hint="use the BF16 release of this model",
    )


def _list_tensors(folder: Path) -> dict[str, TensorInfo]:
    """The tensors that Transformers would load: those of the single file where there is one, else all that are in the
    shards, listed in the index or not."""
    index_path = folder / INDEX_NAME
    if (folder / SINGLE_FILE_NAME).is_file():
        expected, files = {}, [SINGLE_FILE_NAME]
    elif index_path.is_file():
        expected = _read_index(index_path)
        files = sorted(set(expected.values()))
    else:
        other = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".h5")]
        raise NotACheckpointError(
            f"{str(folder)!r} has no safetensors weights"
            + (f" (only {sorted(other)[0]} and the like)" if other else ""),
            hint="ZipMoE reads model.safetensors, or the shards named in model.safetensors.index.json",
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        found = _list_file(folder, file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise DamagedCheckpointError(
                f"{str(folder)!r} holds {twice[0]!r} twice: in {tensors[twice[0]].file} and in {file}",
                hint="shards of two checkpoints are mixed; download the checkpoint again",
            )
        tensors.update(found)
    for key, file in expected.items():
        if key not in tensors or tensors[key].file != file:
            raise DamagedCheckpointError(
                f"{str(index_path)!r} says that {file} holds {key!r}, but it does not",
                hint="download the checkpoint again",
            )
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in weight_map.items()):
            raise TypeError("weight_map must map tensor names to file names")
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{str(path)!r} is not a readable index: {error!r}", hint="download the checkpoint again"
        ) from error
    if not weight_map:
        raise DamagedCheckpointError(f"{str(path)!r} lists no tensor", hint="download the checkpoint again")
    for file in set(weight_map.values()):
        if Path(file).name != file:
            raise DamagedCheckpointError(f"{str(path)!r} names a file outside the folder: {file!r}")
    return dict(weight_map)


def _list_file(folder: Path, file: str) -> dict[str, TensorInfo]:
    path = folder / file
    if not path.is_file():
        raise DamagedCheckpointError(
            f"shard {str(path)!r} is missing", hint="download the checkpoint again, or finish the download"
        )
    try:
        with path.open("rb") as handle:  # first: safetensors says of a file without permission that it is not there
            with safe_open(path, framework="pt", backend="pread"):
                pass  # validates header, offsets and file length
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(length))
    except PermissionError as error:
        raise DamagedCheckpointError(
            f"cannot read shard {str(path)!r}: {error.strerror}", hint="ask its owner for permission to read it"
        ) from error
    except (SafetensorError, OSError, ValueError, struct.error) as error:
        raise DamagedCheckpointError(
            f"shard {str(path)!r} is damaged: {error}", hint="download the checkpoint again, or finish the download"
        ) from error
    header.pop("__metadata__", None)
    return {
        key: TensorInfo(
            key,
            file,
            entry["dtype"],
            tuple(entry["shape"]),
            entry["data_offsets"][1] - entry["data_offsets"][0],
            8 + length + entry["data_offsets"][0],
        )
        for key, entry in header.items()
    }
