"""Check a packed folder: every checksum, every encoding, and on request every bit against the original checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from zipmoe import _native
from zipmoe.checkpoint.expert_modules import ExpertModules
from zipmoe.checkpoint.expert_reader import ExpertReader
from zipmoe.checkpoint.source import SourceCheckpoint
from zipmoe.errors import CorruptRecordError, ManifestError
from zipmoe.store.manifest import Manifest, MatrixEntry, Record
from zipmoe.store.pack_plan import DenseBlockPlan, ExpertRecordPlan, PackPlan, meta_model, plan_pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.plain_shard import FILLER_PREFIX, file_checksum
from zipmoe.store.record_encoder import damaged_extent, decode_matrix
from zipmoe.store.worker_count import worker_count

_COPY_HINT = "copy or download the folder again, or pack the model again"


@dataclass(frozen=True)
class Verification:
    """What was checked."""

    records: int
    record_bytes: int
    plain_tensors_compared: int
    matrices_compared: int
    against: str | None
    changed_side_files: tuple[str, ...]
    """Side files (tokenizer, ...) that were edited since the pack; no weights among them."""


def verify(
    folder: PackedFolder,
    *,
    against: Path | None = None,
    jobs: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Verification:
    """Check all records of an opened folder (opening has checked the files with unpacked tensors).

    Args:
        folder: the packed folder.
        against: the original checkpoint; every decoded matrix and every unpacked tensor is compared bit for bit.
        jobs: records at work at once; default one per core.
        advance: called with the bytes of records just checked.

    Raises:
        CorruptRecordError: the first damaged or different record, with its file and tensor.
        ManifestError: the folder was packed from another checkpoint than ``against``.
    """
    manifest = folder.manifest
    original = _Original(manifest, SourceCheckpoint(against)) if against is not None else None
    records = manifest.records()
    compared = 0
    with ThreadPoolExecutor(worker_count(jobs)) as pool:
        for record, count in zip(
            records, pool.map(lambda r: _verify_record(folder.path, manifest, r, original), records), strict=True
        ):
            compared += count
            advance(record.length)
    plain = original.compare_plain(folder) if original is not None else 0
    changed = tuple(
        name
        for name, checksum in manifest.sidecar_files.items()
        if not (folder.path / name).is_file() or file_checksum(folder.path / name) != checksum
    )
    return Verification(
        len(records),
        sum(record.length for record in records),
        plain,
        compared,
        str(against) if against is not None else None,
        changed,
    )


def _verify_record(path: Path, manifest: Manifest, record: Record, original: _Original | None) -> int:
    file = path / record.file
    with file.open("rb") as handle:
        raw = os.pread(handle.fileno(), record.length, record.offset)
        os.posix_fadvise(handle.fileno(), record.offset, record.length, os.POSIX_FADV_DONTNEED)
    data: npt.NDArray[np.uint8] = np.frombuffer(raw, dtype=np.uint8)
    damaged = damaged_extent(data, record) if data.nbytes == record.length else record.extents[0]
    if damaged is not None:
        raise CorruptRecordError(
            f"record {record.name!r} in {str(file)!r} is damaged: the checksum of its {damaged.kind} extent "
            "does not match",
            hint=_COPY_HINT,
        )
    for entry in record.matrices:
        try:
            if original is None:
                sections = [data[s.offset : s.offset + s.length] for s in entry.sections]
                _native.validate(manifest.codec.name, entry.rows, entry.columns, sections, list(entry.shard_bytes))
            else:
                original.compare(record, entry, decode_matrix(data, entry, manifest.codec.name))
        except ValueError as error:
            raise CorruptRecordError(
                f"record {record.name!r} in {str(file)!r}: {entry.name!r} is not a valid {manifest.codec.name} "
                f"encoding: {error}",
                hint=_COPY_HINT,
            ) from error
    return len(record.matrices) if original is not None else 0


class _Original:
    """The checkpoint that a folder claims to be packed from."""

    def __init__(self, manifest: Manifest, source: SourceCheckpoint) -> None:
        found = source.fingerprint()
        if found != manifest.source_fingerprint:
            raise ManifestError(
                f"{str(source.folder)!r} is not what this folder was packed from: fingerprint {found} "
                f"instead of {manifest.source_fingerprint}",
                hint="pass the folder that was packed, unchanged",
            )
        self._source = source
        model = meta_model(source)
        self._plan: PackPlan = plan_pack(model, source, min_dense_bytes=0)
        self._reader = ExpertReader(model, source, self._plan.expert_units)
        self._experts: dict[str, tuple[ExpertModules, int]] = {
            plan.name: (plan.group, plan.expert) for plan in self._plan.records() if isinstance(plan, ExpertRecordPlan)
        }
        self._blocks = {p.name: p for p in self._plan.records() if isinstance(p, DenseBlockPlan)}
        self._compare_structure(manifest)

    def _compare_structure(self, manifest: Manifest) -> None:
        """What the manifest says about the model is what follows from the checkpoint."""
        groups = {g.path: (g.parameters, g.num_experts) for g in self._plan.groups}
        ties = {m.parameter: m.tied_parameters for m in self._plan.dense}
        found_groups = {g.path: (g.parameters, len(g.records)) for g in manifest.expert_groups}
        found_ties = {m.parameter: m.tied_parameters for m in manifest.dense}
        wrong = [p for p in groups.keys() | found_groups.keys() if groups.get(p) != found_groups.get(p)]
        wrong += [p for p, tied in found_ties.items() if ties.get(p) != tied]
        if set(manifest.ignored_source_keys) != set(self._plan.ignored_keys):
            wrong += sorted(set(manifest.ignored_source_keys) ^ set(self._plan.ignored_keys))
        if wrong:
            raise ManifestError(
                f"what the manifest says about {min(wrong)!r} does not follow from the checkpoint "
                f"{str(self._source.folder)!r}",
                hint=_COPY_HINT,
            )

    def compare(self, record: Record, entry: MatrixEntry, decoded: torch.Tensor) -> None:
        if record.name in self._experts:
            group, expert = self._experts[record.name]
            expected = self._reader.read(group, entry.name, expert)
        elif record.name in self._blocks:
            block = self._blocks[record.name]
            expected = self._source.read_rows(block.key, block.begin, block.end)
        else:
            raise ManifestError(
                f"record {record.name!r} does not follow from the checkpoint {str(self._source.folder)!r}",
                hint=_COPY_HINT,
            )
        if decoded.shape != expected.shape or not torch.equal(decoded.view(torch.int16), expected.view(torch.int16)):
            raise CorruptRecordError(
                f"record {record.name!r} in {record.file!r}: {entry.name!r} differs from the original checkpoint",
                hint=_COPY_HINT,
            )

    def compare_plain(self, folder: PackedFolder) -> int:
        manifest = folder.manifest
        packed = {block.name for matrix in manifest.dense for block in matrix.blocks}
        covered = {b.key for b in self._blocks.values() if b.name in packed}
        covered |= {key for unit in self._plan.expert_units.values() for key in unit.keys}
        covered |= set(manifest.ignored_source_keys)
        missing = set(self._source.tensors) - covered
        compared = 0
        for name, file_entry in manifest.files.items():
            if file_entry.xxh3_64 is None:
                continue
            with safe_open(folder.path / name, framework="pt", backend="pread") as file:
                for key in file.keys():  # noqa: SIM118 - not a dict
                    if key == manifest.guard_tensor or key.startswith(FILLER_PREFIX):
                        continue
                    self._compare_plain_tensor(key, file.get_tensor(key), name)
                    missing.discard(key)
                    compared += 1
        if missing:
            raise CorruptRecordError(
                f"tensor {min(missing)!r} of the original checkpoint is not in the packed folder", hint=_COPY_HINT
            )
        return compared

    def _compare_plain_tensor(self, key: str, tensor: torch.Tensor, file: str) -> None:
        expected = self._source.read(key) if key in self._source.tensors else None
        same = (
            expected is not None
            and expected.dtype == tensor.dtype
            and expected.shape == tensor.shape
            and torch.equal(
                expected.contiguous().reshape(-1).view(torch.uint8), tensor.contiguous().reshape(-1).view(torch.uint8)
            )
        )
        if not same:
            raise CorruptRecordError(
                f"tensor {key!r} in {file!r} differs from the original checkpoint", hint=_COPY_HINT
            )
