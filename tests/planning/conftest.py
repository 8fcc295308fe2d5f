"""Where the published routing traces lie, and a machine to plan for."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from zipmoe.planning.device import DeviceProfile, HostFingerprint


@pytest.fixture(scope="session")
def published_traces() -> Path:
    """``shared/traces`` next to the repository, or where ZIPMOE_TRACES says."""
    beside = Path(__file__).resolve().parents[2].parent / "shared/traces"
    folder = Path(os.environ.get("ZIPMOE_TRACES", beside))
    if not folder.is_dir():
        pytest.skip(f"no published routing traces at {folder}")
    return folder


@pytest.fixture
def profile() -> DeviceProfile:
    """Round numbers, not a real machine."""
    return DeviceProfile(
        name="round numbers",
        host=HostFingerprint("x86_64", "Example CPU", 8, 16),
        measured_at=datetime(2026, 5, 1, 12, 0, tzinfo=UTC),
        io_bytes_per_second={65536: 1e9, 1 << 20: 2e9},
        io_latency_seconds=1e-4,
        decompress_bytes_per_second={"zstd": 1e9},
        recombine_bytes_per_second=8e9,
        decode_bytes_per_second={"fx3": 4e9},
        exponent_ratio={"zstd": 0.34},
        execute_seconds_by_tokens=(1e-3, 1.5e-3, 2.5e-3),
        execute_expert_bytes=6_000_000,
        workers=6,
        memory_bytes_per_second=5e10,
    )


@pytest.fixture
def fused_profile(profile: DeviceProfile) -> DeviceProfile:
    """The same machine, measured with kernels on packed weights."""
    return replace(
        profile,
        fused_bytes_per_second={"fx3": (14e9, 12e9)},
        unpacked_bytes_per_second=(16e9, 15e9),
        dispatch_seconds=1e-6,
    )
