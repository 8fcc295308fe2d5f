"""Files that are either complete or not there: written under a temporary name, flushed to the device, renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from zipmoe.errors import NotEnoughDiskError

PARTIAL_SUFFIX = ".partial"


def partial_path(path: Path) -> Path:
    """The temporary name under which ``path`` is written."""
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


def flush_to_device(file: IO[Any]) -> None:
    """Flush Python's buffer and the kernel's, so that the bytes survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def flush_directory(directory: Path) -> None:
    """Make renames and new names inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(path: Path) -> None:
    """Give the finished partial file of ``path`` its final name, durably."""
    partial_path(path).replace(path)
    flush_directory(path.parent)


@contextmanager
def durable_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open the partial file of ``path`` for writing; on success it replaces ``path``, on an exception it is removed."""
    temporary = partial_path(path)
    try:
        with temporary.open("wb") as file:
            yield file
            flush_to_device(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    publish(path)


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write ``value`` as JSON, durably and atomically; escaped, because names of files need not be valid Unicode."""
    with durable_writer(path) as file:
        file.write(_encoded(value, indent))


def write_json_together(values: Mapping[Path, Any]) -> None:
    """Write several files as ``write_json`` does: none gets its name before all are on the device."""
    with ExitStack() as stack:
        for path, value in values.items():
            file = stack.enter_context(durable_writer(path))
            file.write(_encoded(value, 2))
            flush_to_device(file)


def _encoded(value: Any, indent: int | None) -> bytes:
    return json.dumps(value, indent=indent).encode() + b"\n"


@contextmanager
def clear_write_errors(path: Path) -> Iterator[None]:
    """Around everything that writes ``path``, and nothing else: errors of the system then say which file it was.

    Raises:
        NotEnoughDiskError: the disk is full, or the user's share of it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NotEnoughDiskError(
                f"{str(path)!r} cannot be written: the disk is full; nothing of it was left there",
                hint="free some space, or choose another place",
            ) from error
        error.filename = str(path)
        raise
