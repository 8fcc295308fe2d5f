"""What the kernel benchmarks found, as tables for people, and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from zipmoe.bench.comparison_table import NOTHING, Table
from zipmoe.bench.kernels.kernel_result import KernelResult
from zipmoe.bench.kernels.product_methods import Form
from zipmoe.bench.kernels.product_rates import ProductRates, ProductTimes
from zipmoe.bench.markdown_report import document

_PRODUCT_HEADINGS = (
    "shape",
    "tokens",
    "cores",
    "kernels",
    "packed us (GB/s)",
    "raw us (GB/s)",
    "torch us (GB/s)",
    "packed faster than raw",
    "than torch",
    "packed: achieved / floor",
    "raw: achieved / floor",
)
_SUMMARY_HEADINGS = ("tokens", "cores", "kernels", *_PRODUCT_HEADINGS[-4:])


def kernel_tables(result: KernelResult) -> list[Table]:
    """A summary over the shapes, every product, and decoding."""
    found = [_summary(result), _products(result)]
    if result.decoding:
        found.append(_decoding(result))
    return found


def kernel_markdown(result: KernelResult) -> str:
    """A document with the settings on top and the tables below."""
    return document("zipmoe bench --kernels", result.heading(), kernel_tables(result), [])


def _summary(result: KernelResult) -> Table:
    keys = sorted({(rates.threads, rates.tokens) for rates in result.products})
    rows = []
    for threads, tokens in keys:
        alike = [rates for rates in result.products if (rates.threads, rates.tokens) == (threads, tokens)]
        for name in result.names:
            ratios = zip(*(_ratios(rates, name) for rates in alike), strict=True)
            rows.append((str(tokens), str(threads), name, *(_factor(_median(column)) for column in ratios)))
    return Table("Products: medians over the shapes", _SUMMARY_HEADINGS, tuple(rows))


def _products(result: KernelResult) -> Table:
    rows = []
    for rates in result.products:
        for name in result.names:
            packed, raw = rates.of(Form.FUSED, name), rates.of(Form.RAW, name)
            times = (_times(each) for each in (packed, raw, rates.of(Form.TORCH)))
            where = (f"{rates.rows} x {rates.columns}", str(rates.tokens), str(rates.threads), name)
            rows.append((*where, *times, *(_factor(value) for value in _ratios(rates, name))))
    return Table("Products: GB/s of the weights as each reads them", _PRODUCT_HEADINGS, tuple(rows))


def _decoding(result: KernelResult) -> Table:
    names = list(result.decoding[0].one_core_seconds)
    cores = result.decoding[0].all_cores
    headings = ("codec", "size / BF16", *(f"{name}, one core" for name in names), f"best, {cores} cores")
    rows = tuple(
        (
            rates.key,
            f"{rates.ratio:.4f}",
            *(f"{rates.one_core_bytes_per_second(name) / 1e9:.2f}" for name in names),
            f"{rates.all_cores_bytes_per_second / 1e9:.2f}",
        )
        for rates in result.decoding
    )
    return Table("Decoding: GB/s of BF16", headings, rows)


def _ratios(rates: ProductRates, name: str) -> tuple[float | None, float | None, float | None, float | None]:
    """Packed over raw, packed over torch, achieved over floor of packed and of raw."""
    packed, raw, torch = rates.of(Form.FUSED, name), rates.of(Form.RAW, name), rates.of(Form.TORCH)
    return (
        packed.faster_than(raw) if packed and raw else None,
        packed.faster_than(torch) if packed and torch else None,
        rates.achieved_over_floor(packed) if packed else None,
        rates.achieved_over_floor(raw) if raw else None,
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _times(times: ProductTimes | None) -> str:
    if times is None:
        return NOTHING
    return f"{times.median_seconds * 1e6:.0f} ({times.bytes_per_second / 1e9:.1f})"


def _factor(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
