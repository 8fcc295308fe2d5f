"""Everything that a profile run found out, with units in the names: what ``--json`` prints and the cache keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from zipmoe.planning.device import HostFingerprint
from zipmoe.profiling.disk_identity import DiskIdentity
from zipmoe.profiling.estimate import Estimate

REPORT_VERSION = 4
VERSION_KEY = "zipmoe_profile_report"


@dataclass(frozen=True)
class Provenance:
    """What the numbers belong to; another machine, disk, folder or software makes them void."""

    zipmoe_version: str
    torch_version: str
    instruction_set: str
    libraries: Mapping[str, str]
    """Compression library and version by codec."""
    host: HostFingerprint
    disk: DiskIdentity
    pack_identity: str
    """The packed folder's."""
    measured_at: datetime


@dataclass(frozen=True)
class ExpertShape:
    """What was read, decoded and executed."""

    matrices: tuple[tuple[str, int, int], ...]
    """Name, rows, columns."""
    bfloat16_bytes: int
    record_bytes: int
    """Median on disk."""
    experts: int
    """Of this shape in the folder."""


@dataclass(frozen=True)
class ReadRate:
    """Reads of one length at one queue depth."""

    mode: str
    """``"direct"`` or ``"buffered"``."""
    block_bytes: int
    depth: int
    of_record: bool
    """Whether the block is the folder's own record of an expert."""
    bytes_per_second: Estimate
    bytes_read: int
    """In all rounds."""


@dataclass(frozen=True)
class EngineReadRate:
    """Experts' records through the engine's reader."""

    backend: str
    """``"threads"`` or ``"uring"``."""
    parallel: int
    """Reads at a time."""
    bytes_per_second: Estimate


@dataclass(frozen=True)
class ExponentRatio:
    """rho of one matrix of the experts, from the manifest: compressed over raw exponent bytes."""

    matrix: str
    mean: float
    """All experts together."""
    lowest: float
    """Of one expert."""
    highest: float


@dataclass(frozen=True)
class CodecRates:
    """One codec at one setting, on weights of the folder."""

    key: str
    codec: str
    level: int | str | None
    shards: int
    """K; 1 for codecs without shards."""
    of_folder: bool
    separable: bool
    exponent_ratio: float
    """rho of the sample."""
    shard_bytes: int
    """Raw exponents of a shard of the expert's largest matrix; 0 for codecs without shards."""
    decompress_bytes_per_second: Mapping[int, Estimate]
    """By workers: raw exponent bytes produced by all of them; empty for codecs without shards."""
    decode_bytes_per_second: Mapping[int, Estimate]
    """By workers: BF16 bytes produced by all of them, from the packed form, matrix after matrix."""
    decode_between_products_bytes_per_second: Estimate | None = None
    """The same by all workers, in turn with torch's products as in a model; products not counted."""


@dataclass(frozen=True)
class MemoryRate:
    """Bandwidth of memory."""

    step: str
    """``"read"`` or ``"copy"`` (bytes copied: each is read once and written once)."""
    workers: int
    bytes_per_second: Estimate


@dataclass(frozen=True)
class ExecutionTime:
    """p."""

    tokens: int
    seconds: Estimate


@dataclass(frozen=True)
class FusedTime:
    """p of an expert as it lies in memory."""

    form: str
    """The folder's codec, or ``"BF16"``."""
    tokens: int
    expert_bytes: int
    """In this form, mean of the experts that were executed."""
    seconds: Estimate


@dataclass(frozen=True)
class ProfileReport:
    """One run of ``zipmoe profile``."""

    folder: str
    provenance: Provenance
    expert: ExpertShape
    workers: int
    """L: cores of this process."""
    torch_threads: int
    measured_seconds: float
    other_cores_busy: float
    """Mean number of cores that other processes used meanwhile."""
    direct_refusal: str
    """Why there are no direct reads; empty if there are."""
    reads: tuple[ReadRate, ...]
    engine_reads: tuple[EngineReadRate, ...]
    """Empty where there are no direct reads."""
    latency_seconds: Mapping[str, Estimate]
    """Of one 4 KiB read, by mode."""
    exponent_ratios: tuple[ExponentRatio, ...]
    codecs: tuple[CodecRates, ...]
    recombine_bytes_per_second: Mapping[int, Estimate]
    """By workers: BF16 bytes produced by all of them."""
    memory: tuple[MemoryRate, ...]
    execution: tuple[ExecutionTime, ...]
    fused: tuple[FusedTime, ...]
    """Of a folder whose codec has kernels on its packed form."""
    dispatch_seconds: Estimate | None
    """One small torch operation; None: left out for lack of time."""
    left_out: tuple[str, ...]
    """What did not fit into its share of the time."""
    notes: tuple[str, ...]
    """What a reader of the numbers should know."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; keys that are numbers become text."""
        value: dict[str, Any] = {VERSION_KEY: REPORT_VERSION, **asdict(self)}
        value["provenance"]["measured_at"] = self.provenance.measured_at.isoformat()
        plain: dict[str, Any] = _plain(value)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
