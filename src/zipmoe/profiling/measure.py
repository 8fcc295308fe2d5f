"""The measurements of ``zipmoe profile``, one stage after the other, each within its share of the time."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import torch

from zipmoe import _native
from zipmoe._version import __version__
from zipmoe.codecs.registry import codec_names, get_codec
from zipmoe.errors import InvalidArgumentError, ManifestError
from zipmoe.planning.device import HostFingerprint, host_fingerprint
from zipmoe.profiling.codec_probes import (
    BETWEEN_PRODUCTS,
    CodecProbe,
    EncodedSample,
    codec_memory_bytes,
    codec_probes,
    encode_sample,
)
from zipmoe.profiling.concurrent_read_probes import (
    ConcurrentReadProbe,
    EngineReaderFactory,
    concurrent_read_probes,
    open_engine_reader,
)
from zipmoe.profiling.disk_identity import DiskIdentity, OtherLoad, disk_identity
from zipmoe.profiling.disk_probes import (
    READ_MEMORY_BYTES,
    DiskProbes,
    LatencyProbe,
    ReaderFactory,
    ReadProbe,
    disk_probes,
)
from zipmoe.profiling.estimate import Estimate
from zipmoe.profiling.execution_probes import (
    TOKENS,
    DispatchProbe,
    ExecutionProbe,
    ExpertWeights,
    execution_memory_bytes,
    expert_weights,
)
from zipmoe.profiling.expert_sample import ExpertKind, SampleMatrix, most_common_kind, read_sample
from zipmoe.profiling.fused_probes import (
    FUSED_TOKENS,
    FusedProbe,
    fused_memory_bytes,
    packed_experts,
    unpacked_experts,
)
from zipmoe.profiling.memory_probes import MEMORY_BYTES, memory_probes
from zipmoe.profiling.operating_points import OperatingPoint, operating_points
from zipmoe.profiling.read_places import RecordFiles, record_files
from zipmoe.profiling.report import (
    CodecRates,
    EngineReadRate,
    ExecutionTime,
    ExpertShape,
    ExponentRatio,
    FusedTime,
    MemoryRate,
    ProfileReport,
    Provenance,
    ReadRate,
)
from zipmoe.profiling.rounds import Clock, Probe, RoundResults, run_rounds
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_shard import pack_identity

DEFAULT_SECONDS = 40.0
LEAST_SECONDS = 1.0
LONGEST_SECONDS = 3600.0
SHARES = {"disk": 0.45, "latency": 0.03, "codecs": 0.24, "memory": 0.06, "execution": 0.22}
"""Of the time; together 1."""
_BUSY_CORES = 0.25
_OTHER_CODECS_WEIGHTS = 4 << 20
"""Of the sample for codecs other than the folder's: some of them take a second of a core for this much."""
_LARGE_SPREAD = 0.5
_SMALL_FOLDER_BYTES = 1 << 30
_STILL_CACHED = 0.05
_OneProgress = Callable[[str, float], None]


class _Schedule:
    """Hands out the time: every stage gets its share of what is left, so that a slow preparation or stage shortens the
    following ones; but never less than half of what it would have had.
    """

    def __init__(self, seconds: float, clock: Clock, report: _OneProgress) -> None:
        self._seconds = seconds
        self._clock = clock
        self._report = report
        self._began = clock()
        self._shares = dict(SHARES)
        self.left_out: list[str] = []

    @property
    def passed(self) -> float:
        return self._clock() - self._began

    def stage(self, name: str, probes: Sequence[Probe]) -> RoundResults:
        left = max(0.0, self._seconds - self.passed)
        seconds = max(left * self._shares[name] / sum(self._shares.values()), self._seconds * SHARES[name] / 2)
        del self._shares[name]
        results = run_rounds(probes, seconds, clock=self._clock, advance=lambda label, _: self.show(label))
        self.left_out += results.left_out
        return results

    def show(self, label: str) -> None:
        self._report(label, min(1.0, self.passed / self._seconds))


def worker_counts(workers: int) -> tuple[int, ...]:
    """Numbers of workers that are measured: 1, 2, 4, ... and all."""
    return tuple(sorted({1 << power for power in range(workers.bit_length()) if 1 << power <= workers} | {workers}))


def provenance(
    folder: PackedFolder, host: HostFingerprint | None = None, disk: DiskIdentity | None = None
) -> Provenance:
    """What measurements of this folder made here and now belong to."""
    manifest = folder.manifest
    return Provenance(
        zipmoe_version=__version__,
        torch_version=str(torch.__version__),
        instruction_set=_native.best_instruction_set(),
        libraries={name: version for name in codec_names() if (version := _native.library_version(name))},
        host=host or host_fingerprint(),
        disk=disk or disk_identity(folder.path),
        pack_identity=pack_identity(manifest.source_fingerprint, manifest.codec),
        measured_at=datetime.now(UTC),
    )


def check_seconds(seconds: float) -> None:
    """InvalidArgumentError unless so long can be measured for."""
    if not LEAST_SECONDS <= seconds <= LONGEST_SECONDS:
        raise InvalidArgumentError(
            f"{seconds:g} seconds cannot be measured for", hint=f"take {LEAST_SECONDS:g} to {LONGEST_SECONDS:g}"
        )


def measure(
    folder: PackedFolder,
    seconds: float = DEFAULT_SECONDS,
    *,
    progress: _OneProgress = lambda label, fraction: None,
    clock: Clock = time.perf_counter,
    open_reader: ReaderFactory = _native.TimedReads,
    open_record_reader: EngineReaderFactory = open_engine_reader,
) -> ProfileReport:
    """Measure disk, codecs, memory and execution for this folder; writes nothing.

    Args:
        folder: an opened packed folder.
        seconds: for everything together, preparation included (which a busy machine may exceed somewhat).
        progress: told what is being measured, and the fraction of the time that has passed.
        clock: seconds, for budgets (tests pass one of their own).
        open_reader: opens readers for the disk probes (tests pass one of their own).
        open_record_reader: the same for records through the engine's reader.

    Raises:
        InvalidArgumentError: ``seconds`` is out of range.
        CodecUnavailableError: the folder's codec is missing in this build.
        PackedFolderError: the folder has no experts, is damaged, or cannot be read.
    """
    check_seconds(seconds)
    schedule = _Schedule(seconds, clock, progress)
    manifest = folder.manifest
    get_codec(manifest.codec.name)
    workers = len(os.sched_getaffinity(0))
    counts = worker_counts(workers)
    kind = most_common_kind(manifest)
    if not kind.shapes or kind.bfloat16_bytes == 0:
        raise ManifestError("the experts have no matrices", hint="pack the model again")
    schedule.show("preparing")
    sample = read_sample(folder, kind)
    encoded = [encode_sample(point, sample_for(point, sample)) for point in operating_points(manifest.codec)]
    files = record_files(folder.path, manifest.records())
    memory = TouchedMemory(_memory_bytes(kind, encoded, sample, workers))
    load = OtherLoad()
    read_memory = memory.take(READ_MEMORY_BYTES)
    disk = disk_probes(files, kind.records, kind.record_bytes, read_memory, open_reader)
    records: list[ConcurrentReadProbe] = []
    if not disk.direct_refusal:
        records = concurrent_read_probes(files, kind.records, kind.record_bytes, read_memory, open_record_reader)
    reads, record_reads = schedule.stage("disk", [*disk.reads, *records]).split(len(disk.reads))
    schedule.stage("latency", disk.latencies)
    memory.clear()
    codecs = codec_probes(encoded, sample, counts, memory)
    codec_results = schedule.stage("codecs", codecs)
    memory.clear()
    bandwidth = memory_probes(memory.take(MEMORY_BYTES), counts)
    memory_results = schedule.stage("memory", bandwidth)
    memory.clear()
    experts = expert_weights(kind.shapes, np.concatenate([m.weights.reshape(-1) for m in sample]), memory)
    execution = [ExecutionProbe(tokens, experts) for tokens in TOKENS]
    fused = _fused_probes(folder, kind, experts, memory, workers)
    product = FusedProbe(1, fused[0].weights, _native.ComputeThreads(workers)) if fused else ExecutionProbe(1, experts)
    dispatch = DispatchProbe(max(columns for _, _, columns in kind.shapes), lambda: product.run(1))
    dispatched, *found_times = schedule.stage("execution", [dispatch, *execution, *fused]).samples
    execution_samples, fused_samples = found_times[: len(execution)], found_times[len(execution) :]
    busy = load.cores()
    report = ProfileReport(
        folder=str(folder.path),
        provenance=provenance(folder),
        expert=ExpertShape(kind.shapes, kind.bfloat16_bytes, kind.record_bytes, len(kind.records)),
        workers=workers,
        torch_threads=torch.get_num_threads(),
        measured_seconds=schedule.passed,
        other_cores_busy=busy,
        direct_refusal=disk.direct_refusal,
        reads=_read_rates(disk.reads, reads),
        engine_reads=tuple(
            EngineReadRate(probe.backend, probe.parallel, found.rate())
            for probe, found in zip(records, record_reads.samples, strict=True)
            if found is not None
        ),
        latency_seconds=_latencies(disk.latencies),
        exponent_ratios=exponent_ratios(kind),
        codecs=_codec_rates(encoded, codecs, codec_results),
        recombine_bytes_per_second=_by_workers(codecs, codec_results, "recombine", ""),
        memory=tuple(
            MemoryRate(probe.step, probe.workers, found.rate())
            for probe, found in zip(bandwidth, memory_results.samples, strict=True)
            if found is not None
        ),
        execution=tuple(
            ExecutionTime(probe.tokens, Estimate.of(probe.executions))
            for probe, found in zip(execution, execution_samples, strict=True)
            if found is not None
        ),
        fused=tuple(
            FusedTime(probe.weights.form, probe.tokens, probe.weights.expert_bytes, Estimate.of(probe.executions))
            for probe, found in zip(fused, fused_samples, strict=True)
            if found is not None
        ),
        dispatch_seconds=dispatched.seconds_per_work() if dispatched is not None else None,
        left_out=tuple(schedule.left_out),
        notes=_notes(disk, files, reads, busy),
    )
    return replace(report, notes=(*report.notes, *_spread_notes(report)))


def sample_for(point: OperatingPoint, sample: Sequence[SampleMatrix]) -> Sequence[SampleMatrix]:
    """The part of the sample to encode: all of it for the folder's codec and for those that are quick to encode."""
    if point.of_folder or not point.separable:
        return sample
    weights = 0
    for count, matrix in enumerate(sample, start=1):
        weights += matrix.weights.size
        if weights >= _OTHER_CODECS_WEIGHTS:
            return sample[:count]
    return sample


def exponent_ratios(kind: ExpertKind) -> tuple[ExponentRatio, ...]:
    """rho of every matrix of the experts, from the lengths in the manifest."""
    found = []
    for position, (name, rows, columns) in enumerate(kind.shapes):
        weights = rows * columns
        ratios = []
        for record in kind.records:
            entry = record.matrices[position]
            sections = sum(section.length for section in entry.sections)
            ratios.append(sections / weights - 1)
        found.append(ExponentRatio(name, sum(ratios) / len(ratios), min(ratios), max(ratios)))
    return tuple(found)


def _memory_bytes(
    kind: ExpertKind, encoded: Sequence[EncodedSample], sample: Sequence[SampleMatrix], workers: int
) -> int:
    codecs = codec_memory_bytes(encoded, sample, workers)
    execution = execution_memory_bytes(kind.bfloat16_bytes, len(kind.shapes))
    packed = fused_memory_bytes(kind) if get_codec(encoded[0].point.settings.name).fused else 0
    return max(READ_MEMORY_BYTES, codecs, MEMORY_BYTES, execution + packed)


def _fused_probes(
    folder: PackedFolder, kind: ExpertKind, experts: Sequence[ExpertWeights], memory: TouchedMemory, workers: int
) -> list[FusedProbe]:
    """None unless the folder's codec has kernels on its packed form."""
    if not get_codec(folder.manifest.codec.name).fused:
        return []
    threads = _native.ComputeThreads(workers)
    forms = (packed_experts(folder, kind, memory), unpacked_experts(experts))
    return [FusedProbe(tokens, weights, threads) for weights in forms for tokens in FUSED_TOKENS]


def _spread_notes(report: ProfileReport) -> list[str]:
    """Says of which parts the rounds were far apart."""
    parts = {
        "disk": [read.bytes_per_second for read in report.reads if read.mode == "direct" or report.direct_refusal],
        "codecs": [rate for codec in report.codecs for rate in codec.decompress_bytes_per_second.values()],
        "memory": [rate.bytes_per_second for rate in report.memory],
        "execution": [time.seconds for time in report.execution] + [time.seconds for time in report.fused],
    }
    unsteady = [
        f"{name} ({statistics.median(estimate.spread for estimate in estimates):.0%})"
        for name, estimates in parts.items()
        if estimates and statistics.median(estimate.spread for estimate in estimates) > _LARGE_SPREAD
    ]
    if not unsteady:
        return []
    return [f"rounds were far apart for {', '.join(unsteady)}: do not rely on these numbers"]


def _read_rates(probes: Sequence[ReadProbe], results: RoundResults) -> tuple[ReadRate, ...]:
    return tuple(
        ReadRate(probe.mode, probe.block_bytes, probe.depth, probe.of_record, found.rate(), int(found.work))
        for probe, found in zip(probes, results.samples, strict=True)
        if found is not None
    )


def _latencies(probes: Sequence[LatencyProbe]) -> dict[str, Estimate]:
    return {probe.mode: Estimate.of(probe.latencies) for probe in probes if probe.latencies}


def _by_workers(probes: Sequence[CodecProbe], results: RoundResults, step: str, key: str) -> dict[int, Estimate]:
    return {
        probe.workers: found.rate()
        for probe, found in zip(probes, results.samples, strict=True)
        if found is not None and (probe.step, probe.key) == (step, key)
    }


def _codec_rates(
    encoded: Sequence[EncodedSample], probes: Sequence[CodecProbe], results: RoundResults
) -> tuple[CodecRates, ...]:
    rates = []
    for each in encoded:
        point = each.point
        rates.append(
            CodecRates(
                key=point.key,
                codec=point.settings.name,
                level=point.settings.level,
                shards=point.settings.shards,
                of_folder=point.of_folder,
                separable=point.separable,
                exponent_ratio=each.exponent_ratio,
                shard_bytes=max((raw for _, raw in each.shards()), default=0),
                decompress_bytes_per_second=_by_workers(probes, results, "decompress", point.key),
                decode_bytes_per_second=_by_workers(probes, results, "decode", point.key),
                decode_between_products_bytes_per_second=next(
                    iter(_by_workers(probes, results, BETWEEN_PRODUCTS, point.key).values()), None
                ),
            )
        )
    return tuple(rates)


def _notes(disk: DiskProbes, files: RecordFiles, reads: RoundResults, busy: float) -> tuple[str, ...]:
    notes = []
    if disk.direct_refusal:
        notes.append(f"there are no direct reads here ({disk.direct_refusal}): only buffered ones were measured")
    if disk.page_cache.still_cached > _STILL_CACHED:
        notes.append(
            f"{disk.page_cache.still_cached:.0%} of the blocks stayed in the page cache (a file system in memory, or "
            "another program uses the folder): buffered rates are partly those of memory"
        )
    read = sum(found.work for found in reads.samples if found is not None)
    if files.total_bytes < _SMALL_FOLDER_BYTES and read > 4 * files.total_bytes:
        notes.append(
            f"the folder's {files.total_bytes / 1e6:.0f} MB were read {read / files.total_bytes:.0f} times over: a "
            "cache of the disk or of the host may have answered; a larger folder on this disk tells more"
        )
    if busy > _BUSY_CORES:
        notes.append(f"other processes kept {busy:.1f} cores busy meanwhile: measure again on an idle machine")
    return tuple(notes)
