"""What ``zipmoe profile`` prints for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from zipmoe.profiling.device_constants import best_concurrent_reads
from zipmoe.profiling.disk_probes import block_name

if TYPE_CHECKING:
    from zipmoe.profiling.estimate import Estimate
    from zipmoe.profiling.report import CodecRates, ProfileReport

NOT_MEASURED = "-"
_LEAST_WIDTH = 160
"""Narrower terminals wrap lines; cut numbers would be worse."""


def print_tables(report: ProfileReport) -> None:
    """Print the report to standard output."""
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    origin, expert = report.provenance, report.expert
    shapes = ", ".join(f"{name} {rows} x {columns}" for name, rows, columns in expert.matrices)
    console.print(f"machine   {origin.host.describe()}, {origin.instruction_set}, torch {origin.torch_version}")
    console.print(f"disk      {origin.disk.describe()}")
    console.print(f"experts   {expert.experts} of {expert.bfloat16_bytes / 1e6:.2f} MB BF16: {shapes}")
    console.print("medians of interleaved rounds, ± half the distance of the quartiles; GB = 1e9 bytes\n")
    _disk(console, report)
    _codecs(console, report)
    _memory(console, report)
    _execution(console, report)
    _fused(console, report)
    _dispatch(console, report)
    for note in report.notes:
        console.print(f"note: {note}")
    if report.left_out:
        console.print(f"note: not measured for lack of time (see --seconds): {'; '.join(report.left_out)}")


def _table(console: Console, title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(title)
    console.print(table)
    console.print()


def _disk(console: Console, report: ProfileReport) -> None:
    depths = sorted({read.depth for read in report.reads})
    for mode in ("direct", "buffered"):
        rates = {
            (read.block_bytes, read.of_record, read.depth): read.bytes_per_second
            for read in report.reads
            if read.mode == mode
        }
        if not rates:
            continue
        blocks = sorted({(block, of_record) for block, of_record, _ in rates})
        _table(
            console,
            f"disk, {mode} reads, GB/s by block and number of reads at a time",
            ["block", *(str(depth) for depth in depths)],
            (
                [
                    f"{block_name(block)}{' (a record)' if of_record else ''}",
                    *(_giga(rates.get((block, of_record, depth))) for depth in depths),
                ]
                for block, of_record in blocks
            ),
        )
    if report.engine_reads:
        numbers = sorted({read.parallel for read in report.engine_reads})
        rates_of = {(read.backend, read.parallel): read.bytes_per_second for read in report.engine_reads}
        best = best_concurrent_reads(report)
        _table(
            console,
            "records as the engine reads them, GB/s by backend and number of reads at a time; best: what a run takes",
            ["backend", *(str(number) for number in numbers), "best"],
            (
                [
                    backend,
                    *(_giga(rates_of.get((backend, number))) for number in numbers),
                    str(best.get(backend, NOT_MEASURED)),
                ]
                for backend in sorted({read.backend for read in report.engine_reads})
            ),
        )
    latencies = ", ".join(f"{mode} {_micro(latency)}" for mode, latency in report.latency_seconds.items())
    console.print(f"latency of one 4 KiB read, µs: {latencies}\n")


def _codecs(console: Console, report: ProfileReport) -> None:
    ratios = ", ".join(
        f"{ratio.matrix} {ratio.mean:.4f} ({ratio.lowest:.4f} to {ratio.highest:.4f})"
        for ratio in report.exponent_ratios
    )
    console.print(f"rho of this folder: {ratios}\n")
    workers = sorted({count for codec in report.codecs for count in codec.decode_bytes_per_second})
    _table(
        console,
        "codecs: shards K; rho; c = ms for one shard on one worker; GB/s of raw exponents decompressed, by workers",
        ["codec", "K", "rho", "c", *(str(count) for count in workers)],
        (
            [
                _codec_name(codec),
                str(codec.shards),
                f"{codec.exponent_ratio:.4f}",
                _shard_milliseconds(codec.shard_bytes, codec.decompress_bytes_per_second.get(1)),
                *(_giga(codec.decompress_bytes_per_second.get(count)) for count in workers),
            ]
            for codec in report.codecs
            if codec.separable
        ),
    )
    _table(
        console,
        "whole matrices decoded, GB/s of BF16, by workers, and by all of them between products as in a model",
        ["codec", "size/BF16", *(str(count) for count in workers), "between products"],
        (
            [
                _codec_name(codec),
                f"{(1 + codec.exponent_ratio) / 2:.4f}",
                *(_giga(codec.decode_bytes_per_second.get(count)) for count in workers),
                _giga(codec.decode_between_products_bytes_per_second),
            ]
            for codec in report.codecs
        ),
    )
    recombination = ", ".join(
        f"{_giga(rate)} on {count}" for count, rate in sorted(report.recombine_bytes_per_second.items())
    )
    console.print(f"recombination, GB/s of BF16 by workers: {recombination or NOT_MEASURED}\n")


def _memory(console: Console, report: ProfileReport) -> None:
    rates = ", ".join(f"{rate.step} {_giga(rate.bytes_per_second)} on {rate.workers}" for rate in report.memory)
    console.print(f"memory, GB/s by cores: {rates or NOT_MEASURED}\n")


def _execution(console: Console, report: ProfileReport) -> None:
    gigabytes = report.expert.bfloat16_bytes / 1e9
    _table(
        console,
        f"execution of one expert (p), {report.torch_threads} torch threads",
        ["tokens", "ms", "GB/s of weights"],
        (
            [
                str(time.tokens),
                f"{time.seconds.median * 1e3:.3f} ± {(time.seconds.high - time.seconds.low) / 2e-3:.3f}",
                f"{gigabytes / time.seconds.median:.1f}",
            ]
            for time in report.execution
        ),
    )


def _fused(console: Console, report: ProfileReport) -> None:
    if not report.fused:
        return
    _table(
        console,
        f"execution of one expert as it lies in memory (mode fast), {report.workers} threads",
        ["form", "tokens", "ms", "GB/s of this form"],
        (
            [
                time.form,
                str(time.tokens),
                f"{time.seconds.median * 1e3:.3f} ± {(time.seconds.high - time.seconds.low) / 2e-3:.3f}",
                f"{time.expert_bytes / time.seconds.median / 1e9:.1f}",
            ]
            for time in report.fused
        ),
    )


def _dispatch(console: Console, report: ProfileReport) -> None:
    if report.dispatch_seconds is not None:
        console.print(f"one small torch operation, µs: {_micro(report.dispatch_seconds)}\n")


def _codec_name(codec: CodecRates) -> str:
    level = "" if codec.level is None else f" {codec.level}"
    return f"{codec.codec}{level}{' (folder)' if codec.of_folder else ''}"


def _giga(rate: Estimate | None) -> str:
    return NOT_MEASURED if rate is None else f"{rate.median / 1e9:.2f} ± {(rate.high - rate.low) / 2e9:.2f}"


def _micro(seconds: Estimate) -> str:
    return f"{seconds.median * 1e6:.0f} ± {(seconds.high - seconds.low) / 2e-6:.0f}"


def _shard_milliseconds(shard_bytes: int, rate: Estimate | None) -> str:
    return NOT_MEASURED if rate is None else f"{shard_bytes / rate.median * 1e3:.3f}"
