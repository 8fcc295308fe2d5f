"""A packed folder on disk, opened and checked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zipmoe.checkpoint.source import CONFIG_NAME, INDEX_NAME, QUANT_METHOD, expand_home
from zipmoe.errors import CorruptRecordError, ManifestError, MissingShardError, TruncatedShardError
from zipmoe.store.manifest import Manifest
from zipmoe.store.manifest_file import read_manifest
from zipmoe.store.plain_shard import file_checksum
from zipmoe.store.record_shard import pack_identity, read_record_shard_header

_COPY_HINT = "copy or download the folder again"


@dataclass(frozen=True)
class PackedFolder:
    """A packed model whose files are all there, of the right length and of the same pack."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path | str) -> PackedFolder:
        """Open ``path`` and check everything but the records, which are checked when they are read.

        Checked are the manifest, presence and length of every file, the headers of the record files, and the checksums
        of the files with unpacked tensors.

        Raises:
            NotAPackedFolderError: no such folder, or no manifest in it.
            UnfinishedPackError: an interrupted pack.
            ManifestError: the manifest is wrong, or files of two packs are mixed.
            MissingShardError: a file is missing.
            TruncatedShardError: a file has another length.
            CorruptRecordError: a file with unpacked tensors is damaged.
        """
        folder = expand_home(path)
        manifest = read_manifest(folder)
        opened = cls(folder, manifest)
        opened._check_files()
        opened._check_record_shards()
        opened._check_index()
        opened._check_config()
        return opened

    def _check_files(self) -> None:
        for name, entry in self.manifest.files.items():
            file = self.path / name
            if not file.is_file():
                raise MissingShardError(f"{str(file)!r} is missing; it holds {self._example(name)}", hint=_COPY_HINT)
            actual = file.stat().st_size
            if actual != entry.bytes:
                raise TruncatedShardError(
                    f"{str(file)!r} has {actual} bytes instead of {entry.bytes}; it holds {self._example(name)}",
                    hint=_COPY_HINT,
                )
            if entry.xxh3_64 is not None and file_checksum(file) != entry.xxh3_64:
                raise CorruptRecordError(
                    f"{str(file)!r} is damaged: its checksum does not match; it holds {self._example(name)}",
                    hint=_COPY_HINT,
                )

    def _example(self, file: str) -> str:
        records = [record.name for record in self.manifest.records() if record.file == file]
        if records:
            return f"{records[0]!r}" + (f" and {len(records) - 1} more records" if len(records) > 1 else "")
        return "tensors that are not packed"

    def _check_record_shards(self) -> None:
        expected: dict[str, dict[str, tuple[int, int]]] = {}
        for record in self.manifest.records():
            expected.setdefault(record.file, {})[record.name] = (record.offset, record.length)
        identity = pack_identity(self.manifest.source_fingerprint, self.manifest.codec)
        for name, records in expected.items():
            pack_id, found = read_record_shard_header(self.path / name)
            if pack_id != identity:
                raise ManifestError(
                    f"{str(self.path / name)!r} belongs to another pack than the manifest "
                    f"({pack_id!r} instead of {identity!r})",
                    hint=_COPY_HINT,
                )
            if found != records:
                different = sorted(set(found.items()) ^ set(records.items()))[0][0]
                raise ManifestError(
                    f"the header of {str(self.path / name)!r} and the manifest disagree about {different!r}",
                    hint=_COPY_HINT,
                )

    def _check_index(self) -> None:
        """Transformers finds the files through the index: one that lacks a file would load random tensors."""
        index = self._read_json(INDEX_NAME).get("weight_map")
        if not isinstance(index, dict) or {str(file) for file in index.values()} != self.manifest.files.keys():
            raise ManifestError(
                f"{str(self.path / INDEX_NAME)!r} does not list the files that the manifest lists", hint=_COPY_HINT
            )

    def _check_config(self) -> None:
        config = self.config()
        if config.get("model_type") != self.manifest.model_type:
            raise ManifestError(
                f"{CONFIG_NAME} of {str(self.path)!r} is of a {config.get('model_type')!r} model, "
                f"the manifest of a {self.manifest.model_type!r} model",
                hint=_COPY_HINT,
            )
        architectures = config.get("architectures")
        if not isinstance(architectures, list) or self.manifest.architecture not in architectures[:1]:
            raise ManifestError(
                f"{CONFIG_NAME} of {str(self.path)!r} names the architecture {architectures!r}, "
                f"the manifest {self.manifest.architecture!r}",
                hint=_COPY_HINT,
            )
        quantization = config.get("quantization_config")
        if not isinstance(quantization, dict) or quantization.get("quant_method") != QUANT_METHOD:
            raise ManifestError(
                f"{CONFIG_NAME} of {str(self.path)!r} does not say that the folder is packed", hint=_COPY_HINT
            )

    def config(self) -> dict[str, Any]:
        """The content of ``config.json``."""
        return self._read_json(CONFIG_NAME)

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not a JSON object")
        except (OSError, ValueError, RecursionError) as error:
            raise ManifestError(f"{str(path)!r} is not readable: {error}", hint=_COPY_HINT) from error
        return content

    @property
    def file_bytes(self) -> int:
        """Bytes of all safetensors files."""
        return sum(entry.bytes for entry in self.manifest.files.values())
