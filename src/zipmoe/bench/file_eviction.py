"""Drops what the page cache holds of a model's files.

Pages that another process has read are charged to that one: a contender under a limit would have them for nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from zipmoe import _native


def evict(paths: Iterable[Path]) -> int:
    """Drop the cached pages of files and of all files below folders.

    Returns:
        Bytes that are still cached: pages that somebody has mapped, or that lie in a file system in memory. Files of
        others, about which the kernel tells nothing, are not counted.
    """
    still_cached = 0
    for path in _files(paths):
        with contextlib.suppress(OSError):  # a file that is gone, or not ours to read, is not read by a contender
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # pages that wait to be written cannot be dropped
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            status = path.stat()
            if status.st_size and (status.st_uid == os.geteuid() or os.access(path, os.W_OK)):
                still_cached += _native.cached_bytes(str(path), 0, status.st_size)
    return still_cached


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file())
        elif path.is_file():
            yield path
