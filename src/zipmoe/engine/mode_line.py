"""The one line that every run prints first: what really runs, so that nobody measures something else unknowingly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.engine.byte_quantity import format_bytes
from zipmoe.engine.io_backend import ReadSettings


@dataclass(frozen=True)
class EngineMode:
    """The engine's part of the mode line."""

    codec: str
    instruction_set: str
    io_mode: str
    """``"direct"`` or ``"buffered"``."""
    io_fallback_reason: str
    """Why reads are not direct; empty if they are."""
    uring_refusal: str
    """What of io_uring the kernel refused; else empty."""
    reads: ReadSettings
    decode_threads: int
    verify: str
    budget_bytes: int
    slots: Sequence[tuple[int, int]]
    """(slot bytes, slots) of each size class."""
    experts: int
    policy: str
    """Which experts make room."""
    pools: str = ""
    """Pools by what is in memory of an expert, without the policy; empty: one pool of whole records."""
    pools_origin: str = ""
    """Where they come from; empty: a person chose them."""
    rows_on_demand_saved_bytes: int = 0
    """Memory that embedding tables do not take, because their rows are read on demand; 0: all are resident."""

    def line(self, mode: str, combine: str) -> str:
        """The line, without a newline.

        Args:
            mode: numeric mode, ``"fast"`` or ``"exact"``.
            combine: order in which expert outputs are combined, e.g. ``"grouped_mm"``.
        """
        reasons = [reason for reason in (self.io_fallback_reason, self.uring_refusal) if reason]
        reads = f"{self.io_mode} reads with {self.reads.describe()}" + (f" ({', '.join(reasons)})" if reasons else "")
        parts = [
            f"zipmoe: codec {self.codec}",
            f"mode {mode} with {combine} combine",
            f"{self.instruction_set} decoding with {_count(self.decode_threads, 'thread')}",
            reads,
            f"checksums {self.verify}",
            f"budget {format_bytes(self.budget_bytes)}",
        ]
        if self.rows_on_demand_saved_bytes:
            saved = format_bytes(self.rows_on_demand_saved_bytes)
            parts.append(f"embedding rows on demand from disk, which saves {saved}")
        parts += [self.pools or self._one_pool(), f"policy {self.policy}"]
        return "; ".join([*parts, self.pools_origin] if self.pools_origin else parts)

    def _one_pool(self) -> str:
        slot_count = sum(slots for _, slots in self.slots)
        pool_bytes = sum(slot_bytes * slots for slot_bytes, slots in self.slots)
        sizes = " and ".join(f"{slots} x {format_bytes(slot_bytes)}" for slot_bytes, slots in self.slots)
        return f"pool {format_bytes(pool_bytes)} for {slot_count} of {self.experts} experts ({sizes})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
