"""Rows of the comparison: the best setting of every contender at every level, speed-ups, roofline, agreement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from zipmoe.bench.benchmark import Measured
from zipmoe.bench.contenders import Contender, Variant
from zipmoe.bench.latency_statistics import (
    agreement,
    hit_rate,
    median_tpot,
    median_ttft,
    read_bytes_per_token,
    tokens_per_second,
    tpot_percentile,
)
from zipmoe.bench.measurement import Generation
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prefill_floor import PrefillFloor, prefill_floor
from zipmoe.bench.prefill_work import PrefillWork
from zipmoe.bench.roofline import Roofline, roofline


@dataclass(frozen=True)
class Row:
    """One contender at one level with one batch size, all rounds together."""

    contender: str
    level: str
    limit_bytes: int
    batch: int
    settings: str
    """The settings that were best of those that were tried; empty if there was no choice."""
    reason: str | None
    """Why there are no numbers, or why they are of fewer generations than planned."""
    generations: int
    load_seconds: float | None
    first_ttft_seconds: float | None
    """Of the first prompt after loading: with cold caches."""
    ttft_seconds: float | None
    """Median over prompts."""
    best_ttft_seconds: float | None
    """The same in the setting that is best for it, which need not be the one that is best for TPOT."""
    tpot_seconds: float | None
    tpot_p95_seconds: float | None
    tokens_per_second: float | None
    read_bytes_per_token: float | None
    peak_bytes: int | None
    """Page cache included; None without a limit."""
    hit_rate: float | None
    roofline: Roofline | None
    slower_than_zipmoe: float | None = None
    """Its TPOT over that of our engine at the same level and batch."""
    prefill: PrefillFloor | None = None
    """Of single prompts."""

    def to_json(self) -> dict[str, Any]:
        """All fields, the roofline's ratios included."""
        fields = asdict(self)
        if self.roofline is not None:
            fields["roofline"] |= {
                "floor_seconds": self.roofline.floor_seconds,
                "achieved_over_floor": self.roofline.achieved_over_floor,
                "bound_by": self.roofline.bound_by,
            }
        if self.prefill is not None:
            fields["prefill"] |= {
                "floor_seconds": self.prefill.floor_seconds,
                "achieved_over_floor": self.prefill.achieved_over_floor,
                "achieved_over_strict_floor": self.prefill.achieved_over_strict_floor,
                "bound_by": self.prefill.bound_by,
            }
        return fields


@dataclass(frozen=True)
class Agreement:
    """How many tokens of a contender equal those of plain Transformers."""

    contender: str
    equal_tokens: int
    """Before the first difference of each prompt."""
    tokens: int


def rows_of(measured: Sequence[Measured]) -> list[Row]:
    """One row per level, contender and batch size, in the order in which they were measured first; without trials."""
    measured = [each for each in measured if not each.trial]
    rows = []
    for level in dict.fromkeys(each.level for each in measured):
        at_level = [each for each in measured if each.level == level]
        for contender in dict.fromkeys(each.variant.contender for each in at_level):
            rows += _rows([each for each in at_level if each.variant.contender is contender], contender, level)
    return [_with_ratio(row, rows) for row in rows]


def agreements(measured: Sequence[Measured]) -> list[Agreement]:
    """Every other contender against plain Transformers, on the prompts that were measured one by one.

    Tokens of plain Transformers come from any level at which it ran: they do not depend on memory.
    """
    measured = [each for each in measured if not each.trial]
    reference: dict[Any, tuple[int, ...]] = {}
    for each in measured:
        if each.variant.contender is Contender.TRANSFORMERS:
            reference.update(_single_tokens(each))
    found = []
    for contender in dict.fromkeys(each.variant.contender for each in measured):
        if contender is Contender.TRANSFORMERS:
            continue
        equal = total = 0
        for each in measured:
            if each.variant.contender is contender:
                pairs = [
                    (new, reference[key][: len(new)]) for key, new in _single_tokens(each).items() if key in reference
                ]
                one_equal, one_total = agreement([new for new, _ in pairs], [old for _, old in pairs])
                equal, total = equal + one_equal, total + one_total
        if total:
            found.append(Agreement(contender.value, equal, total))
    return found


def _single_tokens(measured: Measured) -> dict[Any, tuple[int, ...]]:
    pairs = zip(measured.batches, measured.output.generations, strict=False)
    return {batch[0]: generation.tokens[0] for batch, generation in pairs if generation.batch == 1}


def _rows(measured: Sequence[Measured], contender: Contender, level: MemoryLevel) -> list[Row]:
    sizes = sorted({len(batch) for each in measured for batch in each.batches}) or [1]
    variants = list(dict.fromkeys(each.variant for each in measured))
    rows = []
    for size in sizes:
        candidates = [_row([m for m in measured if m.variant == v], v, level, size) for v in variants]
        best = min(candidates, key=lambda row: math.inf if row.tpot_seconds is None else row.tpot_seconds)
        first = min((row.ttft_seconds for row in candidates if row.ttft_seconds is not None), default=None)
        rows.append(replace(best, best_ttft_seconds=first))
    return rows


def _row(measured: Sequence[Measured], variant: Variant, level: MemoryLevel, size: int) -> Row:
    generations = [g for each in measured for g in each.output.generations if g.batch == size]
    firsts = [each.output.generations[0] for each in measured if each.output.generations]
    loads = [each.output.loaded["seconds"] for each in measured if each.output.loaded is not None]
    peaks = [each.memory.peak_bytes for each in measured if each.memory and each.memory.peak_bytes is not None]
    ran = [each for each in measured if each.output.loaded is not None]
    return Row(
        contender=variant.contender.value,
        level=level.label,
        limit_bytes=level.limit_bytes,
        batch=size,
        settings=variant.settings,
        reason=next((each.reason for each in measured if each.reason is not None), None),
        generations=len(generations),
        load_seconds=sum(loads) / len(loads) if loads else None,
        first_ttft_seconds=median_ttft([first for first in firsts if first.batch == size]),
        ttft_seconds=median_ttft(generations),
        best_ttft_seconds=median_ttft(generations),
        tpot_seconds=median_tpot(generations),
        tpot_p95_seconds=tpot_percentile(generations, 0.95),
        tokens_per_second=tokens_per_second(generations),
        read_bytes_per_token=read_bytes_per_token(generations),
        peak_bytes=max(peaks, default=None),
        hit_rate=hit_rate(generations),
        roofline=_roofline(ran, generations),
        prefill=_prefill(ran, generations) if size == 1 else None,
    )


def _prefill(ran: Sequence[Measured], generations: Sequence[Generation]) -> PrefillFloor | None:
    told = [each.output.loaded.get("prefill_work") for each in ran if each.output.loaded is not None]
    fields = next((each for each in told if each is not None), None)
    tokens = {len(prompt) for each in ran for batch in each.batches for prompt in batch}
    if fields is None or len(tokens) != 1:
        return None
    rates = [rate for each in ran for rate in each.rates]
    return prefill_floor(generations, tokens.pop(), PrefillWork.from_json(fields), rates)


def _roofline(ran: Sequence[Measured], generations: Sequence[Generation]) -> Roofline | None:
    loaded = next(
        (each.output.loaded for each in ran if each.output.loaded and "dense_bytes" in each.output.loaded), None
    )
    rates = [rate for each in ran for rate in each.rates]
    if loaded is None or not generations:
        return None
    return roofline(generations, float(loaded["dense_bytes"]), float(loaded["expert_bytes"]), rates)


def _with_ratio(row: Row, rows: Sequence[Row]) -> Row:
    ours = next(
        (
            each.tpot_seconds
            for name in (Contender.ZIPMOE, Contender.ZIPMOE_EXACT)
            for each in rows
            if each.contender == name.value and (each.level, each.batch) == (row.level, row.batch) and each.tpot_seconds
        ),
        None,
    )
    if ours is None or row.tpot_seconds is None:
        return row
    return replace(row, slower_than_zipmoe=row.tpot_seconds / ours)
