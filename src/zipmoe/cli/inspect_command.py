"""``zipmoe inspect``."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from zipmoe.store.inspection import FolderSummary, PartSummary


def inspect_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Packed folder")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Show what a packed folder contains: layers, experts, sizes, codec, and what was left unpacked and why."""
    from zipmoe.store.inspection import summarize
    from zipmoe.store.packed_folder import PackedFolder

    summary = summarize(PackedFolder.open(folder))
    if as_json:
        typer.echo(json.dumps({**asdict(summary), "ratio": summary.ratio}, indent=2))
    else:
        _print_tables(summary)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.3f}" if 0 < count < 100_000 else f"{count / 1e6:,.1f}"


def _print_tables(summary: FolderSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    level = f", level {summary.codec.level}" if summary.codec.level is not None else ""
    shards = f", {summary.codec.shards} shards" if summary.codec.shards > 1 else ""
    console.print(
        f"{summary.architecture} ({summary.model_type}), packed with {summary.codec.name}{level}{shards} "
        f"by zipmoe {summary.zipmoe_version}, format {summary.format_version}",
        highlight=False,
    )
    table = Table("layer", "experts", "MB before", "MB after", "ratio", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"

    def add(name: str, experts: str, before: int, after: int) -> None:
        ratio = f"{after / before:.4f}" if before else ""
        table.add_row(name, experts, _megabytes(before), _megabytes(after), ratio)

    for layer in summary.layers:
        add(layer.name, str(layer.experts), layer.bytes_before, layer.bytes_after)
    before, after = _totals(summary.dense)
    if summary.dense:
        add(f"{len(summary.dense)} dense {'matrix' if len(summary.dense) == 1 else 'matrices'}", "", before, after)
    unpacked = sum(reason.bytes for reason in summary.unpacked)
    add("not packed", "", unpacked, unpacked)
    if summary.ignored_source_bytes:
        add("dropped", "", summary.ignored_source_bytes, 0)
    add("file headers", "", 0, summary.header_bytes)
    experts = sum(layer.experts for layer in summary.layers)
    add("total", str(experts), summary.source_bytes, summary.folder_bytes)
    console.print(table)
    if summary.unpacked:
        reasons = Table("not packed because", "tensors", "MB", box=None, pad_edge=False)
        for column in reasons.columns[1:]:
            column.justify = "right"
        for reason in sorted(summary.unpacked, key=lambda r: -r.bytes):
            reasons.add_row(reason.reason, str(reason.tensors), _megabytes(reason.bytes))
        console.print()
        console.print(reasons)
    if summary.ignored_source_keys:
        console.print(f"\n{summary.ignored_source_keys} source tensors dropped: the model itself ignores them")


def _totals(parts: tuple[PartSummary, ...]) -> tuple[int, int]:
    return sum(p.bytes_before for p in parts), sum(p.bytes_after for p in parts)
