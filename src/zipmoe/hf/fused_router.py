"""Routers of the common shape in one call of the native core: a small matrix, softmax or sigmoid, the largest scores.

Which formula a router follows is found out by asking it, on random rows: from its own logits follow which experts and
weights it should have told. What random rows do not show (limits of large logits, say) its code must not mention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.mentioned_names import mentioned_names
from zipmoe.hf.readable_rows import readable_rows, readable_weight

_PROBE_ROWS = 128
_EQUAL_SCORES = 2.0**-20
"""Scores nearer to each other, relatively, are equal but for rounding."""
_TOLERANCE = 2.0**-7
"""Of a weight, relative: one step between neighbouring BF16 values."""

_KNOWN_NAMES = {
    *("F", "ValueError", "dtype", "expert_selection_fn", "float", "functional", "hidden_dim", "linear", "nn"),
    *("norm_topk_prob", "reshape", "shape", "sigmoid", "softmax", "sum", "to", "top_k", "topk", "torch", "type_as"),
    *("view", "weight"),
}
"""What the forward of routers of the common shape mentions."""

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Native:
    """What a router is in the native core."""

    formula: _native.RouterFormula
    weights_dtype: torch.dtype
    settings: dict[str, Any]
    """Its numbers and switches, as they were when it was asked for its formula."""
    any_shape: bool
    """Whether (..., hidden) is routed as (tokens, hidden)."""


class FusedRouter(FusedModule):
    """Placed before the family's class: (logits, weights, ids) of (tokens, hidden) or (..., hidden)."""

    _zipmoe_native: _Native | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's router."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        weight: Any = self._parameters.get("weight")
        native = self._zipmoe_native
        if (
            native is None
            or not readable_weight(weight, 2)
            or not readable_rows(x, weight.shape[1])
            or not (x.dim() == 2 or native.any_shape)
            or self.training
            or not self._zipmoe_stands_for_own()
        ):
            return super().forward(*args, **kwargs)
        native = self._up_to_date(native)
        if native is None:
            return super().forward(x)
        return routed(native.formula, x.detach(), weight.detach(), native.weights_dtype)

    def zipmoe_formula(self) -> tuple[_native.RouterFormula, torch.dtype] | None:
        """The formula and the dtype of the weights that it gives, if the native core routes now."""
        if self._zipmoe_native is None or not readable_weight(self._parameters.get("weight"), 2) or self.training:
            return None
        native = self._up_to_date(self._zipmoe_native)
        return None if native is None else (native.formula, native.weights_dtype)

    def _up_to_date(self, native: _Native) -> _Native | None:
        if _unchanged(self, native.settings):
            return native
        self._zipmoe_native = _native_router(self)
        return self._zipmoe_native


def _settings(module: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name != "training"
    }


def _unchanged(module: Any, settings: dict[str, Any]) -> bool:
    held = vars(module)
    return all(held.get(name) is value for name, value in settings.items())


def routed(formula: _native.RouterFormula, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Routed:
    """Logits BF16 (tokens, experts), weights in ``dtype`` and ids int64 (tokens, top_k)."""
    rows = x.view(-1, weight.shape[1])
    logits = torch.empty((rows.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    weights = torch.empty((rows.shape[0], formula.top_k), dtype=torch.float32)
    ids = torch.empty((rows.shape[0], formula.top_k), dtype=torch.int64)
    _native.route(
        formula,
        bfloat16_words(rows),
        bfloat16_words(weight),
        bfloat16_words(logits),
        weights.numpy(),
        ids.numpy(),
    )
    return logits, weights.to(dtype), ids


def fuse_router(module: Any) -> bool:
    """Let the native core route few rows of ``module``, whose weights are there, if it follows a known formula."""
    names = mentioned_names(type(module))
    native = _native_router(module) if names is not None and {*names} <= _KNOWN_NAMES else None
    if native is None:
        return False
    fuse(module, FusedRouter, _zipmoe_native=native)
    return True


def _native_router(module: Any) -> _Native | None:
    weight = module._parameters.get("weight")
    top_k = vars(module).get("top_k")
    if (
        len(module._parameters) != 1
        or module._buffers
        or module._modules
        or weight is None
        or weight.dim() != 2
        or weight.dtype is not torch.bfloat16
        or weight.device.type != "cpu"
        or not weight.is_contiguous()
        or type(top_k) is not int
        or not 0 < top_k <= weight.shape[0]
    ):
        return None
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-1, 1, _PROBE_ROWS).unsqueeze(1)
    probe = (torch.randn((_PROBE_ROWS, weight.shape[1]), generator=generator) * scales).to(torch.bfloat16)
    told = _answer(module, probe)
    if told is None or [tuple(part.shape) for part in told] != [
        (_PROBE_ROWS, weight.shape[0]),
        (_PROBE_ROWS, top_k),
        (_PROBE_ROWS, top_k),
    ]:
        return None
    dtypes = (told[0].dtype, told[2].dtype)
    if dtypes != (torch.bfloat16, torch.int64) or told[1].dtype not in (torch.bfloat16, torch.float32):
        return None
    products = torch.nn.functional.linear(probe.double(), weight.detach().double())
    if not bool(((told[0].double() - products).abs() <= _TOLERANCE * products.abs().amax(1, keepdim=True)).all()):
        return None
    formula = next((f for f in _formulas(top_k) if _follows(f, told)), None)
    if formula is None:
        return None
    boxed = _answer(module, probe.view(2, -1, weight.shape[1]))
    any_shape = boxed is not None and all(
        found.shape == expected.shape and torch.equal(found, expected)
        for found, expected in zip(boxed, told, strict=True)
    )
    return _Native(_native.RouterFormula(*formula), told[1].dtype, _settings(module), any_shape)


def _answer(module: Any, probe: torch.Tensor) -> Routed | None:
    was_training = module.training
    module.training = False
    try:
        with torch.inference_mode():
            told = module.forward(probe)  # not a call: its hooks are none of our business
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return None  # it needs more than these values
    finally:
        module.training = was_training
    is_triple = type(told) is tuple and len(told) == 3 and all(isinstance(part, torch.Tensor) for part in told)
    return told if is_triple else None


def _formulas(top_k: int) -> Iterator[tuple[str, int, bool]]:
    for score, normalised in itertools.product(("softmax", "sigmoid"), (False, True)):
        yield score, top_k, normalised


def _follows(formula: tuple[str, int, bool], told: Routed) -> bool:
    """Whether ids and weights are those of the formula for the logits that the router told itself."""
    score, top_k, normalised = formula
    logits = told[0].double()
    scores = torch.softmax(logits, dim=-1) if score == "softmax" else torch.sigmoid(logits)
    chosen = scores.gather(1, told[2])
    # Equal logits may come in any order; so may scores that only FP32 cannot tell apart.
    largest = torch.topk(scores, top_k, dim=-1).values
    if not torch.allclose(chosen, largest, rtol=_EQUAL_SCORES, atol=torch.finfo(torch.float32).tiny):
        return False
    if any(len(set(row)) != top_k for row in told[2].tolist()):
        return False
    weights = chosen / chosen.sum(dim=-1, keepdim=True) if normalised else chosen
    return torch.allclose(told[1].double(), weights, rtol=_TOLERANCE, atol=torch.finfo(torch.float32).tiny)
