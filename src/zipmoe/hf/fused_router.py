"""Routers of the common shape in one call of the native core: a small matrix, softmax or sigmoid, the largest scores.

Which formula a router follows is found out by asking it, on random rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.hf.dynamic_class import dynamic_class

_PROBE_ROWS = 64
_EQUAL_SHARE = 0.98
"""Rows that must be routed alike; the others may have scores that are equal but for rounding."""
_TOLERANCE = 2.0**-7
"""Of a weight, relative: one step between neighbouring BF16 values."""

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class FusedRouter(nn.Module):
    """Placed before the family's class: (logits, weights, ids) of (tokens, hidden) or (..., hidden)."""

    _zipmoe_formula: _native.RouterFormula
    _zipmoe_weights_dtype: torch.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's router."""
        x = args[0] if len(args) == 1 and not kwargs else None
        weight = self._parameters["weight"]
        if (
            not isinstance(x, torch.Tensor)
            or weight is None
            or x.dtype is not torch.bfloat16
            or weight.dtype is not torch.bfloat16
            or x.shape[-1] != weight.shape[1]
            or not 0 < x.numel() <= STEP_ROWS_MAX * weight.shape[1]
            or not x.is_contiguous()
            or not weight.is_contiguous()
            or self.training
            or ((x.requires_grad or weight.requires_grad) and torch.is_grad_enabled())
        ):
            return super().forward(*args, **kwargs)
        return routed(self._zipmoe_formula, x.detach(), weight.detach(), self._zipmoe_weights_dtype)


def routed(formula: _native.RouterFormula, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Routed:
    """Logits BF16 (tokens, experts), weights in ``dtype`` and ids int64 (tokens, top_k)."""
    rows = x.view(-1, weight.shape[1])
    logits = torch.empty((rows.shape[0], weight.shape[0]), dtype=torch.bfloat16)
    weights = torch.empty((rows.shape[0], formula.top_k), dtype=torch.float32)
    ids = torch.empty((rows.shape[0], formula.top_k), dtype=torch.int64)
    _native.route(
        formula,
        rows.view(torch.uint16).numpy(),
        weight.view(torch.uint16).numpy(),
        logits.view(torch.uint16).numpy(),
        weights.numpy(),
        ids.numpy(),
    )
    return logits, weights.to(dtype), ids


def fuse_router(module: Any) -> bool:
    """Let the native core route few rows of ``module``, whose weights are there, if it follows a known formula."""
    weight = module._parameters.get("weight")
    top_k = getattr(module, "top_k", None)
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
        return False
    formula = _formula(module, weight.detach(), top_k)
    if formula is None:
        return False
    original = type(module)
    module.__class__ = dynamic_class(original.__name__, (FusedRouter, original), original)
    module._zipmoe_formula, module._zipmoe_weights_dtype = formula
    return True


def _formula(module: Any, weight: torch.Tensor, top_k: int) -> tuple[_native.RouterFormula, torch.dtype] | None:
    generator = torch.Generator().manual_seed(0)
    size = weight.shape[1]
    scales = torch.logspace(-1, 1, _PROBE_ROWS).unsqueeze(1)
    probe = (torch.randn((_PROBE_ROWS, size), generator=generator) * scales).to(torch.bfloat16)
    was_training = module.training
    module.training = False
    try:
        with torch.inference_mode():
            told = module(probe)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None  # it needs more than these values
    finally:
        module.training = was_training
    shapes = [(_PROBE_ROWS, weight.shape[0]), (_PROBE_ROWS, top_k), (_PROBE_ROWS, top_k)]
    if type(told) is not tuple or len(told) != 3 or [tuple(part.shape) for part in told] != shapes:
        return None
    dtypes = (told[0].dtype, told[2].dtype)
    if dtypes != (torch.bfloat16, torch.int64) or told[1].dtype not in (torch.bfloat16, torch.float32):
        return None
    for score, normalised in itertools.product(("softmax", "sigmoid"), (False, True)):
        formula = _native.RouterFormula(score, top_k, normalised)
        if _follows(routed(formula, probe, weight, told[1].dtype), told):
            return formula, told[1].dtype
    return None


def _follows(found: Routed, told: Routed) -> bool:
    alike = (found[2] == told[2]).all(dim=1)
    logits_close = (found[0].double() - told[0].double()).abs() <= 2 * _TOLERANCE * told[0].double().abs().amax()
    if alike.double().mean().item() < _EQUAL_SHARE or not bool(logits_close.all()):
        return False
    # A logit that is rounded the other way changes its weight by more than the weight's own rounding.
    slack = 1 + 2 * told[0].double().abs().amax(dim=1, keepdim=True)
    close = (found[1].double() - told[1].double()).abs() <= _TOLERANCE * slack * told[1].double().abs()
    return bool(close[alike].all())
