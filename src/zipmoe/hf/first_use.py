"""The comparison of a module's own result with the native core's, at the first use."""

from __future__ import annotations

import torch

_TOLERANCE = 2.0**-5
"""Relative to the length of a row. BF16 results of the same formula lie within a tenth of it."""


def agrees(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two BF16 results of the same shape are one formula's, rounded in different places."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    difference = (found.double() - expected.double()).norm(dim=-1)
    return bool((difference <= _TOLERANCE * expected.double().norm(dim=-1)).all())
