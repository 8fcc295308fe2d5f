"""The ways to compute y = W x that are compared: packed weights, raw BF16 weights of our own, torch.

A further native product is a further ``Form`` with the numbers of tokens that it takes and its call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.bench.kernels.rotating_weights import RotatingWeights
from zipmoe.codecs.fx3_gemv import round_to_bfloat16

Call = Callable[[int], object]
"""Multiplies with the matrix of this number."""
_GEMV_TOKENS = tuple(range(1, _native.GEMV_TOKENS_MAX + 1))
TOKENS = _GEMV_TOKENS
"""Numbers of tokens (rows of x) that are measured unless others are asked for."""


class Form(StrEnum):
    """How the weights lie in memory, and whose product it is."""

    FUSED = "fused"
    """FX3, our product with packed weights."""
    RAW = "raw"
    """BF16, our product."""
    TORCH = "torch"
    """BF16, ``torch.nn.functional.linear``."""


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
        return self.form is Form.TORCH or tokens in _GEMV_TOKENS

    def read_bytes(self, weights: RotatingWeights) -> float:
        """Bytes of weights that one product must read from memory."""
        return weights.packed_bytes if self.form is Form.FUSED else weights.bfloat16_bytes


def instruction_sets() -> tuple[str, ...]:
    """Those that the products have on this processor, the best one first."""
    return tuple(dict.fromkeys(_native.gemv_instruction_set(name) for name in reversed(_native.instruction_sets())))


def methods(tokens: int, names: tuple[str, ...]) -> tuple[Method, ...]:
    """All that can multiply so many tokens, on these instruction sets."""
    native = tuple(Method(form, name) for name in names for form in (Form.FUSED, Form.RAW))
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
