"""The comparison of a module's own result with the native core's, at the first use."""

from __future__ import annotations

import torch

_TOLERANCE = 2.0**-5
"""Relative to the length of a row. BF16 results of the same formula lie within a tenth of it."""
_SMALLEST_LENGTH = 2.0**-100
"""Of rows that are compared: shorter ones may be flushed to zero."""


def same_formula(found: torch.Tensor, expected: torch.Tensor) -> bool | None:
    """Whether two BF16 results are one formula's, rounded in different places.

    Args:
        found: the native core's (..., columns).
        expected: the module's own.

    Returns:
        None if they do not tell: the module's own result is not finite, or nothing but zeros as the other one.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    wanted = expected.double()
    lengths = wanted.norm(dim=-1)
    if not bool(lengths.isfinite().all()):
        return None
    differences = (found.double() - wanted).norm(dim=-1)
    long = lengths >= _SMALLEST_LENGTH
    if not bool((differences <= _TOLERANCE * lengths.clamp(min=_SMALLEST_LENGTH)).all()):  # so is any NaN
        return False
    return True if bool(long.any()) else None


def all_agree(*verdicts: bool | None) -> bool | None:
    """False if one does; else None if one does not tell; else True."""
    if False in verdicts:
        return False
    return None if None in verdicts else True
