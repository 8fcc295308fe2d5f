"""Progress bars on standard error: only on a terminal, never in the way of data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Bar(Protocol):
    """What a long operation reports to."""

    def update(self, done_bytes: int, total_bytes: int, stage: str) -> None:
        """Show how far the operation is."""


class _Silent:
    def update(self, done_bytes: int, total_bytes: int, stage: str) -> None:
        pass


@contextmanager
def byte_progress() -> Iterator[Bar]:
    """A bar with stage, percentage, rate and time left; silent when standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield _Silent()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=None)

        class _Rich:
            def update(self, done_bytes: int, total_bytes: int, stage: str) -> None:
                progress.update(task, completed=done_bytes, total=total_bytes, description=stage)

        yield _Rich()


def talk(message: str) -> None:
    """One line to standard error."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
