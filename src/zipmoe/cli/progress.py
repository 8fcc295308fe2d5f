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


class FractionBar(Protocol):
    """What an operation of known duration reports to."""

    def update(self, stage: str, fraction: float) -> None:
        """Show how far the operation is: 0 to 1."""


class _Silent:
    def update(self, done_bytes: int, total_bytes: int, stage: str) -> None:
        pass


class _SilentFraction:
    def update(self, stage: str, fraction: float) -> None:
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


@contextmanager
def fraction_progress(name: str) -> Iterator[FractionBar]:
    """A bar with stage, percentage and elapsed time; silent when standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield _SilentFraction()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=1.0)

        class _Rich:
            def update(self, stage: str, fraction: float) -> None:
                progress.update(task, completed=fraction, description=stage)

        yield _Rich()


def talk(message: str) -> None:
    """One line to standard error."""
    sys.stderr.write(f"{message}\n")
    sys.stderr.flush()
