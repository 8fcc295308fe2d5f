"""RMS norms of few rows in the native core: one call instead of six of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.hf.dynamic_class import dynamic_class

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_ONE_STEP = 2.0**-7
"""Between neighbouring BF16 values, relative to the smaller one."""


class FusedNorm(nn.Module):
    """Placed before the family's class."""

    _zipmoe_epsilon: float

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(..., size) to the same shape, as the family's norm."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        weight: Any = self._parameters["weight"]
        if (
            not isinstance(x, torch.Tensor)
            or x.dtype is not torch.bfloat16
            or weight.dtype is not torch.bfloat16
            or x.shape[-1] != len(weight)
            or not 0 < x.numel() <= STEP_ROWS_MAX * len(weight)
            or not x.is_contiguous()
            or not weight.is_contiguous()
            or ((x.requires_grad or weight.requires_grad) and torch.is_grad_enabled())
        ):
            output: torch.Tensor = super().forward(*args, **kwargs)
            return output
        out = torch.empty_like(x)
        shape = (-1, len(weight))
        _native.rms_norm(
            x.detach().view(torch.uint16).view(shape).numpy(),
            weight.detach().view(torch.uint16).numpy(),
            self._zipmoe_epsilon,
            out.view(torch.uint16).view(shape).numpy(),
        )
        return out


def norm_epsilon(module: Any) -> float | None:
    """The epsilon of an RMS norm that the native core computes as ``module`` does; None for any other module.

    Its weights must be there: the module is compared with the native core on values over ten orders of magnitude.
    """
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or module._buffers or module._modules or weight is None or weight.dim() != 1:
        return None
    epsilon = next((vars(module)[name] for name in _EPSILON_NAMES if name in vars(module)), None)
    if not isinstance(epsilon, float) or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return None
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 4, 21).unsqueeze(1)
    probe = (torch.randn((len(scales), weight.shape[0]), generator=generator) * scales).to(torch.bfloat16)
    found = torch.empty_like(probe)
    with torch.inference_mode():
        try:
            expected = module(probe)
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # it wants more than these values
    if not isinstance(expected, torch.Tensor) or expected.shape != probe.shape or expected.dtype is not torch.bfloat16:
        return None
    words = weight.detach().contiguous().view(torch.uint16).numpy()
    _native.rms_norm(probe.view(torch.uint16).numpy(), words, epsilon, found.view(torch.uint16).numpy())
    # The family rounds before it multiplies with the weight, too.
    close = (found.double() - expected.double()).abs() <= 2 * _ONE_STEP * expected.double().abs()
    return epsilon if bool(close.all()) else None


def fuse_norm(module: Any) -> bool:
    """Let the native core compute few rows of ``module`` from now on, if it computes the same."""
    epsilon = norm_epsilon(module)
    if epsilon is None:
        return False
    original = type(module)
    module.__class__ = dynamic_class(original.__name__, (FusedNorm, original), original)
    module._zipmoe_epsilon = epsilon
    return True
