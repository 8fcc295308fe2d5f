"""Interleaved rounds under a time budget.

All probes of a stage run in turn, round after round, so that a machine which speeds up or slows down meanwhile does not
favour any of them. Every probe has an equal share of the stage's time: runs are sized so that several fit into it, and
a probe whose share is used up drops out. What cannot be run even once within its share is left out and named.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zipmoe.profiling.estimate import Estimate

ROUNDS = 7
"""Runs of each probe that its share is divided into; a quick or slow machine makes more or fewer of them."""
Clock = Callable[[], float]
Advance = Callable[[str, float], None]
"""Told the name of what is being measured and the seconds that passed since the last call."""


class Probe(ABC):
    """Something that can be done any number of times, and says how long that took."""

    @property
    @abstractmethod
    def label(self) -> str:
        """For people."""

    @property
    def family(self) -> str:
        """Probes of one family work at comparable rates: the first ones tell whether a large one is affordable. By
        default a probe is alone.
        """
        return self.label

    @property
    def work_per_unit(self) -> float:
        """Bytes (or executions) of one unit."""
        return 1.0

    @property
    def least_units(self) -> int:
        """Units that a run must have to mean anything, such as one per read under way."""
        return 1

    @abstractmethod
    def run(self, units: int) -> float:
        """Do it ``units`` times; returns seconds of the work alone."""


@dataclass
class Samples:
    """What the rounds of one probe gave."""

    work_per_unit: float
    runs: list[tuple[int, float]] = field(default_factory=list)
    """(units, seconds) of each round."""

    @property
    def work(self) -> float:
        """Work of all rounds together."""
        return self.work_per_unit * sum(units for units, _ in self.runs)

    def rate(self) -> Estimate:
        """Work per second."""
        return Estimate.of([self.work_per_unit * units / seconds for units, seconds in self.runs])

    def seconds_per_unit(self) -> Estimate:
        """Seconds of one unit."""
        return Estimate.of([seconds / units for units, seconds in self.runs])

    def seconds_per_work(self) -> Estimate:
        """Seconds of one byte (or whatever the work is counted in)."""
        return Estimate.of([seconds / (self.work_per_unit * units) for units, seconds in self.runs])


@dataclass(frozen=True)
class RoundResults:
    """Samples of every probe by its position; None for what was left out."""

    samples: tuple[Samples | None, ...]
    left_out: tuple[str, ...]
    """Labels of the probes that did not fit into their share."""

    def split(self, count: int) -> tuple[RoundResults, RoundResults]:
        """Those of the first ``count`` probes, and those of the others; what was left out stays with the first."""
        return RoundResults(self.samples[:count], self.left_out), RoundResults(self.samples[count:], ())


@dataclass
class _Entry:
    probe: Probe
    seconds_left: float
    samples: Samples
    seconds_per_unit: float = 0.0
    """Of the last run."""

    def units(self, share: float) -> int:
        """Units of the next run: a round's part of the share."""
        return max(self.probe.least_units, math.floor(share / (ROUNDS + 1) / max(self.seconds_per_unit, 1e-9)))

    def run(self, units: int, clock: Clock) -> float:
        began = clock()
        seconds = max(self.probe.run(units), 1e-9)
        passed = clock() - began  # what is not timed, such as other work in turn with it, takes its time, too
        self.seconds_left -= passed
        self.seconds_per_unit = max(seconds, passed) / units
        return seconds


def run_rounds(
    probes: Sequence[Probe],
    seconds: float,
    *,
    clock: Clock = time.perf_counter,
    advance: Advance = lambda label, passed: None,
) -> RoundResults:
    """Run all probes in turn until ``seconds`` are used up.

    The first run of each probe is a short one that warms up and sizes the others; it counts against the share but not
    as a sample (unless nothing else fits). Probes of one family should be ordered from small to large units.
    """
    if not probes:
        return RoundResults((), ())
    share = seconds / len(probes)
    # Warm-ups of families that nothing is known of may exceed their shares; together they may not double the time.
    end = clock() + 2 * seconds
    entries: list[_Entry | None] = []
    rates: dict[str, float] = {}
    for probe in probes:
        rate = rates.get(probe.family)
        expected = probe.least_units * probe.work_per_unit / rate if rate else 0.0
        if expected > share or clock() >= end:
            entries.append(None)
            continue
        entry = _Entry(probe, share, Samples(probe.work_per_unit))
        began = clock()
        warm_up = entry.run(probe.least_units, clock)
        if entry.seconds_left < warm_up:
            entry.samples.runs.append((probe.least_units, warm_up))
        rates[probe.family] = probe.least_units * probe.work_per_unit / warm_up
        entries.append(entry)
        advance(probe.label, clock() - began)
    _rounds(entries, share, clock, advance)
    samples = tuple(entry.samples if entry is not None and entry.samples.runs else None for entry in entries)
    left_out = tuple(probe.label for probe, found in zip(probes, samples, strict=True) if found is None)
    return RoundResults(samples, left_out)


def _rounds(entries: Sequence[_Entry | None], share: float, clock: Clock, advance: Advance) -> None:
    running = [entry for entry in entries if entry is not None]
    while running:
        still = []
        for entry in running:
            units = entry.units(share)
            if units * entry.seconds_per_unit > entry.seconds_left:
                continue
            began = clock()
            entry.samples.runs.append((units, entry.run(units, clock)))
            still.append(entry)
            advance(entry.probe.label, clock() - began)
        running = still
