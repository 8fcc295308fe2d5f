from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from zipmoe.planning.device import DeviceProfile, DeviceProfileError, HostFingerprint, host_fingerprint

NOW = datetime(2026, 5, 11, 12, 0, tzinfo=UTC)


def test_round_trip(profile: DeviceProfile, tmp_path: Path) -> None:
    fused = dataclasses.replace(
        profile, fused_bytes_per_second={"fx3": (2e9, 1e9)}, unpacked_bytes_per_second=(3e9, 2e9)
    )
    for each in (profile, fused):
        each.save(tmp_path / "profile.json")
        assert DeviceProfile.load(tmp_path / "profile.json") == each


def test_reading_time_follows_the_block_size(profile: DeviceProfile) -> None:
    assert profile.read_seconds(0) == 0
    assert profile.read_seconds(65536) == pytest.approx(65536 / 1e9)
    assert profile.read_seconds(1000) == pytest.approx(1000 / 1e9)
    assert profile.read_seconds(1 << 18) == pytest.approx((1 << 18) / 1.5e9)  # half way in log size
    assert profile.read_seconds(1 << 30) == pytest.approx((1 << 30) / 2e9)


def test_own_and_fresh_profile_is_trusted(profile: DeviceProfile) -> None:
    assert profile.doubts(NOW, profile.host) == []


def test_foreign_and_stale_profiles_are_noticed(profile: DeviceProfile) -> None:
    other = dataclasses.replace(profile.host, cores=2)
    assert profile.doubts(NOW, other) == [
        "it was measured on Example CPU (x86_64), 8 cores, 16 GiB, but this is Example CPU (x86_64), 2 cores, 16 GiB"
    ]
    assert profile.doubts(NOW + timedelta(days=40), profile.host) == ["it is 50 days old"]
    assert profile.doubts(NOW, profile.host, maximum_age=timedelta(days=9)) == ["it is 10 days old"]
    assert "future" in profile.doubts(NOW - timedelta(days=20), profile.host)[0]
    assert len(profile.doubts(NOW + timedelta(days=40), other)) == 2


def test_fingerprint(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Example CPU @ 3 GHz\n")
    (proc / "meminfo").write_text("MemTotal:       16384000 kB\nMemFree: 1 kB\n")
    found = host_fingerprint(tmp_path)
    assert found.processor == "Example CPU @ 3 GHz"
    assert found.memory_gib == 16
    assert found.digest != dataclasses.replace(found, memory_gib=32).digest
    assert host_fingerprint() == host_fingerprint()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zipmoe_device_profile": 4}, "is a device profile of version 4, this ZipMoE has version 5"),
        ({"best_concurrent_reads": {"threads": 0}}, "less than one read at a time"),
        ({"best_concurrent_reads": {"threads": 2.5}}, "best_concurrent_reads are not integers"),
        ({"zipmoe_device_profile": None}, "is not a device profile"),
        ({"fused_bytes_per_second": {"fx3": [1e9, -1]}}, "must be positive"),
        ({"fused_bytes_per_second": {"fx3": [1e9, 1e9]}}, "other numbers of tokens"),
        ({"fused_bytes_per_second": {"fx3": []}, "unpacked_bytes_per_second": []}, "other numbers of tokens"),
        ({"unpacked_bytes_per_second": 1e9}, "damaged"),
        ({"shared_cores": "yes"}, "shared_cores is neither true nor false"),
        ({"dispatch_seconds": -1}, "a call cannot take -1"),
        ({"workers": 0}, "0 workers"),
        ({"workers": 1.5}, "workers is not an integer"),
        ({"io_bytes_per_second": {}}, "no disk rate"),
        ({"io_bytes_per_second": {"65536": -1}}, "must be positive"),
        ({"recombine_bytes_per_second": float("nan")}, "must be positive"),
        ({"io_latency_seconds": -1}, "latency"),
        ({"execute_seconds_by_tokens": []}, "no execution times"),
        ({"measured_at": "yesterday"}, "damaged"),
        ({"measured_at": "2026-05-01T12:00:00"}, "no time zone"),
        ({"host": {"machine": "x"}}, "damaged"),
        ({"surprise": 1}, "missing or unknown keys: surprise"),
    ],
)
def test_impossible_profiles_are_refused(
    profile: DeviceProfile, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DeviceProfileError, match=message) as caught:
        DeviceProfile.load(path)
    assert caught.value.hint is not None
    assert str(path) in str(caught.value)


def test_files_that_are_no_profiles(tmp_path: Path) -> None:
    with pytest.raises(DeviceProfileError, match="cannot be read"):
        DeviceProfile.load(tmp_path / "nothing.json")
    (tmp_path / "text.json").write_text("hello")
    with pytest.raises(DeviceProfileError, match="cannot be read"):
        DeviceProfile.load(tmp_path / "text.json")


def test_fingerprint_is_a_value() -> None:
    assert HostFingerprint("a", "b", 1, 2) == HostFingerprint("a", "b", 1, 2)
