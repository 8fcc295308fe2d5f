"""How many records are worked on at once."""

from __future__ import annotations

import os

from zipmoe.errors import InvalidArgumentError


def worker_count(jobs: int | None) -> int:
    """``jobs``, or one worker for each core that this process may use if None.

    Raises:
        InvalidArgumentError: ``jobs`` is not positive.
    """
    if jobs is None:
        return len(os.sched_getaffinity(0))
    if jobs < 1:
        raise InvalidArgumentError(f"--jobs {jobs} is not a positive number")
    return jobs
