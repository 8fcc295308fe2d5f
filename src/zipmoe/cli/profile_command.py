"""``zipmoe profile``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from zipmoe.cli.progress import fraction_progress, talk


def profile_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Packed folder")],
    output: Annotated[
        Path | None, typer.Option(help="Write the profile to this file [default: the user's cache]")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Time for everything together")] = 40.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Measure this machine for the planner: disk, decompression, memory, execution of experts."""
    from zipmoe.cli.profile_tables import print_tables
    from zipmoe.errors import PackedFolderError
    from zipmoe.profiling.measure import check_seconds, measure, provenance
    from zipmoe.profiling.profile_store import check_destination, profile_path, report_path, save_profile
    from zipmoe.store.packed_folder import PackedFolder

    check_seconds(seconds)
    try:
        opened = PackedFolder.open(folder)
        path = output if output is not None else profile_path(provenance(opened))
        check_destination(path, opened.path)
        with fraction_progress("profile") as bar:
            report = measure(opened, seconds, progress=bar.update)
    except PermissionError as error:
        raise PackedFolderError(
            f"cannot read {str(error.filename or folder)!r}: {error.strerror}",
            hint="check the permissions of the folder",
        ) from error
    if as_json:
        typer.echo(json.dumps(report.to_json(), indent=2))
    else:
        print_tables(report)
    save_profile(report, path)  # last: if the disk is full, the numbers have been seen all the same
    talk(f"profile written to {path} (all numbers: {report_path(path).name}) in {report.measured_seconds:.0f} s")
