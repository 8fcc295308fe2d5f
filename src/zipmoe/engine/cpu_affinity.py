"""Which CPUs a process computes, decodes and reads on: a list as people write it, checked, and kept by all threads.

The kernel keeps an affinity for every thread, and new threads begin with that of the thread that starts them. So it is
enough to set it for the threads that are there: those of torch, of the engine and of its reader come later or follow.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from zipmoe.errors import InvalidArgumentError

_LARGEST_CPU = 1 << 16
_PLACED_BY_OTHERS = ("OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""OpenMP places torch's threads itself where one of these is set."""
_TASKS = Path("/proc/self/task")


def parse_cpus(cpus: str | Sequence[int]) -> tuple[int, ...]:
    """Distinct CPU numbers, ascending, of a list such as ``"0-3,6"`` or ``[0, 1, 2, 3, 6]``.

    Raises:
        InvalidArgumentError: it is no such list.
    """
    numbers: set[int] = set()
    try:
        for part in cpus.split(",") if isinstance(cpus, str) else cpus:
            first, last = _range(part)
            if not 0 <= first <= last <= _LARGEST_CPU:
                raise ValueError
            numbers.update(range(first, last + 1))
    except (TypeError, ValueError):
        numbers.clear()
    if not numbers:
        raise InvalidArgumentError(f"cpus {cpus!r} is not a list of CPUs", hint="give numbers and ranges, as in 0-3,6")
    return tuple(sorted(numbers))


def _range(part: str | int) -> tuple[int, int]:
    if isinstance(part, str):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError
        return int(first), int(last if dash else first)
    if isinstance(part, bool) or not isinstance(part, int):
        raise TypeError
    return part, part


def describe_cpus(cpus: Collection[int]) -> str:
    """The list in its shortest form: ``0-3,6``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def check_cpus(cpus: Collection[int]) -> None:
    """Refuse CPUs that this process cannot be kept on.

    Raises:
        InvalidArgumentError: it may not use one of them, or the environment has OpenMP place torch's threads.
    """
    allowed = os.sched_getaffinity(0)
    refused = set(cpus) - allowed
    if refused:
        what = f"CPU {describe_cpus(refused)} is" if len(refused) == 1 else f"CPUs {describe_cpus(refused)} are"
        raise InvalidArgumentError(
            f"cpus {describe_cpus(cpus)}: {what} not among those that this process may use",
            hint=f"it may use {describe_cpus(allowed)}",
        )
    for name in _PLACED_BY_OTHERS:
        if os.environ.get(name, "false").lower() not in ("", "false"):
            raise InvalidArgumentError(
                f"cpus cannot be chosen while {name} tells OpenMP where to put torch's threads",
                hint=f"leave out cpus, or unset {name}",
            )


def keep_process_on(cpus: Collection[int]) -> None:
    """Keep all threads of this process, and those that they start from now on, on ``cpus``, until it ends.

    Raises:
        InvalidArgumentError: as ``check_cpus``.
    """
    check_cpus(cpus)
    os.sched_setaffinity(0, cpus)
    for _ in range(2):  # once more for threads that others started meanwhile
        for task in _TASKS.iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(task.name), cpus)
