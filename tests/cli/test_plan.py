"""``zipmoe plan``: what it prints fits into the budget and runs; what is missing is said in one line."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from zipmoe.cli.main import main
from zipmoe.engine.pool_budget import budget_without_pools, pools_bytes
from zipmoe.engine.pool_slots import PoolSlots
from zipmoe.engine.rows_on_demand import model_on_meta
from zipmoe.planning.device import DeviceProfile, host_fingerprint
from zipmoe.store.manifest import CodecSettings
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A machine with a slow disk and fast workers, with round numbers."""
    path = tmp_path / "profile.json"
    DeviceProfile(
        name="test machine",
        host=host_fingerprint(),
        measured_at=datetime(2026, 5, 1, tzinfo=UTC),
        io_bytes_per_second={4096: 1e8, 1 << 20: 1e9},
        io_latency_seconds=1e-4,
        decompress_bytes_per_second={"zstd": 1e9},
        recombine_bytes_per_second=5e9,
        decode_bytes_per_second={"fx3": 2e10},
        execute_seconds_by_tokens=(1e-5, 2e-5),
        execute_expert_bytes=10_000,
        exponent_ratio={"zstd": 0.35},
        workers=2,
        memory_bytes_per_second=3e10,
    ).save(path)
    return path


@pytest.fixture
def planar(talking_source: Path, tmp_path: Path) -> Path:
    pack(talking_source, tmp_path / "planar", CodecSettings("zstd", 3, 2), jobs=1, min_dense_bytes=0)
    return tmp_path / "planar"


def _memory_for(folder: Path, slots: PoolSlots) -> int:
    """Budget of a run of 300 tokens in which just these slots fit beside everything else."""
    opened = PackedFolder.open(folder)
    model = model_on_meta(AutoConfig.from_pretrained(folder), opened.manifest.architecture)
    budget = budget_without_pools(opened.manifest, "16GB", model, 300)
    return budget.reserved_bytes + pools_bytes(opened.manifest, slots) + 30_000_000  # the process grows a little


@pytest.mark.parametrize("which", ["planar", "fused"])
def test_the_plan_fits_and_its_command_runs(
    which: str, planar: Path, talking_packed: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = planar if which == "planar" else talking_packed
    trace = tmp_path / "trace.jsonl"
    run = ["run", folder, "--memory", "16GB", "--prompt-ids", "5 6 7", "--max-new-tokens", 24, "--ignore-eos", "--json"]
    code, expected, err = _run(capsys, *run, "--record-trace", trace)
    assert code == 0, err
    memory = _memory_for(folder, PoolSlots(compressed=3))
    options = ["--memory", memory, "--profile", profile, "--context-tokens", 300, "--trace", trace]
    code, out, err = _run(capsys, "plan", folder, *options, "--json")
    assert code == 0, err
    report = json.loads(out)
    slots = PoolSlots(*(report["plan"][letter] for letter in "FCSE"))
    assert report["memory_bytes"] == memory
    assert sum(slots.experts) > 0
    assert sum(report["hit_rates"].values()) == pytest.approx(1)
    if which == "fused":  # parts of experts do not exist, and full ones cost more than they save on a slow disk
        assert (slots.sign_mantissa, slots.exponent) == (0, 0)
    command = shlex.split(report["command"])
    assert command[:3] == ["zipmoe", "run", str(folder)]
    code, out, err = _run(
        capsys, *command[1:], "--prompt-ids", "5 6 7", "--max-new-tokens", 24, "--ignore-eos", "--json"
    )
    assert code == 0, err
    assert json.loads(out)["tokens"] == json.loads(expected)["tokens"]
    code, out, _ = _run(capsys, "plan", folder, *options)
    assert (code, out.split()[0]) == (0, "experts")
    for name in ("chosen", "runner-up 1", "no cache", "hits:"):
        assert name in out


def test_the_mode_is_that_of_the_run(
    talking_packed: Path,
    profile: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = replace(
        DeviceProfile.load(profile), fused_bytes_per_second={"fx3": (14e9,)}, unpacked_bytes_per_second=(16e9,)
    )
    kernels.save(tmp_path / "kernels.json")
    options = ["plan", talking_packed, "--memory", "16GB", "--profile", tmp_path / "kernels.json", "--trace", "none"]

    def planned(*more: str) -> dict[str, Any]:
        code, out, err = _run(capsys, *options, *more, "--json")
        assert code == 0, err
        value: dict[str, Any] = json.loads(out)
        return value

    exact = planned("--exact")
    assert (exact["mode"], exact["command"].endswith(" --exact")) == ("exact", True)
    assert exact["rest_seconds"]["decode"] > 0
    monkeypatch.setenv("ZIPMOE_MODE", "fast")
    fast = planned()
    assert (fast["mode"], "--exact" in fast["command"]) == ("fast", False)
    assert fast["rest_seconds"]["decode"] == 0
    manifest = PackedFolder.open(talking_packed).manifest
    multiplied = [
        matrix for matrix in manifest.dense if "embed_tokens" not in matrix.parameter or matrix.tied_parameters
    ]
    packed = sum(m.sections[0].length for matrix in multiplied for block in matrix.blocks for m in block.matrices)
    assert fast["rest_seconds"]["execute"] == pytest.approx(packed / 14e9)
    assert planned("--exact")["rest_seconds"] == exact["rest_seconds"]
    code, _, err = _run(capsys, *options)
    assert (code, "mode fast" in err) == (0, True)


def test_no_command_is_printed_that_run_would_refuse(
    planar: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--profile", profile, "--context-tokens", 300, "--slots", "C=3"]
    memory = _memory_for(planar, PoolSlots(compressed=3))
    code, _, err = _run(capsys, "plan", planar, *options, "--memory", memory)
    assert (code, "hint: zipmoe run" in err, "do not fit" in err) == (0, True, False)
    code, _, err = _run(capsys, "plan", planar, *options, "--memory", _memory_for(planar, PoolSlots()) - 14_000_000)
    assert (code, "hint: zipmoe run" in err, "do not fit" in err) == (0, False, True), err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pools", "XY"], "XY"),
        (["--pools", "S", "--profile", "{profile}"], "codec has"),
        (["--memory", "1MB", "--profile", "{profile}"], "floor of"),
        (["--context-tokens", "0"], "--context-tokens 0"),
        (["--half-life", "0"], "--half-life 0"),
        (["--trace", "{tmp}/none.jsonl"], "none.jsonl"),
        (["--profile", "{tmp}/none.json"], "none.json"),
        ([], "was not measured"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(
    options: list[str],
    message: str,
    talking_packed: Path,
    profile: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    filled = [option.format(tmp=tmp_path, profile=profile) for option in options]
    code, out, err = _run(capsys, "plan", talking_packed, *filled)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line]
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) <= 2
