"""The targets of benchmarks/against_baselines.py are judged as they are stated."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from zipmoe.bench.comparison import Row
from zipmoe.bench.prefill_floor import PrefillFloor
from zipmoe.bench.roofline import Roofline

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "against_baselines.py"
LEVELS = {"25%": 2_000, "50%": 4_000, "75%": 6_000, "fits": 14_000}


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    specification = importlib.util.spec_from_file_location("against_baselines", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["against_baselines"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


def _row(
    contender: str,
    level: str,
    tpot: float | None,
    *,
    ttft: float = 1.0,
    peak: int = 1_000,
    batch: int = 1,
    rate: float = 1.0,
) -> Row:
    floor = Roofline(100.0, 50.0, 0.05, 0.1 if level == "25%" else 0.01, 0.12) if contender == "zipmoe" else None
    return Row(
        contender,
        level,
        LEVELS[level],
        batch,
        "",
        None,
        3,
        1.0,
        ttft,
        ttft,
        ttft,
        tpot,
        tpot,
        rate,
        0.0,
        peak,
        None,
        floor,
        prefill=PrefillFloor(1.0, 1.0, 0.5, 0.8, ttft, 0.9, 0.7) if contender == "zipmoe" else None,
    )


def _good() -> list[Row]:
    """Every target just reached (in numbers that floating point holds exactly)."""
    rows = [_row("zipmoe", level, 0.125, ttft=1.0, peak=1_050) for level in LEVELS]
    rows += [_row("llama.cpp", level, tpot) for level, tpot in (("25%", 0.75), ("75%", 0.5))]
    rows += [_row("llama.cpp", "50%", 0.625, ttft=2.5), _row("llama.cpp", "fits", 0.15625, peak=1_400)]
    rows += [_row("accelerate", "50%", 0.875), _row("accelerate", "75%", 0.875), _row("transformers", "fits", 0.42)]
    return rows


def _missed(verdicts: list[object]) -> list[str]:
    return [verdict.target for verdict in verdicts if not verdict.holds]  # type: ignore[attr-defined]


def test_all_hold(targets: ModuleType) -> None:
    rows = targets.Rows(_good())
    verdicts = targets.latency_verdicts(rows)
    assert _missed(verdicts) == []
    assert len(verdicts) == 13
    assert verdicts[0].line() == "ok     25%: tokens faster than llama.cpp's >= 6x: 6.00x"
    assert _missed(targets.first_token_verdicts(rows, 64)) == []


@pytest.mark.parametrize(
    ("worse", "target"),
    [
        (_row("llama.cpp", "25%", 0.74), "25%: tokens faster than llama.cpp's >= 6x"),
        (_row("llama.cpp", "50%", 0.62), "50%: tokens faster than llama.cpp's >= 5x"),
        (_row("llama.cpp", "75%", 0.49), "75%: tokens faster than llama.cpp's >= 4x"),
        (_row("llama.cpp", "75%", None), "75%: tokens faster than llama.cpp's >= 4x"),
        (_row("accelerate", "50%", 0.87), "50%: tokens faster than Accelerate's >= 7x"),
        (_row("llama.cpp", "fits", 0.156, peak=1_400), "fits: TPOT over llama.cpp's <= 0.8x"),
        (_row("transformers", "fits", 0.41), "fits: TPOT over plain Transformers' <= 0.3x"),
        (_row("llama.cpp", "fits", 0.15625, peak=1_390), "fits: peak memory over llama.cpp's <= 0.75x"),
    ],
)
def test_one_is_missed(targets: ModuleType, worse: Row, target: str) -> None:
    rows = targets.Rows([*_good(), worse])  # the later row stands in the place of the earlier
    assert _missed(targets.latency_verdicts(rows)) == [target]


def test_peaks_beyond_the_limit_and_slow_misses(targets: ModuleType) -> None:
    rows = targets.Rows([*_good(), _row("zipmoe", "25%", 0.125, peak=2_001)])
    assert _missed(targets.latency_verdicts(rows)) == [
        "25%: peak memory within the limit, page cache included, nothing killed"
    ]
    slow = Row(**{**vars(_row("zipmoe", "25%", 0.125)), "roofline": Roofline(100.0, 50.0, 0.05, 0.1, 0.126)})
    assert _missed(targets.latency_verdicts(targets.Rows([*_good(), slow]))) == [
        "25%: time per token over missed bytes / direct read rate <= 1.25x"
    ]


def test_first_tokens_and_batches(targets: ModuleType) -> None:
    rows = [_row("zipmoe", "50%", 0.1), _row("llama.cpp", "50%", 0.5, ttft=2.4)]
    assert _missed(targets.first_token_verdicts(targets.Rows(rows), 512)) == [
        "50%: first token after 512 tokens faster than llama.cpp's >= 2.5x"
    ]
    late = targets.Rows([_row("zipmoe", "50%", 0.1, ttft=1.1), _row("llama.cpp", "50%", 0.5, ttft=9.0)])
    assert _missed(targets.first_token_verdicts(late, 64)) == [
        "50%: first token after 64 tokens over max(compressed bytes read / disk rate, FLOPs / GEMM rate) <= 1.3x"
    ]
    measured = targets.first_token_verdicts(late, 64)[1].measured
    assert measured == "1.38x (without what the last layer need not compute: 1.57x)"
    unknown = targets.Rows([replace(_row("zipmoe", "50%", 0.1), prefill=None), _row("llama.cpp", "50%", 1.0, ttft=9.0)])
    assert targets.first_token_verdicts(unknown, 64)[1].measured == "not measured"
    batches = [
        _row("zipmoe", level, 0.1, batch=batch, rate=rate)
        for level, batch, rate in (("50%", 1, 10.0), ("50%", 16, 18.0), ("fits", 1, 10.0), ("fits", 16, 34.0))
    ]
    assert _missed(targets.batch_verdicts(targets.Rows(batches))) == [
        "fits: throughput of batch 16 over batch 1 >= 3.5x"
    ]


def test_benchmarks_are_chosen_by_name(targets: ModuleType) -> None:
    plans = {targets.SHORT: 1, targets.LONG: 2, targets.BATCHES: 3}
    assert targets.wanted(plans, None) == plans
    assert targets.wanted(plans, "long,batches") == {targets.LONG: 2, targets.BATCHES: 3}
    with pytest.raises(SystemExit, match="'all' is none of short, long, batches"):
        targets.wanted(plans, "all")
