"""Ctrl-C at a chosen moment of a native call."""

from __future__ import annotations

import signal
from typing import Any


class Interrupted:
    """A native engine during one of whose calls Ctrl-C is pressed: Python raises it as soon as the call returns."""

    def __init__(self, native: Any, call: str) -> None:
        self._native = native
        self._call = call

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._native, name)
        if name != self._call:
            return attribute

        def interrupted(*arguments: Any) -> Any:
            result = attribute(*arguments)
            signal.raise_signal(signal.SIGINT)
            return result

        return interrupted
