"""What lies between the matrices of an expert, found by asking the module: its own function on probe values is compared
with the native activations, so that no table of families is needed and none can be wrong.

Two questions are asked, both against the module's own function in float64. Is it the same function? The native one is
evaluated without rounding to BF16 for that, because roundings hide how close two functions are. And does it round no
worse than the module does in BF16? That is the promise of the mode ``fast``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native

_PROBE_WIDTH = 128
_SAME_FUNCTION = 2.0**-13
"""Relative error of a native function in fp32 that is allowed: what docs/compute.md promises of exp and erf."""
_CANCELLATION = 2.0**-40
"""Of magnitudes in a formula: what float64 itself may lose where nearly equal numbers cancel, as in 1 + tanh(-9)."""
_ROUNDINGS = 3.05 * 2.0**-8
"""Relative error of three roundings to BF16: f(gate), up + offset, their product."""
_LARGEST_COUNTED = 2.0**-7
"""Relative errors count as one step between neighbouring BF16 values at most: some functions lose all digits in BF16
where they are near 0, which must not excuse errors elsewhere.
"""
_NO_WORSE = 1.1
"""Both errors are means over thousands of roundings, of which no two implementations make the same."""
_FUNCTIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity")
_QUICK_GELU_SCALE = 1.702


@dataclass(frozen=True)
class Formula:
    """Arguments of the native core's GatedActivation."""

    function: str
    layout: str
    sigmoid_scale: float = 1.0
    limit: float = math.inf
    limit_activated: bool = False
    up_offset: float = 0.0
    rounds_between: bool = True

    def activation(self) -> _native.GatedActivation:
        """For the native core."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        return _native.GatedActivation(options.pop("function"), options.pop("layout"), **options)


def recognise_activation(module: Any) -> Formula | None:
    """The native activation that computes what an experts module computes between its matrices; None if there is none.

    Args:
        module: of Transformers' experts interface, with ``has_gate``, and ``_apply_gate`` or ``act_fn``.
    """
    probe = _probe(module.has_gate)
    try:
        with torch.inference_mode():
            exact = _own_function(module, probe.double())
            rounded = _own_function(module, probe.clone())
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # it needs more than these values: nothing that the native core could compute
    if not exact.shape == rounded.shape == (len(probe), _PROBE_WIDTH):
        return None
    expected = _Expected(probe, exact.double(), rounded.to(torch.bfloat16).double())
    for formula in _formulas(module):
        if expected.is_function_of(formula):
            for rounds_between in (True, False):
                if expected.is_met_by(formula := replace(formula, rounds_between=rounds_between)):
                    return formula
    return None


def _own_function(module: Any, values: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = module._apply_gate(values) if module.has_gate else module.act_fn(values)
    return outputs


def _probe(has_gate: bool) -> torch.Tensor:
    """BF16 inputs, one row for each setting of magnitudes: everything that real models produce, limits that show at
    large values only, and sums that are nearly 0. With a gate, every row comes twice: its gates and ups side by side in
    halves, and in turn, so that they are pairs in either layout.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(scale: torch.Tensor) -> torch.Tensor:
        return torch.randn((len(scale), _PROBE_WIDTH), generator=generator) * scale.unsqueeze(1)

    usual = torch.logspace(-2, 1.5, 32)
    large = 2.0 ** torch.arange(5, 40, 2.5)
    one = torch.ones_like(large)
    near_one = 1 + torch.arange(-64, 64).repeat(2, 1) / 256
    gate = torch.cat([normal(usual), normal(large), normal(one), normal(torch.ones(2))])
    up = torch.cat([normal(usual), normal(one), normal(large), near_one * torch.tensor([[-1.0], [1.0]])])
    if not has_gate:
        return gate.to(torch.bfloat16)
    return torch.cat([torch.cat([gate, up], 1), torch.stack([gate, up], 2).flatten(1)]).to(torch.bfloat16)


@dataclass(frozen=True)
class _Expected:
    """The module's own function on the probe: BF16 inputs, and its values in float64 and as it computes in BF16."""

    probe: torch.Tensor
    exact: torch.Tensor
    rounded: torch.Tensor

    def is_function_of(self, formula: Formula) -> bool:
        """Whether the formula gives the same function."""
        unrounded = torch.empty(self.exact.shape)
        formula.activation().evaluate(self._words(), unrounded.numpy())
        allowed = _SAME_FUNCTION * self.exact.abs() + self._lost(formula)
        return bool(((unrounded.double() - self.exact).abs() <= allowed).all())

    def is_met_by(self, formula: Formula) -> bool:
        """Whether the formula, as it is computed, has no larger errors than the module in BF16."""
        found = torch.empty(self.exact.shape, dtype=torch.bfloat16)
        formula.activation().apply(self._words(), found.view(torch.uint16).numpy())
        error, own_error = (found.double() - self.exact).abs(), (self.rounded - self.exact).abs()
        lost = self._lost(formula)
        if not bool((error <= torch.maximum(own_error, _ROUNDINGS * self.exact.abs()) + lost).all()):
            return False
        counted = self.exact.abs() > lost
        return _mean_error(error, self.exact, counted) <= _NO_WORSE * _mean_error(own_error, self.exact, counted)

    def _words(self) -> npt.NDArray[np.uint16]:
        words: npt.NDArray[np.uint16] = self.probe.view(torch.uint16).numpy()
        return words

    def _lost(self, formula: Formula) -> torch.Tensor:
        return _CANCELLATION * _magnitudes(self.probe.double(), formula.layout)


def _mean_error(error: torch.Tensor, exact: torch.Tensor, counted: torch.Tensor) -> float:
    return (error[counted] / exact[counted].abs()).clamp(max=_LARGEST_COUNTED).mean().item()


def _magnitudes(probe: torch.Tensor, layout: str) -> torch.Tensor:
    """Of the products that the formulas make of each gate and up, or of each value without a gate."""
    if layout == "none":
        return probe.abs() * (probe.abs() + 1)
    gate, up = probe.chunk(2, 1) if layout == "halves" else (probe[:, ::2], probe[:, 1::2])
    return gate.abs() * (gate.abs() + 1) * (up.abs() + 1)


def _formulas(module: Any) -> Iterator[Formula]:
    """Every formula of the native core, with the constants that the module and its parts carry."""
    layouts = ("halves", "interleaved") if module.has_gate else ("none",)
    holders = [module, *module.children()]
    limits = [*_constants(holders, "limit"), math.inf]
    scales = [*_constants(holders, "alpha"), 1.0, _QUICK_GELU_SCALE]
    for layout, limit, offset, activated in itertools.product(layouts, limits, (0.0, 1.0), (False, True)):
        if activated and math.isinf(limit):
            continue
        for function in _FUNCTIONS:
            for scale in dict.fromkeys(scales if function == "silu" else [1.0]):
                yield Formula(function, layout, scale, limit, activated, offset)


def _constants(holders: list[Any], word: str) -> list[float]:
    values = [value for holder in holders for name, value in vars(holder).items() if word in name]
    return [float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v > 0]
