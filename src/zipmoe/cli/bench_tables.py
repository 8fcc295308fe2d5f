"""What ``zipmoe bench`` prints for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table as RichTable

from zipmoe.bench.comparison_table import agreement_lines, tables

if TYPE_CHECKING:
    from zipmoe.bench.result_file import BenchmarkResult

_LEAST_WIDTH = 300
"""Narrower terminals wrap lines; cut numbers would be worse."""

_TEXT = ("why", "best setting")


def print_comparison(result: BenchmarkResult) -> None:
    """Print the result to standard output."""
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, _LEAST_WIDTH)
    for line in result.heading():
        console.print(line, markup=False)
    for table in tables(result):
        rich_table = RichTable(title=table.title, title_justify="left", title_style="bold", box=None)
        for number, heading in enumerate(table.headings):
            rich_table.add_column(heading, justify="left" if number < 2 or heading in _TEXT else "right", no_wrap=True)
        for row in table.rows:
            rich_table.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print()
        console.print(rich_table)
    for line in agreement_lines(result.agreements):
        console.print(line, markup=False)
