"""Cells of the comparison as people read them: for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zipmoe.bench.comparison import Agreement, Row
from zipmoe.bench.result_file import BenchmarkResult
from zipmoe.engine.byte_quantity import format_bytes

NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """Headings and rows of cells."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(result: BenchmarkResult) -> list[Table]:
    """Latency of single prompts, throughput of batches (if any were measured), and what did not run."""
    rows = result.rows
    single = [row for row in rows if row.batch == 1 and row.generations]
    batched = [row for row in rows if row.batch > 1 and row.generations]
    failed = [row for row in rows if row.reason is not None]
    found = []
    if single:
        found.append(_latency(single))
    if batched:
        found.append(_throughput(single + batched))
    if failed:
        found.append(_failures(failed))
    return found


def agreement_lines(agreements: Sequence[Agreement]) -> list[str]:
    """One line per contender."""
    return [
        f"{each.contender}: {each.equal_tokens} of {each.tokens} tokens are those of plain Transformers "
        "(counted up to the first difference of each prompt)"
        for each in agreements
    ]


def _latency(rows: Sequence[Row]) -> Table:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("memory", _level),
        ("contender", lambda row: row.contender),
        ("best setting", lambda row: row.settings or NOTHING),
        ("load s", lambda row: _seconds(row.load_seconds)),
        ("TTFT s, first", lambda row: _seconds(row.first_ttft_seconds)),
        ("TTFT s, median", lambda row: _seconds(row.ttft_seconds)),
        ("TPOT s, median", lambda row: _seconds(row.tpot_seconds)),
        ("TPOT s, p95", lambda row: _seconds(row.tpot_p95_seconds)),
        ("/ zipmoe's", lambda row: _number(row.slower_than_zipmoe, "{:.2f}x")),
        ("read per token", lambda row: _bytes(row.read_bytes_per_token)),
        ("peak memory", lambda row: _bytes(row.peak_bytes)),
        ("hit rate", lambda row: _number(row.hit_rate, "{:.1%}")),
        ("achieved / floor", _floor),
        ("TTFT / floor", _prefill_floor),
    ]
    return _table("One prompt at a time", columns, rows)


def _throughput(rows: Sequence[Row]) -> Table:
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("memory", _level),
        ("contender", lambda row: row.contender),
        ("batch", lambda row: str(row.batch)),
        ("tokens/s", lambda row: _number(row.tokens_per_second, "{:.3g}")),
        ("/ its batch 1", lambda row: _number(_over_single(row, rows), "{:.2f}x")),
        ("TTFT s", lambda row: _seconds(row.ttft_seconds)),
        ("read per token", lambda row: _bytes(row.read_bytes_per_token)),
        ("achieved / floor", _floor),
    ]
    return _table("Batches", columns, sorted(rows, key=lambda row: (row.limit_bytes, row.contender, row.batch)))


def _failures(rows: Sequence[Row]) -> Table:
    reasons = dict.fromkeys((_level(row), row.contender, row.reason or "") for row in rows)
    return Table("Not, or not all, measured", ("memory", "contender", "why"), tuple(reasons))


def _table(title: str, columns: Sequence[tuple[str, Callable[[Row], str]]], rows: Sequence[Row]) -> Table:
    cells = tuple(tuple(cell(row) for _, cell in columns) for row in rows)
    return Table(title, tuple(heading for heading, _ in columns), cells)


def _over_single(row: Row, rows: Sequence[Row]) -> float | None:
    for other in rows:
        same = (other.contender, other.level, other.batch) == (row.contender, row.level, 1)
        if same and other.tokens_per_second and row.tokens_per_second:
            return row.tokens_per_second / other.tokens_per_second
    return None


def _level(row: Row) -> str:
    amount = format_bytes(row.limit_bytes)
    return amount if row.level == amount else f"{row.level} ({amount})"


def _floor(row: Row) -> str:
    if row.roofline is None:
        return NOTHING
    floor = row.roofline
    return f"{floor.achieved_over_floor:.2f} ({floor.bound_by}: {floor.floor_seconds:.4f} s)"


def _prefill_floor(row: Row) -> str:
    if row.prefill is None:
        return NOTHING
    floor = row.prefill
    strict = f"strict {floor.achieved_over_strict_floor:.2f}"
    return f"{floor.achieved_over_floor:.2f} ({floor.bound_by}: {floor.floor_seconds:.3f} s; {strict})"


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.4f}"


def _bytes(value: float | None) -> str:
    return NOTHING if value is None else format_bytes(round(value))


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)
