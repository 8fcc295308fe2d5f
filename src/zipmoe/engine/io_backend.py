"""Which backend reads from disk, and how many reads it keeps under way: a pool of threads, or io_uring.

``"auto"`` is the pool: where cores are idle both read at the disk's rate, and where they are busy, as they are while
experts are decoded and multiplied, the pool reads faster (docs/results). How many reads at a time a disk wants is
measured by ``zipmoe profile`` (docs/profiling.md); without that, constants that do for most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zipmoe import _native
from zipmoe.engine.option_checks import one_of, positive
from zipmoe.errors import InvalidArgumentError

IO_BACKENDS = ("auto", "threads", "uring")
DEFAULT_IO_THREADS = 4
"""Chunks of up to 4 MiB in flight: enough for the disk's queue, and checksums run beside the reads."""
DEFAULT_IO_DEPTH = 8
"""Blocks of up to 2 MiB that io_uring has at a time."""
LARGEST_IO_DEPTH = 4096
CHUNK_BYTES = {"threads": 4 << 20, "uring": 2 << 20}
"""The longest blocks that the native core cuts reads into, by backend; they become shorter towards a read's end."""


@dataclass(frozen=True)
class MeasuredReads:
    """How many reads at a time the folder's disk wants."""

    by_backend: Mapping[str, int] = field(default_factory=dict)
    """``"threads"``: threads; ``"uring"``: depth of its queue. A backend that is missing was not measured."""
    origin: str = ""
    """Where the numbers come from, for people."""


@dataclass(frozen=True)
class ReadSettings:
    """What the native core is asked for."""

    backend: str
    """``"threads"`` or ``"uring"``."""
    threads: int = DEFAULT_IO_THREADS
    """Of the backend threads."""
    depth: int = DEFAULT_IO_DEPTH
    """Of io_uring's queue, in blocks."""
    origin: str = ""
    """Where the number of reads comes from, for people; empty: nobody but the caller, or the engine's default."""

    def describe(self) -> str:
        """Part of the mode line."""
        if self.backend == "uring":
            how = f"io_uring, {self.depth} {'block' if self.depth == 1 else 'blocks'} at a time"
        else:
            how = f"{self.threads} thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{how} ({self.origin})" if self.origin else how


def choose_reads(
    backend: str, io_threads: int | None = None, io_depth: int | None = None, measured: MeasuredReads | None = None
) -> ReadSettings:
    """The backend to ask the native core for, and its number of reads under way: the caller's, else the measured one,
    else the default.

    Args:
        backend: one of IO_BACKENDS.
        io_threads: threads that the caller wants; only the backend ``"threads"`` has any.
        io_depth: depth of the queue that the caller wants; only the backend ``"uring"`` has one.
        measured: what was measured on the disk.

    Raises:
        InvalidArgumentError: the choice is unknown or contradicts itself, or ``"uring"`` cannot be used here.
    """
    one_of("io_backend", backend, IO_BACKENDS)
    threads = positive("io_threads", io_threads, DEFAULT_IO_THREADS)
    depth = positive("io_depth", io_depth, DEFAULT_IO_DEPTH)
    if depth > LARGEST_IO_DEPTH:
        raise InvalidArgumentError(f"io_depth must be at most {LARGEST_IO_DEPTH}, not {depth}")
    if backend == "uring":
        if io_threads is not None:
            raise InvalidArgumentError("io_threads are of the backend threads, not of uring", hint="give io_depth")
        if refusal := _native.uring_refusal():
            raise InvalidArgumentError(f"the backend uring cannot be used: {refusal}", hint="choose auto or threads")
    elif io_depth is not None:
        raise InvalidArgumentError("io_depth is of the backend uring, not of threads", hint="give io_threads")
    chosen = "uring" if backend == "uring" else "threads"
    best = None if measured is None or (io_threads or io_depth) else measured.by_backend.get(chosen)
    if measured is None or best is None:
        return ReadSettings(chosen, threads, depth)
    return ReadSettings(chosen, **{"depth" if chosen == "uring" else "threads": best}, origin=measured.origin)
