"""Which products of a run read packed weights, without decoding them first (mode ``fast``, docs/compute.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackedProducts:
    """Of few tokens, with a codec that has kernels for it; all others decode first."""

    experts: bool
    """Networks of experts: their family may have something that the kernels do not compute."""
    dense: bool
    """Dense matrices."""


ALL_PRODUCTS = PackedProducts(experts=True, dense=True)
"""Mode ``fast``, in a family that the kernels compute."""
NO_PRODUCTS = PackedProducts(experts=False, dense=False)
"""Mode ``exact``."""
