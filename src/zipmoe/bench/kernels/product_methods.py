"""The ways to compute y = W x that are compared: packed weights, raw BF16 weights of our own, torch.

Which numbers of tokens the native products take is asked of them. Another product is another ``Form`` and its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.bench.kernels.rotating_weights import RotatingWeights, gaussian_weights
from zipmoe.codecs.fx3_gemv import round_to_bfloat16

Call = Callable[[int], object]
"""Multiplies with the matrix of this number."""
_TOKENS = (1, 2, 3, 4, 8, 16, 64)
"""Numbers of tokens (rows of x) that are measured if there are native products for them."""
_SMALL = (64, 128)


class Form(StrEnum):
    """How the weights lie in memory, and whose product it is."""

    FUSED = "fused"
    """FX3, our product with packed weights."""
    RAW = "raw"
    """BF16, our product."""
    TORCH = "torch"
    """BF16, ``torch.nn.functional.linear``."""


NATIVE = (Form.FUSED, Form.RAW)


@dataclass(frozen=True)
class Method:
    """A product on one instruction set."""

    form: Form
    instruction_set: str = ""
    """Empty for torch, which chooses its own."""

    @property
    def label(self) -> str:
        """``fused avx512``, ``torch``."""
        return f"{self.form} {self.instruction_set}".strip()

    def takes(self, tokens: int) -> bool:
        """Whether there is a product for so many tokens."""
        return self.form is Form.TORCH or _native_takes(self, tokens)

    def read_bytes(self, weights: RotatingWeights) -> float:
        """Bytes of weights that one product must read from memory."""
        return weights.packed_bytes if self.form is Form.FUSED else weights.bfloat16_bytes


def instruction_sets() -> tuple[str, ...]:
    """Those that the products have on this processor, the best one first."""
    return tuple(dict.fromkeys(_native.gemv_instruction_set(name) for name in reversed(_native.instruction_sets())))


def default_tokens() -> tuple[int, ...]:
    """Numbers of tokens for which the best instruction set has both native products."""
    best = instruction_sets()[0]
    return tuple(number for number in _TOKENS if all(Method(form, best).takes(number) for form in NATIVE))


def methods(tokens: int, names: tuple[str, ...]) -> tuple[Method, ...]:
    """All that can multiply so many tokens, on these instruction sets."""
    native = tuple(Method(form, name) for name in names for form in NATIVE)
    return tuple(method for method in (*native, Method(Form.TORCH)) if method.takes(tokens))


def inputs(tokens: int, columns: int) -> npt.NDArray[np.uint16]:
    """x as BF16 patterns: uint16 [tokens, columns]."""
    return round_to_bfloat16(np.random.default_rng(7).standard_normal((tokens, columns), dtype=np.float32))


def calls(
    weights: RotatingWeights, chosen: tuple[Method, ...], tokens: int, threads: _native.ComputeThreads
) -> dict[Method, Call]:
    """Every method on the same inputs, results in BF16.

    Raises:
        ArithmeticError: native products disagree, which would make their times meaningless: they promise equal bits.
    """
    x = inputs(tokens, weights.columns)
    out = np.empty((tokens, weights.rows), np.uint16)
    found = {method: _call(method, weights, x, out, threads) for method in chosen}
    expected: npt.NDArray[np.uint16] | None = None
    for method, call in found.items():
        if method.form is Form.TORCH:
            continue
        call(0)
        if expected is not None and not np.array_equal(out, expected):
            raise ArithmeticError(f"{method.label} computes other bits than {chosen[0].label}")
        expected = out.copy()
    return found


@cache
def _native_takes(method: Method, tokens: int) -> bool:
    """Asks with a small matrix: the native core refuses more tokens than it has a product for."""
    rows, columns = _SMALL
    words = gaussian_weights(rows, columns, 0)
    section = _native.encode("fx3", words)[0][0][1]
    small = RotatingWeights(rows, columns, [section], [words], [])
    out = np.empty((tokens, rows), np.uint16)
    call = _call(method, small, inputs(tokens, columns), out, _native.ComputeThreads(1))
    try:
        call(0)
    except ValueError:
        return False
    return True


def _call(
    method: Method,
    weights: RotatingWeights,
    x: npt.NDArray[np.uint16],
    out: npt.NDArray[np.uint16],
    threads: _native.ComputeThreads,
) -> Call:
    rows, columns, name = weights.rows, weights.columns, method.instruction_set
    if method.form is Form.FUSED:
        return lambda i: _native.fx3_gemv(weights.sections[i], rows, columns, x, out, threads, instruction_set=name)
    if method.form is Form.RAW:
        return lambda i: _native.bfloat16_gemv(weights.raw[i], x, out, threads, instruction_set=name)
    x_tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return lambda i: torch.nn.functional.linear(x_tensor, weights.tensors[i])
