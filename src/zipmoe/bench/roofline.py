"""The least time that a step can take on this machine: all active weights through memory, all missing ones from disk.

Both can happen at once, so that the floor is the larger of the two. Active weights are counted as they are stored,
compressed: whoever computes on them need not move more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.bench.machine_rates import MachineRates
from zipmoe.bench.measurement import Generation


@dataclass(frozen=True)
class Roofline:
    """Per step (a token of every sequence of the batch), means over the steps after the first."""

    active_bytes: float
    missed_bytes: float
    memory_seconds: float
    disk_seconds: float
    achieved_seconds: float

    @property
    def floor_seconds(self) -> float:
        """The larger bound."""
        return max(self.memory_seconds, self.disk_seconds)

    @property
    def achieved_over_floor(self) -> float:
        """1 is the best there is."""
        return self.achieved_seconds / self.floor_seconds

    @property
    def bound_by(self) -> str:
        """Which of the two."""
        return "disk" if self.disk_seconds > self.memory_seconds else "memory"


def roofline(
    generations: Sequence[Generation], dense_bytes: float, expert_bytes: float, rates: Sequence[MachineRates]
) -> Roofline | None:
    """The floor of generations of equal batch size that ran between these measurements of the machine.

    Args:
        generations: with counts of hits and misses.
        dense_bytes: weights that every step needs.
        expert_bytes: mean of one expert.
        rates: at least one measurement; the mean counts.

    Returns:
        None for generations without counts or with a single step.
    """
    steps = sum(len(generation.step_seconds) for generation in generations)
    counted = all(
        generation.decode_hits is not None
        and generation.decode_misses is not None
        and generation.decode_read_bytes is not None
        for generation in generations
    )
    memory = sum(rate.memory_bytes_per_second for rate in rates) / len(rates) if rates else 0.0
    disk = sum(rate.disk_bytes_per_second for rate in rates) / len(rates) if rates else 0.0
    if not steps or not counted or memory <= 0 or disk <= 0:
        return None
    requested = sum((each.decode_hits or 0) + (each.decode_misses or 0) for each in generations)
    missed = sum(each.decode_read_bytes or 0 for each in generations) / steps
    active = dense_bytes + expert_bytes * requested / steps
    achieved = sum(generation.decode_seconds for generation in generations) / steps
    return Roofline(active, missed, active / memory, missed / disk, achieved)
