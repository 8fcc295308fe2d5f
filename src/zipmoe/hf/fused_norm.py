"""RMS norms in the native core: one call, and one pass over the rows, instead of six of torch."""

from __future__ import annotations

import sys
from typing import Any

import torch

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.readable_rows import readable_rows, readable_weight

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")
_ONE_STEP = 2.0**-7
"""Between neighbouring BF16 values, relative to the smaller one."""


class FusedNorm(FusedModule):
    """Placed before the family's class."""

    _zipmoe_epsilon_name: str
    _zipmoe_compute: FusedCompute | None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(..., size) to the same shape, as the family's norm."""
        x: Any = args[0] if len(args) == 1 and not kwargs else None
        weight: Any = self._parameters.get("weight")
        epsilon: Any = vars(self).get(self._zipmoe_epsilon_name)
        if (
            not readable_weight(weight, 1)
            or not readable_rows(x, len(weight), sys.maxsize)
            or type(epsilon) is not float
            or not self._zipmoe_stands_for_own()
        ):
            output: torch.Tensor = super().forward(*args, **kwargs)
            return output
        shape = (-1, len(weight))
        if self._zipmoe_compute is not None and x.numel() >= _native.norm_values_for_threads:
            rows = self._zipmoe_compute.norm(x.detach().view(shape), weight.detach(), epsilon)
            return rows.view(x.shape)
        out = torch.empty_like(x)
        _native.rms_norm(
            bfloat16_words(x.detach().view(shape)),
            bfloat16_words(weight.detach()),
            epsilon,
            bfloat16_words(out.view(shape)),
        )
        return out

    def zipmoe_norm(self) -> _native.RmsNorm | None:
        """The norm as a part of others, with the weight where it lies; None if the native core does not compute it."""
        weight: Any = self._parameters.get("weight")
        epsilon: Any = vars(self).get(self._zipmoe_epsilon_name)
        if weight is None or not readable_weight(weight.detach(), 1) or type(epsilon) is not float:
            return None
        return _native.RmsNorm(bfloat16_words(weight.detach()), epsilon)


def norm_epsilon(module: Any) -> float | None:
    """The epsilon of an RMS norm that the native core computes as ``module`` does; None for any other module.

    Its weights must be there: the module is compared with the native core on values over ten orders of magnitude.
    """
    weight = module._parameters.get("weight")
    if len(module._parameters) != 1 or module._buffers or module._modules or weight is None or weight.dim() != 1:
        return None
    epsilon = vars(module).get(_epsilon_name(module))
    if not isinstance(epsilon, float) or weight.dtype is not torch.bfloat16 or weight.device.type != "cpu":
        return None
    generator = torch.Generator().manual_seed(0)
    scales = torch.logspace(-6, 4, 21).unsqueeze(1)
    # Around one and not around zero, so that a norm which subtracts the mean gives something else.
    probe = ((1 + torch.randn((len(scales), weight.shape[0]), generator=generator)) * scales).to(torch.bfloat16)
    found = torch.empty_like(probe)
    with torch.inference_mode():
        try:
            expected = module.forward(probe)  # not a call: its hooks are none of our business
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # it wants more than these values
    if not isinstance(expected, torch.Tensor) or expected.shape != probe.shape or expected.dtype is not torch.bfloat16:
        return None
    words = bfloat16_words(weight.detach().contiguous())
    _native.rms_norm(bfloat16_words(probe), words, epsilon, bfloat16_words(found))
    # The family rounds before it multiplies with the weight, too.
    close = (found.double() - expected.double()).abs() <= 2 * _ONE_STEP * expected.double().abs()
    return epsilon if bool(close.all()) else None


def _epsilon_name(module: Any) -> str:
    return next((name for name in _EPSILON_NAMES if name in vars(module)), "")


def fuse_norm(module: Any, compute: FusedCompute | None = None) -> bool:
    """Let the native core compute ``module`` from now on, if it computes the same; many rows on the engine's threads,
    where ``compute`` is given.
    """
    if norm_epsilon(module) is None:
        return False
    fuse(module, FusedNorm, _zipmoe_epsilon_name=_epsilon_name(module), _zipmoe_compute=compute)
    return True
