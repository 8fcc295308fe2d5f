"""``zipmoe run`` plans its pools by itself: with the kept profile, with a trace or without, or says why it does not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from zipmoe import _native
from zipmoe.cli.main import main
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.partition import PoolPlan
from zipmoe.planning.trace import read_trace
from zipmoe.profiling.kept_traces import kept_trace_path
from zipmoe.simulation.budget_plan import PlanRequest, plan_for_budget
from zipmoe.simulation.replay import replay
from zipmoe.store.manifest import CodecSettings
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder

GENERATE = ("--prompt-ids", "5 6 7 8 9", "--max-new-tokens", 16, "--ignore-eos", "--json")
SINGLE_POOL = "for 12 of 12 experts"
"""Part of the mode line of a run without planned pools."""


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def folder(talking_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in chunks."""
    packed = tmp_path_factory.mktemp("planned") / "model"
    pack(talking_source, packed, CodecSettings("zstd", 3, 2), jobs=1, min_dense_bytes=0)
    return packed


@pytest.fixture(scope="module")
def measured_cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache with a profile of this machine and that folder."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        assert main(["profile", str(folder), "--seconds", "3"]) == 0
    return cache


@pytest.fixture
def measured(measured_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(measured_cache))


def test_without_a_profile_there_is_one_pool_and_a_line_that_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = _run(capsys, "run", folder, "--memory", "8GB", *GENERATE)
    assert code == 0, err
    assert SINGLE_POOL in json.loads(out)["mode"]
    (line,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert f"zipmoe profile {folder}" in line
    code, out, err = _run(capsys, "run", folder, "--memory", "8GB", "--pools", "none", *GENERATE)
    assert code == 0, err
    assert SINGLE_POOL in json.loads(out)["mode"]
    assert "note: " not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("measured")
def test_a_stale_profile_is_not_planned_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zipmoe.profiling import measure

    monkeypatch.setattr(measure, "__version__", "99.0")
    code, out, err = _run(capsys, "run", folder, "--memory", "8GB", *GENERATE)
    assert code == 0, err
    assert SINGLE_POOL in json.loads(out)["mode"]
    assert "is not used: it was measured by ZipMoE" in err


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("kept", ["none", "stale", "of more cores"])
def test_a_run_on_some_cpus_is_told_how_to_measure_for_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    from zipmoe.hf.automatic_pools import automatic_pools
    from zipmoe.hf.configuration import ZipMoEConfig
    from zipmoe.planning import device
    from zipmoe.profiling import measure

    if kept == "none":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    elif kept == "stale":
        monkeypatch.setattr(measure, "__version__", "99.0")
    else:
        monkeypatch.setattr(device.os, "sched_getaffinity", lambda _: set(range(97)))
    opened = PackedFolder.open(folder)

    def note(**settings: object) -> str:
        config = ZipMoEConfig(pools="plan", **settings)  # type: ignore[arg-type]
        (line,) = automatic_pools(None, opened, config, lambda: pytest.fail("nothing is to be planned")).notes
        return line

    assert note(cpus="0-2,5").endswith(f": taskset -c 0-2,5 zipmoe profile {folder}")
    assert note().endswith(f": zipmoe profile {folder}")


@pytest.mark.usefixtures("measured")
def test_a_profile_of_an_earlier_version_is_named_and_not_planned_with(
    folder: Path,
    measured_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(measured_cache, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (kept,) = [path for path in tmp_path.rglob("*.json") if not path.name.endswith(".report.json")]
    value = json.loads(kept.read_text())
    for name in ("fused_bytes_per_second", "unpacked_bytes_per_second"):
        del value[name]
    kept.write_text(json.dumps({**value, "zipmoe_device_profile": 2}))
    code, out, err = _run(capsys, "run", folder, "--memory", "8GB", *GENERATE)
    assert code == 0, err
    assert SINGLE_POOL in json.loads(out)["mode"]
    (line,) = [line for line in err.splitlines() if line.startswith("note: ")]
    assert "is a device profile of version 2, this ZipMoE has version 5; measure again: zipmoe profile" in line


@pytest.mark.usefixtures("measured")
def test_with_a_profile_the_pools_are_planned(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    trace = tmp_path / "t.jsonl"
    plain = ["run", folder, "--memory", "8GB", *GENERATE]
    code, expected, err = _run(capsys, *plain, "--pools", "none", "--record-trace", trace)
    assert code == 0, err
    tokens = json.loads(expected)["tokens"]

    def planned(*options: object) -> str:
        code, out, err = _run(capsys, *plain, *options)
        assert code == 0, err
        assert json.loads(out)["tokens"] == tokens
        mode: str = json.loads(out)["mode"]
        assert mode in err
        return mode

    assert "no trace (all experts alike)" in planned()
    assert "the trace 't.jsonl'" in planned("--trace", trace)
    code, out, err = _run(capsys, "plan", folder, "--memory", "8GB", "--trace", trace, "--json")
    assert code == 0, err
    slots = json.loads(out)["plan"]
    mode = planned()  # plan kept the trace
    assert "the kept trace" in mode
    assert ", ".join(f"{letter} {slots[letter]}" for letter in "FCSE") in mode
    assert "ms per token expected" in mode
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    code, out, err = _run(capsys, "plan", folder, "--memory", "8GB", "--trace", "none", "--json")
    assert (code, json.loads(out)["replayed_steps"]) == (0, 0)


def test_a_damaged_kept_trace_is_named_and_left_out(
    folder: Path,
    measured_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shutil.copytree(measured_cache, tmp_path / "cache")))
    kept = kept_trace_path(PackedFolder.open(folder).manifest)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(b"no trace")
    for command in (["plan", folder, "--json"], ["run", folder, *GENERATE]):
        code, _, err = _run(capsys, *command, "--memory", "8GB")
        assert code == 0, err
        (line,) = [line for line in err.splitlines() if line.startswith("note: the kept trace")]
        assert f"{str(kept)!r} is not used" in line


def test_a_full_disk_costs_neither_the_plan_nor_the_measurement(
    folder: Path,
    measured_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    full_disk: Callable[[Path], None],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shutil.copytree(measured_cache, tmp_path / "cache")))
    trace = tmp_path / "t.jsonl"
    code, _, err = _run(capsys, "run", folder, "--memory", "8GB", *GENERATE, "--record-trace", trace)
    assert code == 0, err
    kept = kept_trace_path(PackedFolder.open(folder).manifest)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(b"what was kept before")
    full_disk(kept.with_name(f"{os.getpid()}-{kept.name}"))
    code, out, err = _run(capsys, "plan", folder, "--memory", "8GB", "--trace", trace, "--json")
    assert code == 2
    assert json.loads(out)["memory_bytes"] == 8_000_000_000
    assert "the disk is full" in err.splitlines()[-2]
    assert {path: path.read_bytes() for path in kept.parent.iterdir()} == {kept: b"what was kept before"}
    profile = tmp_path / "profile.json"
    full_disk(profile)
    code, out, err = _run(capsys, "profile", folder, "--output", profile, "--seconds", 3, "--json")
    assert code == 2
    assert json.loads(out)["zipmoe_profile_report"]
    assert err.splitlines()[-2].startswith(f"error: {str(profile)!r} cannot be written: the disk is full")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "t.jsonl"]


@pytest.mark.usefixtures("measured")
def test_from_pretrained_plans_when_asked_to(folder: Path) -> None:
    import zipmoe

    planned = zipmoe.load(folder, quantization_config=zipmoe.ZipMoEConfig(memory="8GB", pools="plan"))
    with planned.zipmoe_engine:
        assert "pools planned with the profile of" in planned.zipmoe_mode_line()
    default = zipmoe.load(folder, quantization_config=zipmoe.ZipMoEConfig(memory="8GB"))
    with default.zipmoe_engine:
        assert SINGLE_POOL in default.zipmoe_mode_line()


@pytest.fixture
def seven_reads(measured_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kept profile that says how many reads at a time the disk wants; returns what the mode line calls it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(shutil.copytree(measured_cache, tmp_path / "cache")))
    (kept,) = [path for path in tmp_path.rglob("*.json") if not path.name.endswith(".report.json")]
    profile = DeviceProfile.load(kept)
    replace(profile, best_concurrent_reads={"threads": 7, "uring": 5}).save(kept)
    return f"(measured best on {profile.measured_at:%Y-%m-%d %H:%M})"


def test_a_kept_profile_chooses_the_number_of_reads(
    folder: Path, seven_reads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def mode(*options: object) -> str:
        code, out, err = _run(capsys, "run", folder, "--memory", "8GB", "--pools", "none", *GENERATE, *options)
        assert code == 0, err
        line: str = json.loads(out)["mode"]
        return line

    if "direct reads" in (line := mode()):
        assert f"direct reads with 7 threads {seven_reads};" in line
    assert "reads with 3 threads;" in mode("--io-threads", 3)
    assert "buffered reads with 4 threads (" in (line := mode("--io", "buffered"))
    assert "measured best" not in line
    if not _native.uring_refusal():
        assert f"reads with io_uring, 5 blocks at a time {seven_reads}" in mode("--io-backend", "uring")
        assert "reads with io_uring, 1 block at a time;" in mode("--io-backend", "uring", "--io-depth", 1)


def test_a_stale_profile_chooses_no_number_of_reads(
    folder: Path, seven_reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zipmoe
    from zipmoe.profiling import measure

    monkeypatch.setattr(measure, "__version__", "99.0")
    model = zipmoe.load(folder, memory="8GB")
    with model.zipmoe_engine:
        assert "reads with 4 threads" in model.zipmoe_mode_line()
        assert seven_reads not in model.zipmoe_mode_line()


@pytest.mark.usefixtures("measured")
def test_a_trace_of_another_model_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"zipmoe_trace": 1, "model": "x", "experts": [5], "top_k": 2}\n')
    for command in ("run", "plan"):
        rest = GENERATE if command == "run" else ()
        code, _, err = _run(capsys, command, folder, "--memory", "8GB", "--trace", other, *rest)
        assert code == 2
        assert "the trace has layers of [5] experts" in err
    code, _, err = _run(capsys, "run", folder, "--pools", "C=2", "--trace", other, *GENERATE)
    assert (code, "--trace is for planning" in err) == (2, True)


def test_a_replay_finds_what_the_engine_found(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The forecast rests on it: the same requests meet the same residencies."""
    from dataclasses import replace

    from large_folder import MACHINE

    trace_file = tmp_path / "t.jsonl"
    options = ["--memory", "8GB", "--pools", "F=1,C=1,S=1,E=1", "--record-trace", trace_file]
    code, out, err = _run(capsys, "run", folder, *options, *GENERATE)
    assert code == 0, err
    statistics = json.loads(out)["statistics"]
    trace, manifest = read_trace(trace_file), PackedFolder.open(folder).manifest
    machine = replace(MACHINE, measured_at=datetime(2026, 1, 1, tzinfo=UTC))
    request = PlanRequest(manifest, machine, trace.header.top_k, 10_000_000, trace)
    from zipmoe.planning.folder_plan import FolderCosts

    costs = FolderCosts.of(manifest, machine)
    found = replay(trace, PoolPlan(1, 1, 1, 1), costs.costs, costs.expert)
    requested = sum(len(ids) for step in trace.steps for ids in step.layers)
    by_pool = {state.letter: round(rate * requested) for state, rate in found.hit_rates.items()}
    assert by_pool.pop("M") == statistics["misses"] - statistics["hits_by_pool"]["S"] - statistics["hits_by_pool"]["E"]
    assert by_pool == statistics["hits_by_pool"]
    assert plan_for_budget(request).slots is not None
