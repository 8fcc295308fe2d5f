"""Finds the setting in which a contender is at its best, by short runs, before it is measured in that setting alone.

Every combination of read-ahead and share of weights in memory would take longer than the measurement itself. Shares are
tried first, in ascending order and with the first read-ahead: where the limit kills with one share, it kills with a
larger one, too; any other failure says nothing of the next share. Then the other read-aheads are tried with the best
share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zipmoe.bench.contenders import Variant
from zipmoe.bench.latency_statistics import median_tpot, median_ttft
from zipmoe.bench.worker_run import KILLED_BY_LIMIT

if TYPE_CHECKING:
    from zipmoe.bench.benchmark import Measured

_CLEARLY_EARLIER = 0.9
"""Times the first token's time: a setting that is that much better for first tokens is measured, too."""


@dataclass(frozen=True)
class Choice:
    """What is left to be measured."""

    variants: tuple[Variant, ...]
    """The best for TPOT, and the best for TTFT where that is another one by more than noise."""
    reason: str | None = None
    """Why nothing works; ``variants`` then holds the one that came nearest."""


def choose(variants: Sequence[Variant], run: Callable[[Variant], Measured]) -> Choice:
    """Try what must be tried of a contender's variants.

    Args:
        variants: all settings of one contender; a single one is chosen without a trial.
        run: measures one shortly.
    """
    if len(variants) == 1:
        return Choice(tuple(variants))
    tried: list[Measured] = []
    ahead = variants[0].read_ahead_kib
    shares: list[float | None] = sorted({each.cpu_share for each in variants}, key=lambda share: share or 0.0)
    for share in shares:
        tried.append(run(Variant(variants[0].contender, ahead, share)))
        if tried[-1].reason is not None and tried[-1].reason.startswith(KILLED_BY_LIMIT):
            break
    worked = [each for each in tried if _tpot(each) is not None]
    if not worked:
        return Choice((tried[0].variant,), tried[0].reason or "it generated nothing")
    best_share = min(worked, key=lambda each: _tpot(each) or 0.0).variant.cpu_share
    others = [each for each in variants if each.cpu_share == best_share and each.read_ahead_kib != ahead]
    worked += [each for each in map(run, others) if _tpot(each) is not None]
    best = min(worked, key=lambda each: _tpot(each) or 0.0)
    early = min(worked, key=_ttft)
    chosen = [best.variant]
    if _ttft(early) < _CLEARLY_EARLIER * _ttft(best):
        chosen.append(early.variant)
    return Choice(tuple(chosen))


def _tpot(measured: Measured) -> float | None:
    return median_tpot(measured.output.generations)


def _ttft(measured: Measured) -> float:
    return median_ttft(measured.output.generations) or 0.0
