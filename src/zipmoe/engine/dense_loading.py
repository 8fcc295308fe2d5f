"""Reads the dense records at the start, with a progress bar where it takes long and somebody watches."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

PROGRESS_AFTER_SECONDS = 2.0


def load_dense(native_engine: Any) -> None:
    """Wait until all dense records are in memory; interruptible.

    Args:
        native_engine: ``_native.Engine``; its RecordError passes through.
    """
    begin = time.perf_counter()
    done, total = native_engine.load_dense()
    while done < total and time.perf_counter() - begin < PROGRESS_AFTER_SECONDS:
        done, total = native_engine.load_dense()
    if done == total:
        return
    console = Console(stderr=True)
    columns = ("loading dense weights", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("", total=total)
        while done < total:
            done, total = native_engine.load_dense()
            progress.update(task, completed=done)
