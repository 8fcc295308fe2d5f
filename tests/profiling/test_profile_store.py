"""Kept profiles: where, and when they are not used and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from profiling_machine import HERE, here

from zipmoe.errors import InvalidArgumentError, NotEnoughDiskError
from zipmoe.planning.device import DeviceProfileError, HostFingerprint
from zipmoe.planning.step_costs import DenseBytes, step_costs
from zipmoe.profiling import device_constants
from zipmoe.profiling.device_constants import device_profile
from zipmoe.profiling.disk_identity import DiskIdentity
from zipmoe.profiling.estimate import Estimate
from zipmoe.profiling.fused_probes import FUSED_TOKENS, FUSED_TOKENS_KNOWN
from zipmoe.profiling.profile_store import (
    check_destination,
    find_profile,
    load_profile,
    look_up_profile,
    profile_path,
    read_provenance,
    report_path,
    save_profile,
)
from zipmoe.profiling.report import (
    CodecRates,
    EngineReadRate,
    ExecutionTime,
    ExpertShape,
    ExponentRatio,
    FusedTime,
    MemoryRate,
    ProfileReport,
    ReadRate,
)
from zipmoe.store.packed_folder import PackedFolder

MIB = 1 << 20


def _sure(value: float) -> Estimate:
    return Estimate(value, value, value, 5)


RECORD_RATES = {1: 1e9, 2: 2e9, 4: 3.99e9, 8: 4e9, 16: 3e9}
REPORT = ProfileReport(
    folder="/models/packed",
    provenance=HERE,
    expert=ExpertShape((("up", 100, 50), ("down", 50, 100)), 20000, 14000, 64),
    workers=8,
    torch_threads=8,
    measured_seconds=40.0,
    other_cores_busy=0.0,
    direct_refusal="",
    reads=tuple(
        ReadRate(mode, block, depth, False, _sure(rate * depth), 10 * block)
        for mode, rate in (("direct", 1e9), ("buffered", 1e8))
        for block, depths in ((MIB, (1, 2, 4, 8)), (16 * MIB, (1, 2)))
        for depth in depths
    ),
    engine_reads=tuple(EngineReadRate("threads", number, _sure(rate)) for number, rate in RECORD_RATES.items()),
    latency_seconds={"direct": _sure(80e-6), "buffered": _sure(90e-6)},
    exponent_ratios=(ExponentRatio("up", 0.33, 0.32, 0.34),),
    codecs=(
        CodecRates(
            "zstd",
            "zstd",
            "huf",
            2,
            True,
            True,
            0.33,
            2500,
            {1: _sure(2e9), 8: _sure(9e9)},
            {8: _sure(8e9)},
            _sure(5e9),
        ),
        CodecRates("fx3", "fx3", None, 1, False, False, 0.41, 0, {}, {1: _sure(1e10), 8: _sure(3e10)}),
    ),
    recombine_bytes_per_second={1: _sure(5e9), 8: _sure(2e10)},
    memory=(MemoryRate("read", 1, _sure(2e10)), MemoryRate("read", 8, _sure(5e10)), MemoryRate("copy", 8, _sure(2e10))),
    execution=(ExecutionTime(1, _sure(1e-3)), ExecutionTime(2, _sure(1e-3)), ExecutionTime(4, _sure(3e-3))),
    fused=(),
    dispatch_seconds=_sure(4e-6),
    left_out=(),
    notes=(),
)


@pytest.fixture
def kept(cache_folder: Path) -> Path:
    path = profile_path(HERE)
    save_profile(REPORT, path)
    return path


@pytest.mark.parametrize("which", ["profile", "report"])
def test_a_full_disk_leaves_what_was_there(kept: Path, which: str, full_disk: Callable[[Path], None]) -> None:
    before = {path.name: path.read_bytes() for path in kept.parent.iterdir()}
    full_disk(kept if which == "profile" else report_path(kept))
    later = replace(REPORT, provenance=here(measured_at=HERE.measured_at + timedelta(hours=1)))
    with pytest.raises(NotEnoughDiskError, match=f"{kept.name}' cannot be written: the disk is full"):
        save_profile(later, kept)
    assert {path.name: path.read_bytes() for path in kept.parent.iterdir()} == before
    assert load_profile(kept, HERE).doubts == ()


def test_constants_come_from_the_right_numbers() -> None:
    profile = device_profile(REPORT)
    assert profile.io_bytes_per_second == {MIB: 4e9, 16 * MIB: 2e9}  # the engine's depth, or the nearest below
    assert profile.best_concurrent_reads == {"threads": 4}
    assert profile.io_latency_seconds == 80e-6
    assert profile.decompress_bytes_per_second == {"zstd": 2e9}  # one worker
    assert profile.decode_bytes_per_second == {"zstd": 5e9, "fx3": 3e10}  # all workers, between products if measured
    assert profile.shared_cores  # what was measured is a processor
    assert profile.dispatch_seconds == 4e-6
    assert profile.exponent_ratio == {"zstd": 0.33, "fx3": 0.41}
    assert profile.recombine_bytes_per_second == 5e9
    assert profile.memory_bytes_per_second == 5e10
    assert profile.execute_seconds_by_tokens == pytest.approx((1e-3, 1e-3, 2e-3, 3e-3))
    assert profile.execute_expert_bytes == 20000
    assert (profile.host, profile.measured_at, profile.workers) == (HERE.host, HERE.measured_at, 8)


def test_rounds_that_were_far_apart_choose_no_number_of_reads() -> None:
    def with_spread(spread: float) -> ProfileReport:
        def apart(rate: Estimate) -> Estimate:
            return replace(rate, low=rate.median * (1 - spread / 2), high=rate.median * (1 + spread / 2))

        reads = tuple(replace(read, bytes_per_second=apart(read.bytes_per_second)) for read in REPORT.engine_reads)
        return replace(REPORT, engine_reads=reads)

    assert device_profile(with_spread(0.15)).best_concurrent_reads == {"threads": 4}
    assert device_profile(with_spread(0.25)).best_concurrent_reads == {}


FUSED = replace(
    REPORT,
    codecs=(replace(REPORT.codecs[1], of_folder=True),),
    fused=tuple(
        FusedTime(form, tokens, expert_bytes, _sure(seconds * tokens))
        for tokens in reversed(FUSED_TOKENS)
        for form, expert_bytes, seconds in (("fx3", 14000, 1e-6), ("BF16", 20000, 2e-6))
    ),
)
"""The same of a folder whose codec has kernels on its packed form."""


def test_rates_of_packed_weights() -> None:
    profile = device_profile(FUSED)
    every = range(1, FUSED_TOKENS_KNOWN + 1)  # those that were not measured lie between those that were, or beyond
    assert profile.fused_bytes_per_second.keys() == {"fx3"}
    assert profile.fused_bytes_per_second["fx3"] == pytest.approx([14e9 / tokens for tokens in every])
    assert profile.unpacked_bytes_per_second == pytest.approx([1e10 / tokens for tokens in every])
    assert device_profile(REPORT).fused_bytes_per_second == {}
    for left_out in (0, 1):  # two tokens, in either form
        kept = [time for time in FUSED.fused if (time.tokens, time.form) != (2, ("fx3", "BF16")[left_out])]
        with pytest.raises(InvalidArgumentError, match="too short to measure packed weights with 2 tokens"):
            device_profile(replace(FUSED, fused=tuple(kept)))


def test_kernels_without_a_limit_of_rows_are_forecast_beyond_those_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AVX2 a step of 100 tokens computes with packed weights, and is not taken to decode first."""
    known = max(FUSED_TOKENS) + 40
    monkeypatch.setattr(device_constants, "FUSED_TOKENS_KNOWN", known)
    profile = device_profile(FUSED)
    assert profile.fused_bytes_per_second["fx3"] == pytest.approx([14e9 / tokens for tokens in range(1, known + 1)])
    for tokens, decodes in ((known, False), (known + 1, True)):
        costs = step_costs(profile, "fx3", DenseBytes(bfloat16=10**9, packed=7 * 10**8), 4, 8.0, tokens)
        assert (costs.decode_seconds > 0) == decodes
    monkeypatch.setattr(device_constants, "FUSED_TOKENS_KNOWN", max(FUSED_TOKENS))
    assert len(device_profile(FUSED).unpacked_bytes_per_second) == max(FUSED_TOKENS)


def test_buffered_rates_where_there_are_no_direct_ones() -> None:
    profile = device_profile(replace(REPORT, direct_refusal="tmpfs"))
    assert profile.io_bytes_per_second == {MIB: 4e8, 16 * MIB: 2e8}
    assert profile.io_latency_seconds == 90e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reads": ()}, "disk rates"),
        ({"latency_seconds": {}}, "latency"),
        ({"recombine_bytes_per_second": {}}, "recombination"),
        ({"execution": ()}, "execution"),
        ({"dispatch_seconds": None}, "a torch operation"),
        ({"memory": ()}, "memory"),
        ({"codecs": (replace(REPORT.codecs[0], decompress_bytes_per_second={}),)}, "decompression of zstd"),
    ],
)
def test_too_little_time_is_said(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"too short to measure {message}") as caught:
        device_profile(replace(REPORT, **change))
    assert "--seconds" in str(caught.value.hint)


def test_files_lie_in_the_users_cache(kept: Path, cache_folder: Path) -> None:
    assert kept.parent == cache_folder / "zipmoe/profiles"
    assert sorted(kept.parent.iterdir()) == sorted([kept, report_path(kept)])
    assert kept.name.startswith(f"{HERE.host.digest}-{HERE.disk.digest}-")
    assert json.loads(report_path(kept).read_text()) == REPORT.to_json()


def test_relative_cache_folders_are_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert profile_path(HERE).is_relative_to(tmp_path / ".cache/zipmoe/profiles")


def test_a_fresh_profile_of_this_machine_is_used(kept: Path, zstd_folder: PackedFolder) -> None:
    said: list[str] = []
    found = find_profile(zstd_folder, here=here(measured_at=HERE.measured_at + timedelta(days=29)), report=said.append)
    assert found == device_profile(REPORT)
    assert said == []
    assert read_provenance(report_path(kept)) == HERE


def test_none_was_ever_measured(zstd_folder: PackedFolder) -> None:
    said: list[str] = []
    assert find_profile(zstd_folder, here=HERE, report=said.append) is None
    assert find_profile(zstd_folder, report=said.append) is None  # this machine, really
    assert said == []
    assert look_up_profile(zstd_folder, here=HERE) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measured_at": HERE.measured_at + timedelta(days=31)}, "it is 31 days old"),
        ({"measured_at": HERE.measured_at - timedelta(days=1)}, "from the future"),
        ({"zipmoe_version": "0.2.0"}, "by ZipMoE 0.1.0, but this is 0.2.0"),
        (
            {"libraries": {"zstd": "zstd 1.5.8", "lz4": "lz4 1.10.0"}},
            "with zstd 1.5.7 for zstd, but this build has zstd",
        ),
        ({"libraries": {"zstd": "zstd 1.5.7"}}, "with lz4 1.10.0 for lz4, but this build has no library"),
        ({"torch_version": "3.0"}, "with torch 2.9, but this is 3.0"),
        ({"instruction_set": "scalar"}, "with avx2 kernels, but now scalar ones run"),
        (
            {"host": replace(HERE.host, processor="Slow CPU")},
            "on Fast CPU (x86_64), 8 cores, 32 GiB, but this is Slow CPU",
        ),
        ({"host": replace(HERE.host, cores=2)}, "but this is Fast CPU (x86_64), 2 cores"),
        (
            {"disk": DiskIdentity("/dev/sda", "xfs", 10**12)},
            "on the disk /dev/nvme0n1 (ext4, 1000 GB), but the folder is",
        ),
    ],
)
def test_stale_and_foreign_profiles_are_refused_in_one_line(
    kept: Path, zstd_folder: PackedFolder, changes: dict[str, object], message: str
) -> None:
    said: list[str] = []
    assert find_profile(zstd_folder, here=here(**changes), report=said.append) is None
    (line,) = said
    assert message in line
    assert "\n" not in line
    assert line.startswith(f"note: the kept profile {str(kept)!r} is not used: ")
    assert line.endswith(f"measure again: zipmoe profile {zstd_folder.path}")


def test_another_folders_profile_is_not_looked_at(kept: Path, zstd_folder: PackedFolder) -> None:
    assert look_up_profile(zstd_folder, here=here(pack_identity="another")) is None
    doubts = load_profile(kept, here(pack_identity="another")).doubts
    assert doubts == ("it was measured with another packed folder",)


def test_this_machines_profile_wins_over_others(kept: Path, zstd_folder: PackedFolder) -> None:
    other = here(host=HostFingerprint("x86_64", "Other CPU", 4, 8))
    save_profile(replace(REPORT, provenance=other), profile_path(other))
    for origin in (HERE, other):
        found = look_up_profile(zstd_folder, here=origin)
        assert found is not None
        assert (found.path, found.doubts) == (profile_path(origin), ())


def test_default_report_goes_to_standard_error(
    kept: Path, zstd_folder: PackedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_profile(zstd_folder, here=here(zipmoe_version="9")) is None
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("content", ["", "{", "[]", '{"zipmoe_device_profile": 99}', '{"zipmoe_device_profile": 1}'])
def test_a_damaged_profile_is_a_doubt_and_no_crash(kept: Path, zstd_folder: PackedFolder, content: str) -> None:
    kept.write_text(content)
    said: list[str] = []
    assert find_profile(zstd_folder, here=HERE, report=said.append) is None
    assert len(said) == 1
    assert str(kept) in said[0]
    with pytest.raises(DeviceProfileError):
        load_profile(kept, HERE)


@pytest.mark.parametrize(
    "content", [None, "", "[]", "{}", '{"zipmoe_profile_report": 99}', '{"zipmoe_profile_report": 1, "provenance": {}}']
)
def test_without_its_report_a_profile_is_not_trusted(
    kept: Path, zstd_folder: PackedFolder, content: str | None
) -> None:
    if content is None:
        report_path(kept).unlink()
    else:
        report_path(kept).write_text(content)
    said: list[str] = []
    assert find_profile(zstd_folder, here=HERE, report=said.append) is None
    assert "what it belongs to is unknown" in said[0]


def test_a_report_of_another_measurement_is_noticed(kept: Path, zstd_folder: PackedFolder) -> None:
    later = here(measured_at=HERE.measured_at + timedelta(hours=1))
    report_path(kept).write_text(json.dumps(replace(REPORT, provenance=later).to_json()))
    (doubt,) = load_profile(kept, HERE).doubts
    assert "belongs to another measurement" in doubt


def test_destinations_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    folder.mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(folder)
    for path, message in [
        (folder / "profile.json", "nothing is written"),
        (folder / "new/profile.json", "nothing is written"),
        (tmp_path / "link/profile.json", "nothing is written"),
        (tmp_path, "is a folder"),
        (tmp_path / "file/profile.json", "cannot be written"),
        (Path("/proc/profile.json"), "cannot be written: '/proc'"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message) as caught:
            check_destination(path, folder)
        assert "--output" in str(caught.value.hint)
    check_destination(tmp_path / "new/deep/profile.json", folder)
    assert not (tmp_path / "new").exists()
