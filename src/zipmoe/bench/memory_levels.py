"""How much memory a contender may use: a share of the model's size in BF16, an amount, or enough for all of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zipmoe.engine.byte_quantity import format_bytes, parse_bytes
from zipmoe.engine.limits import detect_limits
from zipmoe.errors import InvalidArgumentError

FITS = "fits"
_FITS_SHARE = 1.5
_FITS_EXTRA_BYTES = 2_000_000_000
"""Interpreters, activations, and the page cache that a loader fills beside its weights."""
_USABLE_SHARE = 0.9
"""Of the machine: the benchmark itself and the system need the rest."""


@dataclass(frozen=True)
class MemoryLevel:
    """One limit."""

    label: str
    """As it was asked for: ``25%``, ``4GB``, ``fits``."""
    limit_bytes: int
    fits: bool
    """Whether the whole model in BF16 fits, with room to spare."""


def memory_levels(text: str, source_bytes: int, usable_bytes: int | None = None) -> tuple[MemoryLevel, ...]:
    """Levels of a list like ``25%,50%,fits`` or ``2GB,4GB``.

    Args:
        text: the list.
        source_bytes: all tensors of the original checkpoint.
        usable_bytes: of this machine [default: what it and its control groups allow].

    Raises:
        InvalidArgumentError: a level is malformed, or more than the machine has.
    """
    usable = usable_bytes if usable_bytes is not None else round(_USABLE_SHARE * _machine_bytes())
    levels = [_level(part.strip(), source_bytes, usable) for part in text.split(",") if part.strip()]
    if not levels:
        raise InvalidArgumentError("no memory limit was named", hint="for example: --memory 25%,50%,fits")
    return tuple(dict.fromkeys(levels))


def _level(text: str, source_bytes: int, usable: int) -> MemoryLevel:
    enough = round(_FITS_SHARE * source_bytes) + _FITS_EXTRA_BYTES
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
    if text == FITS:
        limit = min(enough, usable)
    elif share is not None:
        limit = int(source_bytes * float(share[1]) / 100)
    else:
        limit = parse_bytes(text)
    if limit <= 0:
        raise InvalidArgumentError(f"{text!r} is no memory at all")
    if limit > usable:
        raise InvalidArgumentError(
            f"a limit of {text} ({format_bytes(limit)}) is more than the {format_bytes(usable)} that this machine can "
            "give to one process"
        )
    return MemoryLevel(text, limit, text == FITS or limit >= enough)


def _machine_bytes() -> int:
    limits = detect_limits()
    return limits[0].bytes if limits else 1 << 62
