"""Checks of options that an engine and those who open one take."""

from __future__ import annotations

from collections.abc import Sequence

from zipmoe.errors import InvalidArgumentError


def positive(name: str, value: int | None, default: int) -> int:
    """``value``, or ``default`` where it is None; InvalidArgumentError below 1."""
    if value is None:
        return default
    if value < 1:
        raise InvalidArgumentError(f"{name} must be at least 1, not {value}")
    return value


def one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    """``value``; InvalidArgumentError if it is none of ``allowed``."""
    if value not in allowed:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
    return value
