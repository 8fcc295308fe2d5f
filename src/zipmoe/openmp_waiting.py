"""How torch's threads wait between products: they sleep, unless a person says otherwise.

By default OpenMP's threads spin for milliseconds after every product, on the cores that decode the next matrix: on two
cores a token of an 8 GB model took 0.65 s instead of 0.42 s. OpenMP reads its settings once, when torch is imported.
"""

from __future__ import annotations

import os
import sys

POLICY = "OMP_WAIT_POLICY"
_SETTINGS = (POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Any of them says how threads wait."""


def let_threads_sleep() -> None:
    """Set ``OMP_WAIT_POLICY=passive`` where nobody has said how threads wait, and torch has not been imported yet.

    The environment is inherited: processes that this one starts wait in the same way.
    """
    if "torch" not in sys.modules and not _is_said():
        os.environ[POLICY] = "passive"


def spinning_note() -> str:
    """For the mode line: that torch's threads spin, and what to do about it; empty if somebody said how they wait."""
    if _is_said():
        return ""
    return f"torch's threads spin between products (import zipmoe before torch, or set {POLICY}=passive)"


def _is_said() -> bool:
    return any(name in os.environ for name in _SETTINGS)
