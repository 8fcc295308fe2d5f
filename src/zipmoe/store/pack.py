"""Pack a checkpoint: stream every expert and every large dense matrix through a codec into a new model folder.

The order of writing makes an interrupted pack recognisable and resumable: records (with a journal), plain tensors,
side files, index, ``config.json``, and last the manifest. Until the manifest exists the folder cannot be loaded.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zipmoe._version import __version__
from zipmoe.checkpoint.expert_reader import ExpertReader
from zipmoe.checkpoint.source import CONFIG_NAME, INDEX_NAME, QUANT_METHOD, SourceCheckpoint
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.codecs.registry import dense_shards
from zipmoe.errors import AlreadyPackedError, InvalidArgumentError, NotEnoughDiskError, PackMismatchError
from zipmoe.store.durable_files import PARTIAL_SUFFIX, durable_writer, write_json
from zipmoe.store.guard_tensor import EXPERTS_IMPLEMENTATION, GUARD_SHAPE, guard_tensor_name
from zipmoe.store.manifest import (
    FORMAT_VERSION,
    JOURNAL_NAME,
    MANIFEST_NAME,
    DenseMatrix,
    ExpertGroup,
    FileEntry,
    Manifest,
    Record,
)
from zipmoe.store.manifest_file import write_manifest
from zipmoe.store.pack_journal import PackJournal
from zipmoe.store.pack_plan import (
    MIN_DENSE_BYTES,
    DenseBlockPlan,
    ExpertRecordPlan,
    PackPlan,
    RecordPlan,
    meta_model,
    plan_pack,
)
from zipmoe.store.plain_shard import PLAIN_SHARD_BYTES, file_checksum, write_plain_shard
from zipmoe.store.record_encoder import (
    EncodedRecord,
    bfloat16_bits,
    damaged_extent,
    decode_matrix,
    encode_record,
)
from zipmoe.store.record_shard import RecordShardWriter, pack_identity, read_record_shard_header
from zipmoe.store.shard_split import split_into_shards
from zipmoe.store.worker_count import worker_count

RECORD_SHARD_SOURCE_BYTES = 4 << 30
FLUSH_BYTES = 256 << 20
IN_FLIGHT_BYTES = 400 << 20
"""Bound on the memory of records that are being encoded or wait to be written."""
MEMORY_PER_SOURCE_BYTE = 3.5
"""Source slices, their conversion, the encoded sections and the assembled record, per byte of BF16."""
EXPECTED_RATIO = 0.76
"""Packed size over BF16 size that the check for free disk space reckons with."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".ckpt")

_OWN_NAMES = (CONFIG_NAME, MANIFEST_NAME, JOURNAL_NAME)
"""Written by the pack itself: files of these names in the source must not take their place."""


@dataclass(frozen=True)
class PackProgress:
    """How far a pack has come; all in bytes of the source."""

    done_bytes: int
    resumed_bytes: int
    total_bytes: int
    stage: str


Report = Callable[[PackProgress], None]


def pack(
    source_folder: Path,
    destination: Path,
    settings: CodecSettings,
    *,
    jobs: int | None = None,
    report: Report | None = None,
    min_dense_bytes: int = MIN_DENSE_BYTES,
) -> Manifest:
    """Pack the checkpoint in ``source_folder`` into the new folder ``destination``.

    Run again after an interruption with the same arguments, it continues behind the last record that was written
    durably.

    Args:
        source_folder: a Hugging Face checkpoint with safetensors weights in BF16.
        destination: must not exist, be empty, or hold an interrupted pack of the same source with the same settings.
        settings: codec, level and shards.
        jobs: encoders at work at once; default one per core.
        report: called with the progress, from this thread.
        min_dense_bytes: dense matrices below this many bytes are left unpacked.

    Raises:
        CheckpointError: (one of its subclasses) the source cannot be packed, or the destination is in use.
        NotEnoughDiskError: before or during the work; what is written stays and can be continued.
    """
    workers = worker_count(jobs)
    source = SourceCheckpoint(source_folder)
    _check_destination(source_folder, destination)
    model = meta_model(source)
    plan = plan_pack(model, source, min_dense_bytes=min_dense_bytes)
    fingerprint = source.fingerprint()
    _create(destination)
    journal = PackJournal(
        destination,
        {
            "format_version": FORMAT_VERSION,
            "zipmoe_version": __version__,
            "source_fingerprint": fingerprint,
            "codec": settings.name,
            "level": settings.level,
            "shards": settings.shards,
            "records": len(plan.records()),
            "min_dense_bytes": min_dense_bytes,
        },
    )
    try:
        if (destination / MANIFEST_NAME).exists():  # another process has finished it since the first look
            journal.delete()
            _refuse_finished(destination)
        run = _Pack(source, destination, settings, plan, model, fingerprint, workers, report or (lambda _: None))
        manifest = run.run(journal)
        journal.delete()
        return manifest
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughDiskError(
                f"the disk of {str(destination)!r} is full; everything written so far is kept",
                hint="free some space and run the same command again: it continues",
            ) from error
        raise
    finally:
        journal.close()


def _check_destination(source_folder: Path, destination: Path) -> None:
    if destination.exists() and not destination.is_dir():
        raise InvalidArgumentError(f"destination {str(destination)!r} is a file", hint="choose a new folder")
    if destination.resolve() == source_folder.resolve():
        raise InvalidArgumentError("source and destination are the same folder", hint="choose a new folder")
    _refuse_finished(destination)
    if destination.is_dir() and any(destination.iterdir()) and not (destination / JOURNAL_NAME).exists():
        raise InvalidArgumentError(
            f"destination {str(destination)!r} is not empty", hint="choose a new folder; nothing was changed there"
        )
    parent = destination.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InvalidArgumentError(
            f"{str(parent)!r} is a file: {str(destination)!r} cannot be created", hint="choose another folder"
        )
    if not os.access(destination if destination.exists() else parent, os.W_OK):
        raise InvalidArgumentError(f"no permission to write {str(destination)!r}", hint="choose another folder")


def _refuse_finished(destination: Path) -> None:
    if (destination / MANIFEST_NAME).exists():
        raise AlreadyPackedError(
            f"{str(destination)!r} already holds a packed model", hint="choose another folder, or delete it first"
        )


def _create(destination: Path) -> None:
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"cannot create the folder {str(destination)!r}: {error.strerror}", hint="choose another folder"
        ) from error


class _Pack:
    def __init__(
        self,
        source: SourceCheckpoint,
        destination: Path,
        settings: CodecSettings,
        plan: PackPlan,
        model: Any,
        fingerprint: str,
        workers: int,
        report: Report,
    ) -> None:
        self._source = source
        self._destination = destination
        self._settings = settings
        self._plan = plan
        self._model = model
        self._fingerprint = fingerprint
        self._workers = workers
        self._report = report
        self._reader = ExpertReader(model, source, plan.expert_units)
        self._done_bytes = 0
        self._resumed_bytes = 0
        self._plain_bytes = sum(source.tensors[k].bytes for k in plan.plain_keys)
        self._packed_bytes = sum(record.source_bytes for record in plan.records())

    def run(self, journal: PackJournal) -> Manifest:
        self._check_disk(journal)
        self._advance(0, "packing")
        files: dict[str, FileEntry] = {}
        records = self._write_records(journal, files)
        manifest = self._manifest(records, files)
        guard = guard_tensor_name(manifest)
        manifest = replace(manifest, guard_tensor=guard)
        weight_map = {record.name: record.file for record in records}
        self._write_plain(files, guard, weight_map)
        side_files = self._copy_side_files()
        total = sum(entry.bytes for entry in files.values())
        write_json(self._destination / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
        write_json(self._destination / CONFIG_NAME, self._packed_config())
        side_files[CONFIG_NAME] = file_checksum(self._destination / CONFIG_NAME)
        manifest = replace(manifest, files=files, sidecar_files=side_files)
        for path in leftovers(self._destination):  # of side files that are no longer in the source
            path.unlink()
        write_manifest(self._destination, manifest)
        return manifest

    def _advance(self, count: int, stage: str) -> None:
        self._done_bytes += count
        total = self._packed_bytes + self._plain_bytes
        self._report(PackProgress(self._done_bytes, self._resumed_bytes, total, stage))

    def _check_disk(self, journal: PackJournal) -> None:
        written = sum(record.length for record in journal.records)
        needed = int(self._packed_bytes * EXPECTED_RATIO) + self._plain_bytes - written
        free = shutil.disk_usage(self._destination).free
        if needed > free:
            raise NotEnoughDiskError(
                f"packing needs about {needed / 1e9:.2f} GB in {str(self._destination)!r}, "
                f"{free / 1e9:.2f} GB are free",
                hint="free some space or choose a folder on another disk",
            )

    # ---- records

    def _write_records(self, journal: PackJournal, files: dict[str, FileEntry]) -> list[Record]:
        shards = split_into_shards(self._plan.records(), lambda r: r.source_bytes, RECORD_SHARD_SOURCE_BYTES)
        done = list(journal.records)
        planned = [record for shard in shards for record in shard]
        if [r.name for r in done] != [p.name for p in planned[: len(done)]]:
            raise PackMismatchError(
                f"the journal in {str(self._destination)!r} does not follow the plan of this checkpoint",
                hint="delete the folder and pack again",
            )
        records: list[Record] = []
        with ThreadPoolExecutor(self._workers, thread_name_prefix="zipmoe-pack") as pool:
            for number, shard in enumerate(shards, 1):
                name = f"packed-{number:05d}-of-{len(shards):05d}.safetensors"
                here, done = done[: len(shard)], done[len(shard) :]
                written, length = self._write_record_shard(name, shard, here, journal, pool)
                records += written
                files[name] = FileEntry(length, None)
        return records

    def _write_record_shard(
        self, name: str, shard: list[RecordPlan], done: list[Record], journal: PackJournal, pool: ThreadPoolExecutor
    ) -> tuple[list[Record], int]:
        path = self._destination / name
        if path.exists():  # finished by an earlier run
            return self._accept_finished(path, shard, done)
        pack_id = self._pack_id()
        writer = RecordShardWriter(path, [plan.name for plan in shard], pack_id, [r.length for r in done])
        try:
            for plan, record in zip(shard, done, strict=False):
                self._check_resumed(plan, record, writer.read_back(record.offset, record.length), path)
                self._resumed_bytes += plan.source_bytes
                self._advance(plan.source_bytes, "checking what an earlier run wrote")
            records = list(done)
            for plan, encoded in self._encode_in_order(shard[len(done) :], pool):
                offset = writer.append(encoded.data)
                record = Record(plan.name, name, offset, encoded.data.nbytes, encoded.extents, encoded.matrices)
                records.append(record)
                journal.note(record)
                if writer.unflushed_bytes >= FLUSH_BYTES:
                    writer.flush()
                    journal.commit()
                self._advance(plan.source_bytes, "packing")
            writer.flush()
            journal.commit()
            return records, writer.finish()
        finally:
            writer.close()

    def _accept_finished(self, path: Path, shard: list[RecordPlan], done: list[Record]) -> tuple[list[Record], int]:
        if len(done) != len(shard):
            raise PackMismatchError(
                f"{str(path)!r} is finished but the journal lacks {len(shard) - len(done)} of its records",
                hint="delete the destination folder and pack again",
            )
        if read_record_shard_header(path) != (self._pack_id(), {r.name: (r.offset, r.length) for r in done}):
            raise PackMismatchError(
                f"the header of {str(path)!r} of the interrupted pack is not what the journal says",
                hint="delete the destination folder and pack again",
            )
        if path.stat().st_size != done[-1].offset + done[-1].length:
            raise PackMismatchError(
                f"{str(path)!r} of the interrupted pack has another length than the journal says",
                hint="delete the destination folder and pack again",
            )
        with path.open("rb") as file:
            for plan, record in zip(shard, done, strict=True):
                data = os.pread(file.fileno(), record.length, record.offset)
                self._check_resumed(plan, record, np.frombuffer(data, dtype=np.uint8), path)
                self._resumed_bytes += plan.source_bytes
                self._advance(plan.source_bytes, "checking what an earlier run wrote")
        return done, path.stat().st_size

    def _pack_id(self) -> str:
        return pack_identity(self._fingerprint, self._settings)

    def _check_resumed(self, plan: RecordPlan, record: Record, data: npt.NDArray[np.uint8], path: Path) -> None:
        """What an earlier run wrote is whole, and still what the source holds: the fingerprint samples it only."""
        if data.nbytes != record.length or damaged_extent(data, record) is not None:
            raise PackMismatchError(
                f"record {record.name!r} of the interrupted pack is damaged in {str(path)!r}",
                hint="delete the destination folder and pack again",
            )
        matrices = self._matrices(plan)
        try:
            decoded = [decode_matrix(data, entry, self._settings.name) for entry in record.matrices]
        except ValueError:  # the journal says something else about the record than its bytes
            decoded = []
        same = len(decoded) == len(matrices) and all(
            np.array_equal(bfloat16_bits(ours), bfloat16_bits(theirs))
            for ours, (_, theirs) in zip(decoded, matrices, strict=True)
        )
        if not same:
            raise PackMismatchError(
                f"record {record.name!r} of the interrupted pack in {str(path)!r} is not what "
                f"{str(self._source.folder)!r} holds now",
                hint="the source was changed meanwhile: delete the destination folder and pack again",
            )

    def _encode_in_order(
        self, plans: list[RecordPlan], pool: ThreadPoolExecutor
    ) -> Iterator[tuple[RecordPlan, EncodedRecord]]:
        waiting: deque[tuple[RecordPlan, Future[EncodedRecord]]] = deque()
        in_flight = 0.0
        for plan in plans:
            memory = plan.source_bytes * MEMORY_PER_SOURCE_BYTE
            while waiting and (len(waiting) > self._workers or in_flight + memory > IN_FLIGHT_BYTES):
                first, future = waiting.popleft()
                yield first, future.result()
                in_flight -= first.source_bytes * MEMORY_PER_SOURCE_BYTE
            waiting.append((plan, pool.submit(self._encode, plan)))
            in_flight += memory
        try:
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    def _matrices(self, plan: RecordPlan) -> list[tuple[str, torch.Tensor]]:
        if isinstance(plan, ExpertRecordPlan):
            return [(p, self._reader.read(plan.group, p, plan.expert)) for p in plan.group.parameters]
        return [("weight", self._source.read_rows(plan.key, plan.begin, plan.end))]

    def _encode(self, plan: RecordPlan) -> EncodedRecord:
        shards = self._settings.shards
        if isinstance(plan, DenseBlockPlan):
            shards = dense_shards(self._settings, plan.end - plan.begin, plan.columns)
        return encode_record(self._matrices(plan), self._settings, shards)

    # ---- everything else

    def _write_plain(self, files: dict[str, FileEntry], guard: str, weight_map: dict[str, str]) -> None:
        tensors = [self._source.tensors[key] for key in self._plan.plain_keys]
        shards = split_into_shards(tensors, lambda info: info.bytes, PLAIN_SHARD_BYTES)
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with_guard = (guard, GUARD_SHAPE) if number == len(shards) else None
            files[name], keys = write_plain_shard(
                self._destination / name,
                shard,
                self._source,
                with_guard,
                lambda count: self._advance(count, "copying what stays as it is"),
            )
            weight_map.update(dict.fromkeys(keys, name))

    def _copy_side_files(self) -> dict[str, int]:
        checksums = {}
        folder = self._source.folder
        own_folder = self._destination.resolve()
        if own_folder.is_relative_to(folder.resolve()):  # packed into a folder inside of the source
            own_folder = folder / own_folder.relative_to(folder.resolve())
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            weights = path.suffix in WEIGHT_SUFFIXES or path.name.endswith(".index.json")
            ours = str(relative) in _OWN_NAMES or path.is_relative_to(own_folder)
            if hidden or weights or ours or not path.is_file():
                continue
            target = self._destination / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            with durable_writer(target) as out, path.open("rb") as file:
                shutil.copyfileobj(file, out)
            checksums[str(relative)] = file_checksum(target)
        return checksums

    def _packed_config(self) -> dict[str, Any]:
        config = dict(self._source.config)
        config["quantization_config"] = {"quant_method": QUANT_METHOD, "format_version": FORMAT_VERSION}
        config["experts_implementation"] = EXPERTS_IMPLEMENTATION
        return config

    def _manifest(self, records: list[Record], files: dict[str, FileEntry]) -> Manifest:
        by_name = {record.name: record for record in records}
        groups: dict[str, list[Record]] = {group.path: [] for group in self._plan.groups}
        for plan in self._plan.records():
            if isinstance(plan, ExpertRecordPlan):
                groups[plan.group.path].append(by_name[plan.name])
        return Manifest(
            zipmoe_version=__version__,
            model_type=str(self._source.config.get("model_type", "")),
            architecture=type(self._model).__name__,
            source_fingerprint=self._fingerprint,
            source_bytes=self._source.total_bytes,
            codec=self._settings,
            files=files,
            expert_groups=tuple(
                ExpertGroup(
                    group.path,
                    group.parameters,
                    tuple(groups[group.path]),
                    self._plan.tied_paths.get(group.path, ()),
                )
                for group in self._plan.groups
            ),
            dense=tuple(
                DenseMatrix(
                    matrix.parameter,
                    matrix.tied_parameters,
                    matrix.rows,
                    matrix.columns,
                    tuple(by_name[block.name] for block in matrix.blocks),
                )
                for matrix in self._plan.dense
            ),
            unpacked=self._plan.unpacked,
            guard_tensor="",
            ignored_source_keys=self._plan.ignored_keys,
        )


def leftovers(folder: Path) -> list[Path]:
    """Partial files in ``folder`` and below."""
    return sorted(folder.rglob(f".*{PARTIAL_SUFFIX}"))
