"""How long a benchmark is going to take, judged by the rows of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zipmoe.bench.benchmark import BenchmarkPlan
from zipmoe.bench.contenders import Contender, cannot_run, variants
from zipmoe.bench.memory_levels import MemoryLevel

_START_SECONDS = 6.0
"""Interpreter, imports, dropping cached pages."""
_RATES_SECONDS = 9.0
"""Measuring the machine before and after a run of ours."""
_UNKNOWN_SECONDS = 60.0
_UNKNOWN_SLOW_SECONDS = 150.0
_KILLED_SECONDS = 20.0


def expected_seconds(plan: BenchmarkPlan, rows: Sequence[Mapping[str, Any]]) -> float:
    """All runs of a plan, trials included.

    Args:
        plan: what is to be measured.
        rows: ``rows`` of an earlier result, as JSON; what they do not tell of is taken to last a minute a run.
    """
    return sum(
        _contender_seconds(plan, contender, level, rows) for contender in plan.contenders for level in plan.levels
    )


def _contender_seconds(
    plan: BenchmarkPlan, contender: Contender, level: MemoryLevel, rows: Sequence[Mapping[str, Any]]
) -> float:
    every = variants(contender, plan.read_aheads, plan.cpu_shares)
    if cannot_run(every[0], level, plan.models) or plan.leaves_out(contender, level):
        return 0.0
    known = {row["batch"]: row for row in rows if (row["contender"], row["level"]) == (contender.value, level.label)}
    killed = 1 in known and known[1]["tpot_seconds"] is None
    seconds = plan.rounds * _run_seconds(plan, contender, known, plan.batches, plan.new_tokens)
    if not plan.trial_tokens:
        return seconds * len(every)
    if len(every) == 1 or level.fits or not plan.tries_at(level):
        return seconds
    trial = _run_seconds(plan, contender, known, (1,), plan.trial_tokens, single=1)
    if killed:
        return trial  # after one trial the reason is known
    shares = len({each.cpu_share for each in every})
    read_aheads = len({each.read_ahead_kib for each in every})
    return seconds + trial * (shares + read_aheads - 1)


def _run_seconds(
    plan: BenchmarkPlan,
    contender: Contender,
    known: Mapping[int, Mapping[str, Any]],
    batches: Sequence[int],
    new_tokens: int,
    single: int | None = None,
) -> float:
    if not known:
        return _UNKNOWN_SLOW_SECONDS if contender.slow else _UNKNOWN_SECONDS
    row = known.get(1) or next(iter(known.values()))
    if row["tpot_seconds"] is None or row["ttft_seconds"] is None:
        return _KILLED_SECONDS
    seconds = _START_SECONDS + (row["load_seconds"] or 0.0) + (_RATES_SECONDS if contender.packed else 0.0)
    counts = {1: plan.prompts.single if single is None else single} if 1 in batches else {}
    counts |= {size: 1 for size in batches if size > 1}
    if contender.slow:
        counts, new_tokens = {1: 1}, min(new_tokens, plan.slow_new_tokens)
    for size, number in counts.items():
        like = known.get(size) or row
        if like["tpot_seconds"] is not None:
            seconds += number * (like["ttft_seconds"] + (new_tokens - 1) * like["tpot_seconds"])
    return seconds
