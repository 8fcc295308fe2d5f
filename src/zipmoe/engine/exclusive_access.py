"""The engine's lock: one thread uses scratch and the open request at a time; the same thread may nest."""

from __future__ import annotations

import threading


class ExclusiveAccess:
    """A re-entrant lock whose holds may be given up by any thread.

    A generator that was abandoned half-way is closed by whichever thread collects it; ``threading.RLock`` refuses that.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._owner: int | None = None
        self._depth = 0

    def acquire(self) -> None:
        """Wait until no other thread holds it (interruptible by Ctrl-C)."""
        me = threading.get_ident()
        with self._changed:
            while self._depth > 0 and self._owner != me:
                self._changed.wait()
            self._owner = me
            self._depth += 1

    def release(self) -> None:
        """Give up one hold."""
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                self._owner = None
                self._changed.notify()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
