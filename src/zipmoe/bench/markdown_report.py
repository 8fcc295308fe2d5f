"""The result as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from zipmoe.bench.comparison_table import Table, agreement_lines, tables
from zipmoe.bench.result_file import BenchmarkResult


def markdown(result: BenchmarkResult) -> str:
    """A document with the settings on top and the tables below."""
    return document("zipmoe bench", result.heading(), tables(result), agreement_lines(result.agreements))


def document(title: str, heading: Sequence[str], found: Sequence[Table], closing: Sequence[str]) -> str:
    """A title, the heading's lines as a list, tables under titles of their own, and closing lines as a list."""
    parts = [f"# {title}", "\n".join(f"- {line}" for line in heading)]
    parts += [_markdown_table(table) for table in found]
    if closing:
        parts.append("\n".join(f"- {line}" for line in closing))
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    lines = [table.headings, tuple("---" for _ in table.headings), *table.rows]
    return f"## {table.title}\n" + "\n".join("| " + " | ".join(map(_escaped, line)) + " |" for line in lines)


def _escaped(cell: str) -> str:
    return " ".join(cell.split()).replace("|", "\\|")
