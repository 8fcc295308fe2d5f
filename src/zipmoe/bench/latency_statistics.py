"""Medians, percentiles, throughput and agreement of tokens."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from zipmoe.bench.measurement import Generation


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest values, as NumPy's default; ``share`` is 0 to 1."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def median_ttft(generations: Sequence[Generation]) -> float | None:
    """Median over generations."""
    return statistics.median(each.ttft_seconds for each in generations) if generations else None


def median_tpot(generations: Sequence[Generation]) -> float | None:
    """Median over generations of the median over their steps."""
    medians = [statistics.median(each.step_seconds) for each in generations if each.step_seconds]
    return statistics.median(medians) if medians else None


def tpot_percentile(generations: Sequence[Generation], share: float) -> float | None:
    """Over the steps of all generations together."""
    steps = [seconds for each in generations for seconds in each.step_seconds]
    return percentile(steps, share) if steps else None


def tokens_per_second(generations: Sequence[Generation]) -> float | None:
    """Tokens of all sequences after the first one of each, over their time; median over generations."""
    rates = [
        each.batch * len(each.step_seconds) / each.decode_seconds for each in generations if each.decode_seconds > 0
    ]
    return statistics.median(rates) if rates else None


def read_bytes_per_token(generations: Sequence[Generation]) -> float | None:
    """Mean bytes that the disk delivered per token of a sequence, over the steps after the first."""
    per_token = [each.read_bytes_per_step / each.batch for each in generations if each.read_bytes_per_step is not None]
    return statistics.fmean(per_token) if per_token else None


def hit_rate(generations: Sequence[Generation]) -> float | None:
    """Experts that were in memory among those requested, prompts included; None for engines that do not count."""
    hits = sum(each.hits or 0 for each in generations)
    requested = hits + sum(each.misses or 0 for each in generations)
    return hits / requested if requested else None


def agreement(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Equal tokens before the first difference of each sequence, and all tokens.

    Behind a first difference two greedy continuations have different contexts: what they say there is not compared.
    """
    equal = total = 0
    for left, right in zip(one, other, strict=True):
        total += max(len(left), len(right))
        for a, b in zip(left, right, strict=False):
            if a != b:
                break
            equal += 1
    return equal, total
