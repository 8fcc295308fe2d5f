"""Rows of the comparison on made-up runs with known results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zipmoe.bench.benchmark import BenchmarkPlan, Measured
from zipmoe.bench.comparison import Agreement, agreements, rows_of
from zipmoe.bench.comparison_plot import check_plot, plot
from zipmoe.bench.comparison_table import tables
from zipmoe.bench.contenders import Contender, Models, Variant
from zipmoe.bench.control_group import MemoryUse
from zipmoe.bench.machine_rates import MachineRates
from zipmoe.bench.markdown_report import markdown
from zipmoe.bench.measurement import Generation, WorkerOutput
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prompts import PromptSet
from zipmoe.bench.result_file import BenchmarkResult
from zipmoe.errors import InvalidArgumentError

HALF, ALL = MemoryLevel("50%", 4_000_000_000, False), MemoryLevel("fits", 14_000_000_000, True)
PROMPTS = PromptSet(((1, 2), (3, 4)), 2, "made up")
COUNTS: dict[str, Any] = {"hits": 9, "misses": 3, "decode_hits": 2, "decode_misses": 2, "decode_read_bytes": 600}


def _run(
    contender: Contender,
    level: MemoryLevel,
    step: float,
    *,
    tokens: tuple[int, ...] = (5, 6, 7),
    read_ahead: int | None = None,
    reason: str | None = None,
    peak: int = 1000,
    batch_step: float | None = None,
) -> Measured:
    """Two prompts of three tokens with this time per token, and perhaps a batch of two."""
    counts = COUNTS if contender.packed else {}
    seconds = (1.0, 1.0 + step, 1.0 + 2 * step)
    generations = [Generation(1, seconds, (0, 100, 200), (tokens,), **counts) for _ in range(2)]
    if batch_step is not None:
        seconds = (2.0, 2.0 + batch_step, 2.0 + 2 * batch_step)
        generations.append(Generation(2, seconds, (0, 100, 200), (tokens, tokens), **counts))
    loaded = {"seconds": 2.0} | ({"dense_bytes": 500, "expert_bytes": 250.0} if contender.packed else {})
    return Measured(
        Variant(contender, read_ahead),
        level,
        0,
        reason,
        WorkerOutput(loaded, tuple(generations), None, True),
        memory=MemoryUse(peak, 0),
        rates=(MachineRates(1000.0, 1000.0, "direct"),) if contender.packed else (),
        batches=PROMPTS.batches((1, 2) if batch_step is not None else (1,)),
    )


MEASURED = (
    _run(Contender.ZIPMOE, HALF, 2.0, batch_step=2.5),
    _run(Contender.LLAMA_CPP, HALF, 14.0, read_ahead=8192, batch_step=20.0),
    _run(Contender.LLAMA_CPP, HALF, 8.0, read_ahead=128, batch_step=30.0, peak=3000),
    Measured(Variant(Contender.TRANSFORMERS), HALF, 0, "killed by the memory limit while it loaded"),
    _run(Contender.TRANSFORMERS, ALL, 3.0),
)


def test_the_better_setting_counts() -> None:
    rows = {(row.contender, row.level, row.batch): row for row in rows_of(MEASURED)}
    assert len(rows) == 6
    llama = rows["llama.cpp", "50%", 1]
    assert (llama.settings, llama.tpot_seconds, llama.slower_than_zipmoe) == ("read-ahead 128 KiB", 8.0, 4.0)
    assert llama.peak_bytes == 3000
    assert rows["llama.cpp", "50%", 2].settings == "read-ahead 8192 KiB"
    assert rows["llama.cpp", "50%", 2].slower_than_zipmoe == 8.0
    killed = rows["transformers", "50%", 1]
    assert (killed.reason, killed.tpot_seconds) == ("killed by the memory limit while it loaded", None)
    assert rows["transformers", "fits", 1].slower_than_zipmoe is None  # zipmoe was not measured there


def test_the_first_token_has_a_better_setting_of_its_own() -> None:
    slow = _run(Contender.LLAMA_CPP, HALF, 8.0, read_ahead=128)
    early = _run(Contender.LLAMA_CPP, HALF, 9.0, read_ahead=8192)
    generations = tuple(
        replace(each, token_seconds=tuple(seconds - 0.5 for seconds in each.token_seconds))
        for each in early.output.generations
    )
    (row,) = rows_of([slow, replace(early, output=replace(early.output, generations=generations))])
    assert (row.tpot_seconds, row.ttft_seconds, row.best_ttft_seconds) == (8.0, 1.0, 0.5)


def test_our_row_has_hit_rate_and_floor() -> None:
    ours = rows_of(MEASURED)[0]
    assert (ours.hit_rate, ours.load_seconds, ours.read_bytes_per_token) == (0.75, 2.0, 100.0)
    assert ours.roofline is not None
    # per step: 500 + 250 * 4 / 2 active bytes, 300 missed bytes, 1000 bytes/s of either
    assert (ours.roofline.memory_seconds, ours.roofline.disk_seconds) == (1.0, 0.3)
    assert ours.roofline.achieved_over_floor == 2.0
    assert ours.to_json()["roofline"]["bound_by"] == "memory"


def test_rounds_are_taken_together() -> None:
    rows = rows_of([_run(Contender.ZIPMOE, HALF, 2.0), replace(_run(Contender.ZIPMOE, HALF, 4.0, peak=1500), round=1)])
    (row,) = rows
    assert (row.generations, row.tpot_seconds, row.peak_bytes) == (4, 3.0, 1500)


def test_agreement_with_plain_transformers() -> None:
    other = _run(Contender.ZIPMOE, HALF, 1.0, tokens=(5, 9, 7))
    assert agreements([*MEASURED, other]) == [
        Agreement("zipmoe", 2 * 3 + 2 * 1, 12),
        Agreement("llama.cpp", 12, 12),
    ]
    assert agreements(MEASURED[:3]) == []


def test_trials_are_kept_but_not_counted() -> None:
    trial = replace(_run(Contender.LLAMA_CPP, HALF, 1.0, read_ahead=8192), trial=True)
    assert rows_of([trial, *MEASURED]) == rows_of(MEASURED)
    assert agreements([trial, *MEASURED]) == agreements(MEASURED)


def test_few_tokens_of_a_slow_contender_are_compared_with_as_many() -> None:
    few = _run(Contender.AIRLLM, HALF, 9.0)
    generation = few.output.generations[0]
    short = replace(generation, token_seconds=(1.0, 2.0), read_bytes=(0, 0), tokens=((5, 6),))
    measured = replace(few, output=replace(few.output, generations=(short,)))
    assert agreements([*MEASURED, measured])[-1] == Agreement("airllm", 2, 2)


@pytest.fixture
def result(tiny_packed: Path) -> BenchmarkResult:
    plan = BenchmarkPlan(Models(tiny_packed), (HALF, ALL), PROMPTS, new_tokens=3, batches=(1, 2), threads=2)
    return BenchmarkResult(plan, MEASURED, limited=True, read_ahead_kib=8192, other_cores_busy=0.0)


def test_the_heading_says_that_slow_contenders_did_less(result: BenchmarkResult) -> None:
    prompts = result.heading()[3]
    assert prompts == "prompts   2 of 2 tokens: made up; 3 new tokens, 1 round"
    plan = replace(result.plan, contenders=(Contender.ZIPMOE, Contender.AIRLLM))
    assert replace(result, plan=plan).heading()[3] == f"{prompts}; airllm: one prompt, 4 new tokens"


def test_tables(result: BenchmarkResult) -> None:
    latency, throughput, failures = tables(result)
    assert [row[:2] for row in latency.rows] == [
        ("50% (4.00 GB)", "zipmoe"),
        ("50% (4.00 GB)", "llama.cpp"),
        ("fits (14.0 GB)", "transformers"),
    ]
    batched = {row[1:5] for row in throughput.rows}
    assert ("zipmoe", "2", "0.8", "1.60x") in batched
    assert ("llama.cpp", "1", "0.125", "1.00x") in batched
    assert failures.rows == (("50% (4.00 GB)", "transformers", "killed by the memory limit while it loaded"),)


def test_markdown_and_json_hold_everything_but_paths(result: BenchmarkResult, tiny_packed: Path) -> None:
    text = markdown(result)
    assert "| 50% (4.00 GB) | llama.cpp | read-ahead 128 KiB |" in text
    assert "zipmoe: 6 of 6 tokens" in text
    raw = json.dumps(result.to_json())
    assert str(tiny_packed.parent) not in text + raw
    runs = json.loads(raw)["runs"]
    assert runs[0]["generations"][0]["token_seconds"] == [1.0, 3.0, 5.0]
    assert [run["reason"] is None for run in runs] == [True, True, True, False, True]


def test_a_plot_needs_matplotlib_and_a_known_kind_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    with monkeypatch.context() as patch:
        patch.setattr("zipmoe.bench.comparison_plot.importlib.import_module", missing)
        with pytest.raises(InvalidArgumentError, match="--plot needs matplotlib"):
            check_plot(tmp_path / "plot.png")
    pytest.importorskip("matplotlib")
    with pytest.raises(InvalidArgumentError, match=r"cannot be written as 'plot\.docx'"):
        check_plot(tmp_path / "plot.docx")
    check_plot(tmp_path / "plot.png")
    plot(rows_of(MEASURED), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
