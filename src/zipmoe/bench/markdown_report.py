"""The result as Markdown."""

from __future__ import annotations

from zipmoe.bench.comparison_table import Table, agreement_lines, tables
from zipmoe.bench.result_file import BenchmarkResult


def markdown(result: BenchmarkResult) -> str:
    """A document with the settings on top and the tables below."""
    parts = ["# zipmoe bench", "\n".join(f"- {line}" for line in result.heading())]
    parts += [_markdown_table(table) for table in tables(result)]
    lines = agreement_lines(result.agreements)
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [table.headings, tuple("---" for _ in table.headings), *table.rows]
    return f"## {table.title}\n" + "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
