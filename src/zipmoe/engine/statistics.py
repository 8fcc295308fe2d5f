"""What a run cost: time to first token, time per output token, hit rate, bytes read per token, peak memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any

from zipmoe.engine.byte_quantity import format_bytes
from zipmoe.engine.limits import detect_limits
from zipmoe.engine.memory_usage import control_group_peak_bytes, peak_resident_bytes


@dataclass(frozen=True)
class EngineCounters:
    """Counts since the engine was opened, or the difference of two such counts."""

    hits: int = 0
    """Requested experts that could be used without reading."""
    misses: int = 0
    """Requested experts of which something had to be read."""
    prefetched: int = 0
    """Requested experts whose reads look-ahead had begun: neither hits nor misses."""
    full_hits: int = 0
    """Requested experts that were in memory decoded (pool F)."""
    compressed_hits: int = 0
    """With all compressed parts in memory (pool C); these and ``full_hits`` are the hits."""
    sign_mantissa_hits: int = 0
    """With their SM-chunks in memory (pool S): misses for which only the E-chunks were read."""
    exponent_hits: int = 0
    """With their E-chunks in memory (pool E): misses for which only the SM-chunks were read."""
    promotions: int = 0
    """Experts that moved to a pool which holds more of them."""
    demotions: int = 0
    """Experts of which a part was dropped and another one kept."""
    evictions: int = 0
    """Experts of which nothing was kept."""
    policy_changes: int = 0
    """How often a replay found another policy to be better, and it took over."""
    predicted_reads: int = 0
    """Experts that look-ahead queued for reading."""
    prefetched_bytes: int = 0
    """Of those that were asked for in time, whole records."""
    wasted_reads: int = 0
    """Of those that were not asked for, as far as anything of them was read."""
    wasted_bytes: int = 0
    """What was read of them."""
    requests: int = 0
    """Sparse layers executed."""
    reads: int = 0
    """Records read, dense ones at the start included, and pieces of records whose rows are read on demand."""
    read_bytes: int = 0
    exponent_read_bytes: int = 0
    """E-chunks among ``read_bytes``; 0 for codecs whose parts cannot be read alone."""
    sign_mantissa_read_bytes: int = 0
    read_seconds: float = 0.0
    """Time during which at least one read was under way."""
    read_latency_seconds: float = 0.0
    """Sum over all reads, from submission to completion."""
    longest_read_seconds: float = 0.0
    """The slowest read so far (not a difference)."""
    verify_seconds: float = 0.0
    """Checksums and validation, summed over the reader's threads."""
    wait_seconds: float = 0.0
    """Time that the model stood waiting for experts, and for rows that are read on demand."""
    compute_seconds: float = 0.0
    """Products with packed weights (mode fast)."""
    decode_seconds: float = 0.0
    decoded_bytes: int = 0
    """BF16 bytes produced by decoding."""
    ready_bytes: int = 0
    """Of ``decoded_bytes``: those whose exponents had been decompressed when they were asked for."""
    ahead_bytes: int = 0
    """Exponents decompressed ahead, whether or not they were asked for later."""
    decompress_ahead_seconds: float = 0.0
    """Time that decompressing them took, summed over threads."""

    def since(self, earlier: EngineCounters) -> EngineCounters:
        """What was added after ``earlier``."""
        values = {f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        return EngineCounters(**{**values, "longest_read_seconds": self.longest_read_seconds})

    @property
    def hits_by_pool(self) -> dict[str, int]:
        """Requested experts that were in the pools F, C, S and E."""
        return {
            "F": self.full_hits,
            "C": self.compressed_hits,
            "S": self.sign_mantissa_hits,
            "E": self.exponent_hits,
        }

    @property
    def hit_rate(self) -> float | None:
        """Hits among requested experts; None before the first request."""
        requested = self.hits + self.misses + self.prefetched
        return self.hits / requested if requested else None


@dataclass(frozen=True)
class RunReport:
    """Numbers of one run: a prompt and the tokens generated from it."""

    tokens: int
    """Generated tokens (steps: a batch counts once)."""
    ttft_seconds: float | None
    """Time to first token."""
    tpot_seconds: float | None
    """Time per output token: mean over the tokens after the first; None for fewer than two."""
    hit_rate: float | None
    hits: int
    misses: int
    prefetched: int
    """Requested experts whose reads look-ahead had begun; these, hits and misses are all that were requested."""
    wasted_bytes: int
    """Read by look-ahead for nothing."""
    hits_by_pool: dict[str, int]
    """Requested experts that were in the pools F, C, S and E."""
    policy: str
    """Which experts make room: the policy in force, in words."""
    policy_changes: int
    """How often a replay found another one to be better during the run."""
    read_bytes: int
    """Over the whole run, prompt included."""
    first_token_read_bytes: int | None
    read_bytes_per_token: float | None
    """Mean over the tokens after the first; None for fewer than two."""
    read_seconds: float
    wait_seconds: float
    decode_seconds: float
    decoded_bytes: int
    """BF16 bytes produced by decoding."""
    ready_bytes: int
    """Of these, bytes whose exponents had been decompressed when they were asked for."""
    decompress_ahead_seconds: float
    """Time that decompressing ahead took, summed over threads."""
    compute_seconds: float
    """Products with packed weights (mode fast)."""
    peak_resident_bytes: int
    """VmHWM of the process: page cache not included."""
    control_group_peak_bytes: int | None
    """Of the control group, page cache and other processes in it included; None where unknown or without a limit."""

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line for a person."""
        parts = [f"{self.tokens} tokens"]
        if self.ttft_seconds is not None:
            parts.append(f"TTFT {self.ttft_seconds:.3f} s")
        if self.tpot_seconds is not None:
            parts.append(f"TPOT {self.tpot_seconds:.4f} s")
        if self.hit_rate is not None:
            requested = self.hits + self.misses + self.prefetched
            parts.append(f"hit rate {self.hit_rate:.1%} ({self.hits} of {requested})")
        if self.prefetched or self.wasted_bytes:
            parts.append(f"looked ahead to {self.prefetched}, {format_bytes(self.wasted_bytes)} of it in vain")
        if any(count for pool, count in self.hits_by_pool.items() if pool != "C"):
            parts.append("found in " + ", ".join(f"{pool} {count}" for pool, count in self.hits_by_pool.items()))
        if self.policy_changes:
            times = "once" if self.policy_changes == 1 else f"{self.policy_changes} times"
            parts.append(f"policy changed {times}, now {self.policy}")
        if self.read_bytes_per_token is not None:
            parts.append(f"read {format_bytes(round(self.read_bytes_per_token))} per token")
        parts.append(f"read in all {format_bytes(self.read_bytes)}")
        peak = f"peak memory {format_bytes(self.peak_resident_bytes)}"
        if self.control_group_peak_bytes is not None:
            peak += f" (control group {format_bytes(self.control_group_peak_bytes)})"
        return ", ".join([*parts, peak])


class Statistics:
    """Counters of an engine and the clock of the current run.

    Whoever drives generation calls ``start_run`` before the prompt and ``token_generated`` after each new token.
    """

    def __init__(
        self,
        read_counters: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.perf_counter,
        read_policy: Callable[[], str] = lambda: "",
    ) -> None:
        self._read_counters = read_counters
        self._clock = clock
        self._read_policy = read_policy
        self.start_run()

    def counters(self) -> EngineCounters:
        """Counts since the engine was opened."""
        return EngineCounters(**self._read_counters())

    def start_run(self) -> None:
        """A new run begins now; earlier runs are forgotten."""
        self._begin = self._clock()
        self._begin_counters = self.counters()
        self._first_token: float | None = None
        self._first_token_counters: EngineCounters | None = None
        self._last_token: float | None = None
        self._tokens = 0

    def token_generated(self) -> None:
        """One more token (of every sequence of the batch) is there."""
        self._last_token = self._clock()
        self._tokens += 1
        if self._first_token is None:
            self._first_token = self._last_token
            self._first_token_counters = self.counters()

    def report(self) -> RunReport:
        """Numbers of the run so far."""
        now = self.counters()
        run = now.since(self._begin_counters)
        first_bytes = per_token = tpot = None
        if self._first_token_counters is not None:
            first_bytes = self._first_token_counters.since(self._begin_counters).read_bytes
        if self._tokens > 1 and self._first_token is not None and self._last_token is not None:
            tpot = (self._last_token - self._first_token) / (self._tokens - 1)
            per_token = (run.read_bytes - (first_bytes or 0)) / (self._tokens - 1)
        return RunReport(
            tokens=self._tokens,
            ttft_seconds=None if self._first_token is None else self._first_token - self._begin,
            tpot_seconds=tpot,
            hit_rate=run.hit_rate,
            hits=run.hits,
            misses=run.misses,
            prefetched=run.prefetched,
            wasted_bytes=run.wasted_bytes,
            hits_by_pool=run.hits_by_pool,
            policy=self._read_policy(),
            policy_changes=run.policy_changes,
            read_bytes=run.read_bytes,
            first_token_read_bytes=first_bytes,
            read_bytes_per_token=per_token,
            read_seconds=run.read_seconds,
            wait_seconds=run.wait_seconds,
            decode_seconds=run.decode_seconds,
            decoded_bytes=run.decoded_bytes,
            ready_bytes=run.ready_bytes,
            decompress_ahead_seconds=run.decompress_ahead_seconds,
            compute_seconds=run.compute_seconds,
            peak_resident_bytes=peak_resident_bytes(),
            control_group_peak_bytes=control_group_peak_bytes() if _in_limited_group() else None,
        )


def _in_limited_group() -> bool:
    """Whether a control group limits this process: only then its peak says something about this run."""
    return any("control group" in limit.source for limit in detect_limits())
