"""``zipmoe verify``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from zipmoe.cli.progress import byte_progress, talk
from zipmoe.engine.byte_quantity import format_bytes


def verify_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Packed folder")],
    against: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="The original checkpoint (folder, or organisation/model): compare every decoded tensor, bit for bit",
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Records checked at once [default: one per core]")] = None,
) -> None:
    """Check every checksum of a packed folder; with --against every bit of every tensor."""
    from zipmoe.checkpoint.source import resolve_source
    from zipmoe.store.packed_folder import PackedFolder
    from zipmoe.store.verify import verify
    from zipmoe.store.worker_count import worker_count

    worker_count(jobs)
    original = resolve_source(against) if against is not None else None
    opened = PackedFolder.open(folder)
    total = sum(record.length for record in opened.manifest.records())
    began = time.monotonic()
    done = 0
    with byte_progress() as bar:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar.update(done, total, "verifying")

        result = verify(opened, against=original, jobs=jobs, advance=advance)
    seconds = time.monotonic() - began
    for name in result.changed_side_files:
        what = "was changed since the pack" if (opened.path / name).exists() else "is missing"
        talk(f"note: {name} {what} (it holds no weights)")
    line = f"{result.records} records ({format_bytes(result.record_bytes)}) intact"
    if result.against is not None:
        line += (
            f"; {result.matrices_compared} packed matrices and {result.plain_tensors_compared} plain tensors equal "
            f"{result.against} bit for bit"
        )
    typer.echo(f"{line} ({seconds:.1f} s)")
