"""One short run of everything: structure and units, not speed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
from profiling_machine import FakeDisk, FakeEngineDisk

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.layer_costs import LayerCosts, TensorBytes
from zipmoe.planning.partition import CodecCapabilities
from zipmoe.profiling.device_constants import best_concurrent_reads, device_profile
from zipmoe.profiling.execution_probes import TOKENS
from zipmoe.profiling.fused_probes import FUSED_TOKENS, FUSED_TOKENS_KNOWN
from zipmoe.profiling.measure import SHARES, measure
from zipmoe.profiling.profile_store import load_profile, save_profile
from zipmoe.profiling.report import ProfileReport
from zipmoe.store.packed_folder import PackedFolder

SECONDS = 1.0


def _slow_clock() -> float:
    """Gives everything five times the time, so that a busy machine does not leave things out."""
    return perf_counter() / 5


def _contents(folder: Path) -> dict[str, tuple[int, int, int]]:
    status = {path: path.stat() for path in (folder, *folder.rglob("*"))}
    return {str(path): (s.st_size, s.st_mtime_ns, s.st_ino) for path, s in status.items()}


@pytest.fixture(scope="module")
def measured(zstd_packed: Path) -> tuple[ProfileReport, list[tuple[str, float]], bool]:
    folder = PackedFolder.open(zstd_packed)
    before = _contents(zstd_packed)
    seen: list[tuple[str, float]] = []
    report = measure(folder, SECONDS, progress=lambda *seen_now: seen.append(seen_now), clock=_slow_clock)
    return report, seen, _contents(zstd_packed) == before


def test_nothing_is_written_into_the_folder(measured: tuple[ProfileReport, object, bool]) -> None:
    assert measured[2]


def test_progress_goes_forward_and_stays_below_1(
    measured: tuple[ProfileReport, list[tuple[str, float]], bool],
) -> None:
    fractions = [fraction for _, fraction in measured[1]]
    assert fractions == sorted(fractions)
    assert 0 <= fractions[0] <= fractions[-1] <= 1
    assert {"preparing", "memory read on 1 core"} <= {label for label, _ in measured[1]}


def test_shares_are_all_of_the_time() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)


def test_report_is_complete(measured: tuple[ProfileReport, object, bool]) -> None:
    report = measured[0]
    assert {read.mode for read in report.reads} >= {"buffered"}
    assert any(read.of_record for read in report.reads)
    backends = {read.backend for read in report.engine_reads}
    assert bool(backends) == (report.direct_refusal == "")
    assert backends <= {"threads", "uring"}
    assert device_profile(report).best_concurrent_reads.keys() <= backends
    assert all(read.bytes_read >= read.depth * read.block_bytes for read in report.reads)
    assert all(read.bytes_read % read.block_bytes == 0 for read in report.reads)
    assert {codec.key for codec in report.codecs if codec.of_folder} == {"zstd"}
    for codec in report.codecs:
        assert bool(codec.shard_bytes) == codec.separable
        assert bool(codec.decompress_bytes_per_second) == codec.separable
        assert codec.decode_bytes_per_second.keys() == report.recombine_bytes_per_second.keys()
    assert [time.tokens for time in report.execution] == list(TOKENS)
    assert "read" in {rate.step for rate in report.memory}
    assert report.expert.experts == 12
    assert report.fused == ()  # zstd has no kernels on its packed form
    assert report.expert.bfloat16_bytes == sum(2 * rows * columns for _, rows, columns in report.expert.matrices)


def test_every_number_is_positive_and_lies_between_its_quartiles(
    measured: tuple[ProfileReport, object, bool],
) -> None:
    found = 0

    def walk(value: object) -> None:
        nonlocal found
        if isinstance(value, dict) and value.keys() == {"median", "low", "high", "rounds"}:
            assert 0 < value["low"] <= value["median"] <= value["high"]
            assert value["rounds"] >= 1
            found += 1
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(measured[0].to_json())
    assert found > 50


def test_report_is_plain_json_that_survives_a_round_trip(measured: tuple[ProfileReport, object, bool]) -> None:
    value = measured[0].to_json()
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["zipmoe_profile_report"] == 4
    assert value["provenance"]["measured_at"].endswith("+00:00")


def test_device_profile_of_the_report(measured: tuple[ProfileReport, object, bool], tmp_path: Path) -> None:
    report = measured[0]
    profile = save_profile(report, tmp_path / "kept/profile.json")
    assert DeviceProfile.load(tmp_path / "kept/profile.json") == profile
    assert load_profile(tmp_path / "kept/profile.json", report.provenance).doubts == ()
    assert len(profile.execute_seconds_by_tokens) == TOKENS[-1]
    for time in report.execution:
        assert profile.execute_seconds_by_tokens[time.tokens - 1] == pytest.approx(time.seconds.median)
    assert profile.decompress_bytes_per_second.keys() == {c.key for c in report.codecs if c.separable}
    assert profile.decode_bytes_per_second.keys() == {c.key for c in report.codecs}
    assert profile.dispatch_seconds > 0
    assert set(profile.io_bytes_per_second) == {read.block_bytes for read in report.reads}
    assert profile.workers == report.workers
    assert profile.exponent_ratio["zstd"] == pytest.approx(
        next(codec.exponent_ratio for codec in report.codecs if codec.of_folder)
    )


def test_the_planner_can_use_it(measured: tuple[ProfileReport, object, bool], zstd_folder: PackedFolder) -> None:
    record = zstd_folder.manifest.expert_groups[0].records[0]
    costs = LayerCosts.from_profile(
        device_profile(measured[0]), "zstd", CodecCapabilities(True, False), TensorBytes.of_record(record), 2
    )
    assert costs.shards == 2
    assert costs.decompress_seconds == (0.0, 0.0)  # the cores that execute do it
    assert min(costs.recombine_seconds) > 0


def test_a_fused_codec_and_a_known_disk(fx3_folder: PackedFolder) -> None:
    disk = FakeDisk(bytes_per_second=2e9, deepest=2, refusal="the file system refuses direct I/O: Invalid argument")
    report = measure(fx3_folder, SECONDS, clock=_slow_clock, open_reader=disk.open)
    assert report.engine_reads == ()
    assert device_profile(report).best_concurrent_reads == {}
    assert {read.mode for read in report.reads} == {"buffered"}
    assert any("no direct reads here (the file system refuses" in note for note in report.notes)
    # The real clock sees no time pass on the fake disk, so only rates are known, not how many rounds there were.
    for read in report.reads:
        assert read.bytes_per_second.median == pytest.approx(1e9 * min(read.depth, 2))
    profile = device_profile(report)
    assert list(profile.io_bytes_per_second.values()) == pytest.approx([2e9] * len(profile.io_bytes_per_second))
    assert "fx3" in profile.decode_bytes_per_second
    assert next(codec for codec in report.codecs if codec.of_folder).key == "fx3"
    packed = sum(
        section.length for m in fx3_folder.manifest.expert_groups[0].records[0].matrices for section in m.sections
    )
    sizes = {(time.form, time.tokens): time.expert_bytes for time in report.fused}
    assert sizes.keys() == {(form, tokens) for form in ("fx3", "BF16") for tokens in FUSED_TOKENS}
    assert {size for (form, _), size in sizes.items() if form == "BF16"} == {report.expert.bfloat16_bytes}
    assert all(size == pytest.approx(packed, rel=0.1) for (form, _), size in sizes.items() if form == "fx3")
    assert {codec: len(rates) for codec, rates in profile.fused_bytes_per_second.items()} == {"fx3": FUSED_TOKENS_KNOWN}
    assert len(profile.unpacked_bytes_per_second) == FUSED_TOKENS_KNOWN


def test_a_disk_that_wants_more_or_fewer_reads_at_a_time(fx3_folder: PackedFolder) -> None:
    disk, records = FakeDisk(bytes_per_second=1e9, deepest=8), FakeEngineDisk(deepest={"threads": 8, "uring": 2})
    report = measure(fx3_folder, SECONDS, clock=_slow_clock, open_reader=disk.open, open_record_reader=records.open)
    profile = device_profile(report)
    assert profile.best_concurrent_reads["threads"] == 8
    assert profile.best_concurrent_reads.get("uring", 2) == 2
    # The planner counts with the rates that a run then gets: eight at a time.
    assert list(profile.io_bytes_per_second.values()) == pytest.approx([8e9] * len(profile.io_bytes_per_second))
    some = tuple(read for read in report.engine_reads if read.parallel != 4)
    assert best_concurrent_reads(replace(report, engine_reads=some)) == {}


@pytest.mark.parametrize("seconds", [0, -1, 0.5, 1e9, float("nan")])
def test_times_that_make_no_sense(seconds: float, zstd_folder: PackedFolder) -> None:
    with pytest.raises(InvalidArgumentError, match="seconds cannot be measured for"):
        measure(zstd_folder, seconds)
