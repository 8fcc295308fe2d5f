"""Which implementation a configuration names, read at every token: the public properties take 10 microseconds each,
because configurations look every attribute up in several places.
"""

from __future__ import annotations

from typing import Any


def attention_implementation(config: Any) -> str | None:
    """``config._attn_implementation``."""
    return _choice(config, "_attn_implementation")


def experts_implementation(config: Any) -> str | None:
    """``config._experts_implementation``."""
    return _choice(config, "_experts_implementation")


def _choice(config: Any, name: str) -> str | None:
    try:
        choice: str | None = object.__getattribute__(config, f"{name}_internal")
    except AttributeError:
        choice = getattr(config, name)
    return choice
