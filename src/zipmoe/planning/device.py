"""The device profile: what `zipmoe profile` measured on a machine, for planner and simulator.

Every rate says what its bytes are. A profile belongs to the machine that it was measured on; `DeviceProfile.doubts`
tells when it is used on another one or is old.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from zipmoe.errors import InvalidArgumentError
from zipmoe.store.durable_files import write_json

PROFILE_VERSION = 5
DEFAULT_MAXIMUM_AGE = timedelta(days=30)
_VERSION_KEY = "zipmoe_device_profile"
_MEASURE_HINT = "measure this machine: zipmoe profile"
_GIB = 1 << 30


class DeviceProfileError(InvalidArgumentError):
    """A file is not a device profile, or its values are impossible."""


@dataclass(frozen=True)
class HostFingerprint:
    """What makes measurements of one machine useless on another."""

    machine: str
    """Architecture, e.g. ``x86_64``."""
    processor: str
    cores: int
    """Logical cores that this process may use: a smaller share of a machine is another machine."""
    memory_gib: int

    @property
    def digest(self) -> str:
        """Short name, for messages and file names."""
        text = "\0".join((self.machine, self.processor, str(self.cores), str(self.memory_gib)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def describe(self) -> str:
        """For messages."""
        return f"{self.processor} ({self.machine}), {self.cores} cores, {self.memory_gib} GiB"


def host_fingerprint(root: Path = Path("/")) -> HostFingerprint:
    """Fingerprint of this machine.

    Args:
        root: directory that holds ``proc`` (tests pass a directory of their own).
    """
    cores = len(os.sched_getaffinity(0))
    return HostFingerprint(
        platform.machine(),
        _proc_field(root / "proc/cpuinfo", ("model name", "Model", "Hardware")) or platform.processor() or "unknown",
        cores,
        round(int((_proc_field(root / "proc/meminfo", ("MemTotal",)) or "0").split()[0]) * 1024 / _GIB),
    )


def _proc_field(path: Path, names: tuple[str, ...]) -> str | None:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names and value.strip():
            return value.strip()
    return None


@dataclass(frozen=True)
class DeviceProfile:
    """Measured constants of one machine (and of experts of one size)."""

    name: str
    """For people: a host name, or ``jetson-orin``."""
    host: HostFingerprint
    measured_at: datetime
    """With time zone."""
    io_bytes_per_second: Mapping[int, float]
    """Rate of back-to-back reads by their block size in bytes, each request's own overhead included."""
    io_latency_seconds: float
    """From a request on an idle disk to its first byte; paid once by a layer that reads at all."""
    decompress_bytes_per_second: Mapping[str, float]
    """Per codec with E-chunks: raw exponent bytes that one worker produces per second."""
    recombine_bytes_per_second: float
    """BF16 bytes per second that come out of exponents and SM-chunk, on the resource that also executes."""
    decode_bytes_per_second: Mapping[str, float]
    """Per codec: BF16 bytes per second that all workers together produce from the packed form, recombination included.
    A codec without E-chunks that is missing both here and in ``fused_bytes_per_second`` computes from its packed form,
    and the execution times hold for it as they are."""
    exponent_ratio: Mapping[str, float]
    """rho per codec: compressed bytes of the exponents per raw byte."""
    execute_seconds_by_tokens: tuple[float, ...]
    """Entry t-1: seconds to execute one expert, in BF16 and in memory, on t tokens."""
    execute_expert_bytes: int
    """BF16 bytes of the expert that this was measured with; experts of other sizes are scaled in proportion."""
    workers: int
    """L: decompression workers."""
    memory_bytes_per_second: float
    """Sequential read bandwidth of memory."""
    shared_cores: bool = False
    """Whether decoding and execution are done by the same cores, one after the other (a machine without a device):
    only the disk works beside them. If not, decompression has workers of its own."""
    dispatch_seconds: float = 0.0
    """One small torch operation, called from Python."""
    fused_bytes_per_second: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Per codec with kernels on its packed form: packed bytes per second that a product goes through on all cores.
    Entry t-1: on t tokens, up to as many as the kernels are used for; on more, a product decodes first."""
    unpacked_bytes_per_second: tuple[float, ...] = ()
    """The same kernels on BF16, as the mode ``fast`` multiplies experts of the pool F; known if the above are."""
    best_concurrent_reads: Mapping[str, int] = field(default_factory=dict)
    """Per backend of the engine (``"threads"``, ``"uring"``): the fewest reads at a time that get experts from the disk
    as fast as it can."""

    def __post_init__(self) -> None:
        rates = [
            *self.io_bytes_per_second.values(),
            *self.decompress_bytes_per_second.values(),
            *self.decode_bytes_per_second.values(),
            *self.exponent_ratio.values(),
            *self.execute_seconds_by_tokens,
            *(rate for rates in self.fused_bytes_per_second.values() for rate in rates),
            *self.unpacked_bytes_per_second,
            self.recombine_bytes_per_second,
            self.memory_bytes_per_second,
        ]
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise DeviceProfileError(f"device profile {self.name!r}: rates and times must be positive")
        if not (math.isfinite(self.io_latency_seconds) and self.io_latency_seconds >= 0):
            raise DeviceProfileError(f"device profile {self.name!r}: a latency cannot be {self.io_latency_seconds}")
        if not (math.isfinite(self.dispatch_seconds) and self.dispatch_seconds >= 0):
            raise DeviceProfileError(f"device profile {self.name!r}: a call cannot take {self.dispatch_seconds} s")
        if not self.io_bytes_per_second or min(self.io_bytes_per_second) <= 0:
            raise DeviceProfileError(f"device profile {self.name!r}: no disk rate for any block size")
        if not self.execute_seconds_by_tokens or self.execute_expert_bytes <= 0:
            raise DeviceProfileError(f"device profile {self.name!r}: no execution times")
        by_tokens = {len(rates) for rates in self.fused_bytes_per_second.values()}
        if 0 in by_tokens or (by_tokens and by_tokens != {len(self.unpacked_bytes_per_second)}):
            raise DeviceProfileError(
                f"device profile {self.name!r}: packed and BF16 weights were multiplied with other numbers of tokens"
            )
        if not all(number >= 1 for number in self.best_concurrent_reads.values()):
            raise DeviceProfileError(f"device profile {self.name!r}: less than one read at a time")
        if self.workers < 1:
            raise DeviceProfileError(f"device profile {self.name!r}: {self.workers} workers")
        if self.measured_at.tzinfo is None:
            raise DeviceProfileError(f"device profile {self.name!r}: the time of measurement has no time zone")

    def read_seconds(self, read_bytes: int) -> float:
        """Seconds that a read of this length occupies the disk for, its rate interpolated over log block size."""
        if read_bytes == 0:
            return 0.0
        blocks = sorted(self.io_bytes_per_second)
        rates = [self.io_bytes_per_second[block] for block in blocks]
        return read_bytes / float(np.interp(math.log(read_bytes), np.log(blocks), rates))

    def execute_seconds(self, bfloat16_bytes: float, tokens: int = 1) -> float:
        """Seconds to multiply so many tokens with BF16 matrices of these bytes, in proportion to the expert's."""
        known = self.execute_seconds_by_tokens
        return known[min(tokens, len(known)) - 1] * bfloat16_bytes / self.execute_expert_bytes

    def doubts(
        self,
        now: datetime | None = None,
        host: HostFingerprint | None = None,
        maximum_age: timedelta = DEFAULT_MAXIMUM_AGE,
    ) -> list[str]:
        """Reasons not to trust this profile here and now, as sentences; none if it is this machine's and fresh."""
        now = datetime.now(UTC) if now is None else now
        host = host_fingerprint() if host is None else host
        doubts = []
        if self.host != host:
            doubts.append(f"it was measured on {self.host.describe()}, but this is {host.describe()}")
        age = now - self.measured_at
        if age > maximum_age:
            doubts.append(f"it is {age.days} days old")
        if age < -timedelta(minutes=5):
            doubts.append(f"it claims to come from the future ({self.measured_at.isoformat()})")
        return doubts

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what ``load`` reads."""
        value = asdict(self)
        value["measured_at"] = self.measured_at.isoformat()
        value["io_bytes_per_second"] = {str(block): rate for block, rate in self.io_bytes_per_second.items()}
        return {_VERSION_KEY: PROFILE_VERSION, **value}

    def save(self, path: Path) -> None:
        """Write the profile as JSON; the file is complete or not there."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> DeviceProfile:
        """Read a profile.

        Raises:
            DeviceProfileError: unreadable, of another version, with missing, unknown or impossible values.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DeviceProfileError(
                f"{path} cannot be read as a device profile: {error}", hint=_MEASURE_HINT
            ) from error
        version = value.pop(_VERSION_KEY, None) if isinstance(value, dict) else None
        if version is None:
            raise DeviceProfileError(f"{path} is not a device profile", hint=_MEASURE_HINT)
        if version != PROFILE_VERSION:
            raise DeviceProfileError(
                f"{path} is a device profile of version {version}, this ZipMoE has version {PROFILE_VERSION}",
                hint=_MEASURE_HINT,
            )
        try:
            return cls(**_parsed(value))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DeviceProfileError(f"{path} is damaged: {error}", hint=_MEASURE_HINT) from error
        except DeviceProfileError as error:
            raise DeviceProfileError(f"{path}: {error}", hint=_MEASURE_HINT) from error


def _parsed(value: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in fields(DeviceProfile)}
    if value.keys() != names:
        different = ", ".join(sorted(value.keys() ^ names))
        raise ValueError(f"missing or unknown keys: {different}")
    parsed = dict(value)
    parsed["host"] = HostFingerprint(**value["host"])
    parsed["measured_at"] = datetime.fromisoformat(value["measured_at"])
    parsed["io_bytes_per_second"] = {int(block): float(rate) for block, rate in value["io_bytes_per_second"].items()}
    for name in ("decompress_bytes_per_second", "decode_bytes_per_second", "exponent_ratio"):
        parsed[name] = {codec: float(rate) for codec, rate in value[name].items()}
    for name in ("io_latency_seconds", "recombine_bytes_per_second", "memory_bytes_per_second", "dispatch_seconds"):
        parsed[name] = float(value[name])
    for name in ("execute_expert_bytes", "workers"):
        if not isinstance(value[name], int):
            raise ValueError(f"{name} is not an integer")
    if not isinstance(value["shared_cores"], bool):
        raise ValueError("shared_cores is neither true nor false")
    for name in ("execute_seconds_by_tokens", "unpacked_bytes_per_second"):
        parsed[name] = tuple(float(entry) for entry in value[name])
    numbers = value["best_concurrent_reads"]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers.values()):
        raise ValueError("best_concurrent_reads are not integers")
    parsed["fused_bytes_per_second"] = {
        codec: tuple(float(rate) for rate in rates) for codec, rates in value["fused_bytes_per_second"].items()
    }
    return parsed
