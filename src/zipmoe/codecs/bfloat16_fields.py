"""The two byte planes of BF16 weights: NumPy reference of native/codec/bfloat16_fields (docs/format.md, "BF16 fields").

``e`` is the exponent and ``sm = mantissa << 1 | sign``, so that ``bf16 = rotate_right16(e << 8 | sm, 1)``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
BFLOAT16_BYTES = 2
"""Bytes of one weight."""


def split(weights: Words) -> tuple[Bytes, Bytes]:
    """Split BF16 patterns (uint16, any shape) into exponent and sign-mantissa bytes (uint8, same shape)."""
    exponent = (weights >> 7).astype(np.uint8)  # the conversion drops the sign bit
    sign_mantissa = ((weights << 1) | (weights >> 15)).astype(np.uint8)
    return exponent, sign_mantissa


def recombine(exponent: Bytes, sign_mantissa: Bytes) -> Words:
    """Return the BF16 patterns (uint16) of exponent and sign-mantissa bytes (uint8) of one shape: inverse of split."""
    word = (exponent.astype(np.uint16) << np.uint16(8)) | sign_mantissa.astype(np.uint16)
    return (word >> np.uint16(1)) | (word << np.uint16(15))
