"""Which backend reads from disk: a pool of threads, or io_uring.

``"auto"`` is the pool: where cores are idle both read at the disk's rate, and where they are busy, as they are while
experts are decoded and multiplied, the pool reads faster (docs/results).
"""

from __future__ import annotations

from zipmoe import _native
from zipmoe.engine.option_checks import one_of
from zipmoe.errors import InvalidArgumentError

IO_BACKENDS = ("auto", "threads", "uring")


def choose_io_backend(backend: str, io_threads: int | None) -> str:
    """The backend to ask the native core for.

    Args:
        backend: one of IO_BACKENDS.
        io_threads: threads that the caller wants; only the backend ``"threads"`` has any.

    Raises:
        InvalidArgumentError: the choice is unknown or contradicts itself, or ``"uring"`` cannot be used here.
    """
    one_of("io_backend", backend, IO_BACKENDS)
    if backend == "uring":
        if io_threads is not None:
            raise InvalidArgumentError("io_threads are of the backend threads, not of uring", hint="leave one out")
        if refusal := _native.uring_refusal():
            raise InvalidArgumentError(f"the backend uring cannot be used: {refusal}", hint="choose auto or threads")
    return "threads" if backend == "auto" else backend
