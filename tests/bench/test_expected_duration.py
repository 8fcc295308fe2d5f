"""The duration that is announced: what an earlier result says, times what the plan asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zipmoe.bench.benchmark import BenchmarkPlan
from zipmoe.bench.contenders import Contender, Models
from zipmoe.bench.expected_duration import expected_seconds
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prompts import random_prompts

HALF, FITS = MemoryLevel("50%", 2_000_000_000, False), MemoryLevel("fits", 9_000_000_000, True)


def _row(contender: str, level: str = "50%", batch: int = 1, tpot: float | None = 0.5) -> dict[str, Any]:
    return {
        "contender": contender,
        "level": level,
        "batch": batch,
        "load_seconds": 10.0,
        "ttft_seconds": None if tpot is None else 2.0,
        "tpot_seconds": tpot,
    }


def _plan(*contenders: Contender, levels: tuple[MemoryLevel, ...] = (HALF,), **options: Any) -> BenchmarkPlan:
    models = Models(Path("packed"), Path("source"), Path("gguf"))
    return BenchmarkPlan(models, levels, random_prompts(3, 4, 8, 100), contenders, **{"new_tokens": 5, **options})


def test_runs_of_ours_are_loads_prompts_and_rates() -> None:
    # 6 to start, 9 for the rates, 10 to load, 3 prompts of 2 + 4 * 0.5
    assert expected_seconds(_plan(Contender.ZIPMOE), [_row("zipmoe")]) == 6 + 9 + 10 + 3 * 4
    assert expected_seconds(_plan(Contender.ZIPMOE, rounds=2), [_row("zipmoe")]) == 2 * 37
    batches = _plan(Contender.ZIPMOE, batches=(1, 4))
    assert expected_seconds(batches, [_row("zipmoe"), _row("zipmoe", batch=4, tpot=1.0)]) == 37 + 2 + 4 * 1


def test_settings_are_tried_before() -> None:
    one_trial = 6 + 10 + 2 + 7 * 0.5
    full = 6 + 10 + 3 * 4
    read_aheads = _plan(Contender.LLAMA_CPP, read_aheads=(128, 8192))
    assert expected_seconds(read_aheads, [_row("llama.cpp")]) == full + 2 * one_trial
    shares = _plan(Contender.ACCELERATE, read_aheads=(128, 8192), cpu_shares=(0.5, 0.6, 0.7))
    assert expected_seconds(shares, [_row("accelerate")]) == full + 4 * one_trial
    all_of_them = _plan(Contender.ACCELERATE, read_aheads=(128, 8192), cpu_shares=(0.5, 0.6, 0.7), trial_tokens=0)
    assert expected_seconds(all_of_them, [_row("accelerate")]) == 6 * full
    elsewhere = _plan(Contender.LLAMA_CPP, read_aheads=(128, 8192), trial_levels=("75%",))
    assert expected_seconds(elsewhere, [_row("llama.cpp")]) == full


def test_who_is_killed_takes_one_trial() -> None:
    assert expected_seconds(_plan(Contender.ACCELERATE), [_row("accelerate", tpot=None)]) == 20
    assert expected_seconds(_plan(Contender.TRANSFORMERS), [_row("transformers", tpot=None)]) == 20


def test_what_is_not_run_takes_no_time() -> None:
    assert expected_seconds(_plan(Contender.ACCELERATE, levels=(FITS,)), []) == 0
    left_out = _plan(Contender.TRANSFORMERS, only_where_it_fits=(Contender.TRANSFORMERS,))
    assert expected_seconds(left_out, [_row("transformers")]) == 0


@pytest.mark.parametrize(("contender", "seconds"), [(Contender.ZIPMOE, 60), (Contender.AIRLLM, 150)])
def test_what_nothing_is_known_of(contender: Contender, seconds: int) -> None:
    assert expected_seconds(_plan(contender), [_row("someone else")]) == seconds


def test_slow_contenders_get_one_prompt() -> None:
    assert expected_seconds(_plan(Contender.AIRLLM, slow_new_tokens=4), [_row("airllm")]) == 6 + 10 + 2 + 3 * 0.5
