"""A machine whose every number is known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from zipmoe.planning.device import HostFingerprint
from zipmoe.profiling.disk_identity import DiskIdentity
from zipmoe.profiling.report import Provenance

HERE = Provenance(
    zipmoe_version="0.1.0",
    torch_version="2.9",
    instruction_set="avx2",
    libraries={"zstd": "zstd 1.5.7", "lz4": "lz4 1.10.0"},
    host=HostFingerprint("x86_64", "Fast CPU", 8, 32),
    disk=DiskIdentity("/dev/nvme0n1", "ext4", 10**12),
    pack_identity="f00-zstd-huf-2",
    measured_at=datetime(2026, 5, 1, 12, tzinfo=UTC),
)


def here(**changes: object) -> Provenance:
    """The known machine, with changes."""
    return replace(HERE, **changes)


@dataclass
class FakeClock:
    """Goes on only when told to."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeDisk:
    """Reads at ``bytes_per_second`` per read under way, up to ``deepest`` at a time, on a fake clock."""

    clock: FakeClock = field(default_factory=FakeClock)
    bytes_per_second: float = 1e9
    deepest: int = 4
    refusal: str = ""
    short_by: int = 0
    error_number: int = 0
    read_bytes: int = 0

    def open(self, paths: Sequence[str], mode: str, depth: int) -> FakeReader:
        return FakeReader(self, mode, depth)


@dataclass
class FakeEngineDisk:
    """The same for records through the engine's reader, deepest by backend."""

    clock: FakeClock = field(default_factory=FakeClock)
    bytes_per_second: float = 1e9
    deepest: Mapping[str, int] = field(default_factory=lambda: {"threads": 4, "uring": 8})
    error_number: int = 0
    checksums: set[bool] = field(default_factory=set)

    def open(self, paths: Sequence[str], backend: str, parallel: int) -> FakeEngineReader:
        return FakeEngineReader(self, backend, parallel)


@dataclass
class FakeEngineReader:
    disk: FakeEngineDisk
    backend: str
    parallel: int

    def read(
        self, places: Sequence[tuple[int, int]], length: int, memory: object, checksums: bool
    ) -> tuple[float, int, int]:
        self.disk.checksums.add(checksums)
        seconds = (
            len(places) * length / self.disk.bytes_per_second / min(self.parallel, self.disk.deepest[self.backend])
        )
        self.disk.clock.now += seconds
        return seconds, len(places) * length, self.disk.error_number


@dataclass
class FakeReader:
    disk: FakeDisk
    mode: str
    depth: int

    @property
    def fallback_reason(self) -> str:
        return "buffered reads were asked for" if self.mode == "buffered" else self.disk.refusal

    def read(self, places: Sequence[tuple[int, int]], block_bytes: int, memory: object) -> tuple[float, int, int]:
        count = len(places) * block_bytes
        rate = self.disk.bytes_per_second * min(self.depth, self.disk.deepest) / (2 if self.mode == "buffered" else 1)
        seconds = count / rate
        self.disk.clock.now += seconds
        self.disk.read_bytes += count
        return seconds, count - self.disk.short_by, self.disk.error_number
