"""A measured number: the median of repeated rounds, and how far the rounds were apart."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """Median and quartiles of one quantity over the rounds; the unit is in the name of whatever holds it."""

    median: float
    low: float
    """Lower quartile (with fewer than four rounds, the smallest)."""
    high: float
    """Upper quartile (with fewer than four rounds, the largest)."""
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Summarise at least one value."""
        if not values:
            raise ValueError("no values to summarise")
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values), len(values))
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(statistics.median(values), low, high, len(values))

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median: 0 if all rounds agreed."""
        return (self.high - self.low) / self.median if self.median else 0.0
