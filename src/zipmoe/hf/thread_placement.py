"""Threads of a loaded model: on which CPUs, and how they wait; what the mode line says of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zipmoe.engine.cpu_affinity import describe_cpus, keep_process_on
from zipmoe.openmp_waiting import spinning_note


def place_threads(cpus: Sequence[int] | None) -> None:
    """Keep this process on ``cpus`` and let torch use no more threads than there are; None: leave everything.

    Raises:
        InvalidArgumentError: the process may not use one of them.
    """
    if cpus is None:
        return
    keep_process_on(cpus)
    torch.set_num_threads(min(torch.get_num_threads(), len(cpus)))


def thread_notes(cpus: Sequence[int] | None) -> list[str]:
    """Parts of the mode line."""
    parts = [] if cpus is None else [f"all threads on CPU{'s' if len(cpus) > 1 else ''} {describe_cpus(cpus)}"]
    spinning = spinning_note()
    return [*parts, spinning] if spinning else parts
