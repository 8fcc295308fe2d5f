"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

from zipmoe.errors import InvalidArgumentError

_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{prefix: 1024**power for power, prefix in enumerate("kmgt", start=1)},
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")
_HINT = "write a number of bytes or something like 4GB, 2.2 GB, 3500MiB"


def parse_bytes(quantity: str | int) -> int:
    """Bytes of a quantity: KB, MB, GB, TB are powers of 1000; KiB ... TiB and K, M, G, T powers of 1024; any case.

    Args:
        quantity: ``"4GB"``, ``"4 GiB"``, ``"2.2 GB"``, ``"512M"``, ``"1000"`` or a number of bytes.

    Returns:
        Whole bytes, at least 1; fractions are rounded down.

    Raises:
        InvalidArgumentError: not a quantity of bytes, or not positive.
    """
    if isinstance(quantity, bool) or not isinstance(quantity, (str, int)):
        raise InvalidArgumentError(f"{quantity!r} is not an amount of memory", hint=_HINT)
    if isinstance(quantity, int):
        count = quantity
    else:
        match = _QUANTITY.fullmatch(quantity)
        factor = _FACTORS.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise InvalidArgumentError(f"{quantity!r} is not an amount of memory", hint=_HINT)
        count = int(Decimal(match[1]) * factor)
    if count <= 0:
        raise InvalidArgumentError(f"{quantity!r} is not a positive amount of memory", hint=_HINT)
    return count


def format_bytes(count: int) -> str:
    """``count`` bytes with three significant digits in decimal units, e.g. ``2.20 GB``, ``64.0 MB``, ``512 B``."""
    if abs(count) < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the unit reached is used below
        value /= 1000
        if abs(value) < 999.5:
            break
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
