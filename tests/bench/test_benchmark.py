"""The whole benchmark on tiny models: real workers without a limit and with one, fake ones for what goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.worker_scripts import DONE, LOADED, generation, script

from zipmoe.bench.benchmark import Benchmark, BenchmarkPlan
from zipmoe.bench.comparison import Agreement, agreements, rows_of
from zipmoe.bench.contenders import Contender, Models, WorkerCommands
from zipmoe.bench.control_group import find_parent
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prompts import random_prompts
from zipmoe.cli.main import main
from zipmoe.errors import InvalidArgumentError, MemoryLimitUnavailableError

LEVEL = MemoryLevel("2GB", 2_000_000_000, False)
SOME = random_prompts(2, 3, 8, 150)


def test_zipmoe_and_plain_transformers_without_a_limit(tiny_source: Path, tiny_packed: Path) -> None:
    plan = BenchmarkPlan(
        Models(tiny_packed, tiny_source),
        (LEVEL,),
        SOME,
        (Contender.ZIPMOE_EXACT, Contender.TRANSFORMERS),
        new_tokens=4,
        batches=(1, 3),
        threads=1,
    )
    told: list[str] = []
    measured = Benchmark(plan, None, tell=told.append).run()
    assert [each.reason for each in measured] == [None, None]
    assert len(told) == 2
    assert [[g.batch for g in each.output.generations] for each in measured] == [[1, 1, 3]] * 2
    assert agreements(measured) == [Agreement("zipmoe-exact", 8, 8)]
    ours = measured[0].output
    assert ours.loaded is not None
    assert "mode exact" in ours.loaded["mode_line"]
    assert ours.loaded["dense_bytes"] > 0
    (first, _, batch) = ours.generations
    # 2 layers, 3 experts per token: 3 steps after the first request 6 each; all of them end up in memory
    assert first.decode_hits is not None
    assert first.decode_misses is not None
    assert first.decode_hits + first.decode_misses == 3 * 6
    assert batch.misses == 0
    assert [row.generations for row in rows_of(measured)] == [2, 1, 2, 1]
    assert batch.tokens == measured[1].output.generations[2].tokens


def test_the_command_under_a_limit(tiny_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_parent().close()
    except MemoryLimitUnavailableError as error:
        pytest.skip(str(error))
    options = ["--memory", "2GB", "--contenders", "zipmoe,llama.cpp", "--new-tokens", "3", "--prompt-tokens", "8"]
    files = ["--json", str(tmp_path / "r.json"), "--markdown", str(tmp_path / "r.md")]
    assert main(["bench", str(tiny_packed), "--topic", "3,5", *options, *files]) == 0
    out, err = capsys.readouterr()
    result = json.loads((tmp_path / "r.json").read_text())
    ours, llama = result["runs"]
    assert ours["reason"] is None
    assert 0 < ours["memory"]["peak_bytes"] <= 2_000_000_000
    assert ours["memory"]["oom_kills"] == 0
    assert len(ours["machine_rates"]) == 2
    assert "--gguf" in llama["reason"]
    (row, _) = result["rows"]
    assert row["roofline"]["achieved_over_floor"] > 0
    assert row["ttft_seconds"] > 0
    assert result["settings"]["limited"] is True
    assert "One prompt at a time" in out
    assert "zipmoe at 2GB" in err
    assert str(tiny_packed.parent) not in (tmp_path / "r.json").read_text()
    assert "## One prompt at a time" in (tmp_path / "r.md").read_text()


def test_contenders_take_turns_and_failures_are_rows(tiny_source: Path, tiny_packed: Path) -> None:
    good = script(LOADED, generation(1.0, 2.0), DONE)
    overrides = {
        "zipmoe": good,
        "transformers": script(LOADED, then="import os; os.kill(os.getpid(), 9)"),
        "accelerate": script("segmentation fault"),
    }
    plan = BenchmarkPlan(
        Models(tiny_packed, tiny_source),
        (LEVEL, MemoryLevel("3GB", 3_000_000_000, False)),
        SOME,
        new_tokens=2,
        rounds=2,
    )
    measured = Benchmark(plan, None, commands=WorkerCommands(overrides=overrides)).run()
    order = [(each.round, each.level.label, each.variant.contender.value) for each in measured if not each.trial]
    one = ["zipmoe", "transformers", "accelerate", "llama.cpp"]
    assert order == [
        *((0, level, name) for level in ("2GB", "3GB") for name in one),
        *((1, level, name) for level in ("2GB", "3GB") for name in one[::-1]),
    ]
    reasons = {each.variant.contender.value: each.reason for each in measured}
    assert reasons["zipmoe"] is None
    assert reasons["transformers"] == "killed by SIGKILL while it generated"
    assert reasons["accelerate"] == "a worker wrote 'segmentation fault'"
    assert "--gguf" in str(reasons["llama.cpp"])
    assert not list(tiny_packed.parent.glob("zipmoe-bench-offload-*"))


@pytest.mark.parametrize(
    "wrong",
    [
        ["--memory", "much"],
        ["--contenders", "vllm"],
        ["--batch", "0"],
        ["--batch", "many"],
        ["--rounds", "0"],
        ["--topic", "99"],
        ["--topic", "1", "--prompt-file", "x"],
        ["--python", "llama.cpp"],
        ["--source", "/nonexistent"],
        ["--gguf", "/nonexistent"],
        ["--json", "/nonexistent/r.json"],
        ["--accelerate-share", "2"],
        ["--read-ahead-kib", "-1"],
    ],
)
def test_wrong_options_are_refused(wrong: list[str], tiny_packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(tiny_packed), *wrong]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_a_plan_checks_itself(tiny_packed: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="--new-tokens 0"):
        BenchmarkPlan(Models(tiny_packed), (LEVEL,), SOME, new_tokens=0)


def test_without_the_right_to_limit_nothing_is_measured(
    tiny_packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zipmoe.bench.control_group.memory_control_groups", lambda root: [])
    assert main(["bench", str(tiny_packed), "--memory", "2GB", "--contenders", "zipmoe"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no limit could be set")
    assert "--no-limit" in err
