"""How busy others kept the machine while the contenders ran."""

from __future__ import annotations

import os
import time

from zipmoe.profiling.disk_identity import OtherLoad


class LoadBesideWorkers:
    """Cores in use by processes that are neither this one nor its ended children, since this was made."""

    def __init__(self) -> None:
        """Begin to look."""
        self._load = OtherLoad()
        self._began = time.monotonic()
        self._children = _children_seconds()

    def cores(self) -> float:
        """Mean number of cores; 0 where the kernel does not tell."""
        wall = time.monotonic() - self._began
        workers = (_children_seconds() - self._children) / wall if wall > 0 else 0.0
        return max(0.0, self._load.cores() - workers)


def _children_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system
