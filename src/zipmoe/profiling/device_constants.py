"""From everything that was measured to the constants that planner and simulator use."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping

import numpy as np

from zipmoe.codecs.registry import get_codec
from zipmoe.engine.io_backend import DEFAULT_IO_THREADS
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile
from zipmoe.profiling.concurrent_read_probes import CONCURRENT_READS, STEADY_SPREAD, best_number
from zipmoe.profiling.estimate import Estimate
from zipmoe.profiling.fused_probes import FUSED_TOKENS, FUSED_TOKENS_KNOWN, UNPACKED
from zipmoe.profiling.report import ProfileReport, ReadRate


def device_profile(report: ProfileReport) -> DeviceProfile:
    """The constants of ``report``'s machine, disk and experts.

    Disk rates are those of direct reads (buffered ones where there are none) with as many at a time as the engine then
    keeps under way; times for numbers of tokens between those measured are interpolated linearly. Experts are decoded
    and executed by the cores that were measured: they are shared.

    Raises:
        InvalidArgumentError: something that the planner needs was left out for lack of time.
    """
    mode = "buffered" if report.direct_refusal else "direct"
    reads = [read for read in report.reads if read.mode == mode]
    missing = [
        what
        for what, found in (
            ("disk rates", reads),
            ("latency", report.latency_seconds.get(mode)),
            ("recombination", report.recombine_bytes_per_second),
            ("execution", report.execution),
            ("a torch operation", report.dispatch_seconds),
            ("memory", [rate for rate in report.memory if rate.step == "read"]),
        )
        if not found
    ]
    missing += [
        f"packed weights with {tokens} {'token' if tokens == 1 else 'tokens'}"
        for tokens in FUSED_TOKENS
        if any(get_codec(codec.codec).fused for codec in report.codecs if codec.of_folder)
        and len([time for time in report.fused if time.tokens == tokens]) < 2
    ]
    missing += [
        f"decompression of {codec.key}"
        for codec in report.codecs
        if codec.of_folder and codec.separable and 1 not in codec.decompress_bytes_per_second
    ]
    if missing or report.dispatch_seconds is None:
        raise InvalidArgumentError(
            f"the time was too short to measure {', '.join(missing)}", hint="give more with --seconds"
        )
    concurrent = best_concurrent_reads(report)
    return DeviceProfile(
        name=platform.node() or "this machine",
        host=report.provenance.host,
        measured_at=report.provenance.measured_at,
        io_bytes_per_second=disk_rates(reads, concurrent.get("threads", DEFAULT_IO_THREADS)),
        io_latency_seconds=report.latency_seconds[mode].median,
        decompress_bytes_per_second={
            codec.key: codec.decompress_bytes_per_second[1].median
            for codec in report.codecs
            if 1 in codec.decompress_bytes_per_second
        },
        recombine_bytes_per_second=_of_fewest(report.recombine_bytes_per_second).median,
        decode_bytes_per_second={
            codec.key: (
                codec.decode_between_products_bytes_per_second or _of_most(codec.decode_bytes_per_second)
            ).median
            for codec in report.codecs
            if codec.decode_bytes_per_second
        },
        exponent_ratio={codec.key: codec.exponent_ratio for codec in report.codecs if codec.exponent_ratio > 0},
        execute_seconds_by_tokens=_every_number_of_tokens(report),
        execute_expert_bytes=report.expert.bfloat16_bytes,
        workers=report.workers,
        memory_bytes_per_second=max(
            (rate for rate in report.memory if rate.step == "read"), key=lambda rate: rate.workers
        ).bytes_per_second.median,
        shared_cores=True,
        dispatch_seconds=report.dispatch_seconds.median,
        fused_bytes_per_second={
            form: fused_rates(report, form) for form in {time.form for time in report.fused} - {UNPACKED}
        },
        unpacked_bytes_per_second=fused_rates(report, UNPACKED),
        best_concurrent_reads=concurrent,
    )


def best_concurrent_reads(report: ProfileReport) -> dict[str, int]:
    """By backend; none for a backend of which some were left out for lack of time, or whose rounds were too far apart
    to tell numbers of reads from each other: the engine's default is better than chance.
    """
    found = {}
    for backend in sorted({read.backend for read in report.engine_reads}):
        rates = {read.parallel: read.bytes_per_second for read in report.engine_reads if read.backend == backend}
        steady = statistics.median(rate.spread for rate in rates.values()) <= STEADY_SPREAD
        if steady and rates.keys() == set(CONCURRENT_READS):
            found[backend] = best_number({number: rate.median for number, rate in rates.items()})
    return found


def disk_rates(reads: list[ReadRate], engine_depth: int) -> dict[int, float]:
    """Rate by block size: of the depths measured, the largest that is not above the engine's."""
    rates: dict[int, tuple[int, float]] = {}
    for read in reads:
        depth, _ = rates.get(read.block_bytes, (0, 0.0))
        if depth < read.depth <= engine_depth:
            rates[read.block_bytes] = read.depth, read.bytes_per_second.median
    return {block: rate for block, (_, rate) in sorted(rates.items())}


def fused_rates(report: ProfileReport, form: str) -> tuple[float, ...]:
    """Bytes of this form per second, for every number of tokens from 1 to the largest that the kernels are used for."""
    times = [time for time in report.fused if time.form == form]
    if not times:
        return ()
    seconds = _interpolated({time.tokens: time.seconds.median for time in times})
    per_token = seconds[-1] / len(seconds)
    seconds += tuple(per_token * tokens for tokens in range(len(seconds) + 1, FUSED_TOKENS_KNOWN + 1))
    return tuple(times[0].expert_bytes / value for value in seconds)


def _every_number_of_tokens(report: ProfileReport) -> tuple[float, ...]:
    return _interpolated({time.tokens: time.seconds.median for time in report.execution})


def _interpolated(seconds_by_tokens: Mapping[int, float]) -> tuple[float, ...]:
    """Seconds for every number of tokens from 1 to the largest."""
    tokens = sorted(seconds_by_tokens)
    every = np.interp(np.arange(1, tokens[-1] + 1), tokens, [seconds_by_tokens[number] for number in tokens])
    return tuple(float(value) for value in every)


def _of_fewest(rates: Mapping[int, Estimate]) -> Estimate:
    return rates[min(rates)]


def _of_most(rates: Mapping[int, Estimate]) -> Estimate:
    return rates[max(rates)]
