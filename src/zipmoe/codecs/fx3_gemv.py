"""y = W x in the canonical order of accumulation: NumPy reference and oracle of the kernels (docs/compute.md).

The order is a promise: every instruction set and number of threads gives these bits. Per row, token and panel of
columns there are 16 float32 lanes. For every 32 columns lane i takes ``fma(w[2i + 1], x[2i + 1], lane)`` and then
``fma(w[2i], x[2i], lane)``. At the end of a panel lanes are added 8, 4, 2, 1 apart, and panels are added in order.
Denormal inputs count as zeros, and results that are tiny after rounding become zeros, both keeping their sign.

The fused multiply-add is emulated in float64, exactly: the product of two BF16 values has 16 digits, and the sum is
rounded to odd (an error-free transformation gives its rounding error), after which rounding to float32 is the only one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zipmoe.codecs.bfloat16_fields import Words
from zipmoe.codecs.fx3 import Layout

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

LANES = 16
SMALLEST_NORMAL = np.float32(2.0**-126)
TINY = 2.0**-126 - 2.0**-151
"""What is smaller rounds to less than the smallest normal number, were there no bound of the exponent."""


def to_float(words: Words) -> Floats:
    """Return the values (float32) of BF16 patterns (uint16, any shape), denormals kept."""
    return (words.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_to_bfloat16(values: Floats) -> Words:
    """Round float32 to BF16 patterns (uint16): nearest, ties to even, 0x7FC0 for every NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _flush(values: Floats) -> Floats:
    return np.where(np.abs(values) < SMALLEST_NORMAL, np.copysign(np.float32(0), values), values)


def fused_multiply_add(weights: Floats, inputs: Floats, sums: Floats) -> Floats:
    """``weights * inputs + sums`` rounded once to float32, tiny results flushed.

    Weights and inputs hold BF16 values, none of the three a denormal.
    """
    product = weights.astype(np.float64) * inputs.astype(np.float64)
    addend = sums.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = np.ascontiguousarray(total).view(np.int64)
    to_odd = np.where((error > 0) == (total > 0), 1, -1)
    bits = bits + np.where((error != 0) & np.isfinite(total) & (bits & 1 == 0), to_odd, 0)
    odd = bits.view(np.float64)
    return np.where(np.abs(odd) < TINY, np.copysign(0.0, odd), odd).astype(np.float32)


def _add(a: Floats, b: Floats) -> Floats:
    return _flush(a + b)


def multiply(weights: Words, x: Words) -> Floats:
    """Return W x (float32 [tokens, rows]) of BF16 patterns (uint16 [rows, columns] and [tokens, columns])."""
    rows, columns = weights.shape
    layout = Layout(rows, columns)
    padding = (0, layout.padded_columns - columns)
    # [token, row, panel, step, lane, parity]
    shape = (layout.panels, -1, LANES, 2)
    w = _flush(to_float(np.pad(weights, ((0, 0), padding)))).reshape(1, rows, *shape)
    inputs = _flush(to_float(np.pad(x, ((0, 0), padding)))).reshape(len(x), 1, *shape)
    result = np.zeros((len(x), rows), np.float32)
    with np.errstate(all="ignore"):
        for panel in range(layout.panels):
            lanes = np.zeros((len(x), rows, LANES), np.float32)
            for step in range(w.shape[3]):
                for parity in (1, 0):
                    at = (panel, step, slice(None), parity)
                    lanes = fused_multiply_add(w[:, :, *at], inputs[:, :, *at], lanes)
            while lanes.shape[-1] > 1:
                half = lanes.shape[-1] // 2
                lanes = _add(lanes[..., :half], lanes[..., half:])
            result = lanes[..., 0] if panel == 0 else _add(result, lanes[..., 0])
    return np.where(np.isnan(result), np.float32(np.nan), result)
