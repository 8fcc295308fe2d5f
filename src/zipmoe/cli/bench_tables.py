"""What ``zipmoe bench`` prints for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table as RichTable

from zipmoe.bench.comparison_table import Table, agreement_lines, tables

if TYPE_CHECKING:
    from zipmoe.bench.result_file import BenchmarkResult

_LEAST_WIDTH = 300
"""Narrower terminals wrap lines; cut numbers would be worse."""

_TEXT = ("why", "best setting")


def print_comparison(result: BenchmarkResult) -> None:
    """Print the result to standard output."""
    print_tables(result.heading(), tables(result), agreement_lines(result.agreements))


def print_tables(heading: Sequence[str], found: Sequence[Table], closing: Sequence[str] = ()) -> None:
    """Print lines, tables and more lines to standard output."""
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for line in heading:
        console.print(line, markup=False)
    for table in found:
        rich_table = RichTable(title=table.title, title_justify="left", title_style="bold", box=None)
        for number, heading_cell in enumerate(table.headings):
            justify: Literal["left", "right"] = "left" if number < 2 or heading_cell in _TEXT else "right"
            rich_table.add_column(heading_cell, justify=justify, no_wrap=True)
        for row in table.rows:
            rich_table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print()
        console.print(rich_table)
    for line in closing:
        console.print(line, markup=False)
