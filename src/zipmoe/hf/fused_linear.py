"""Small linear layers that are left unpacked (the gate of a shared expert), by the native core's kernels.

One row of inputs costs torch more than the product itself: it prepares a product of matrices each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.engine.bfloat16_words import bfloat16_words
from zipmoe.hf.fused_module import FusedModule, fuse
from zipmoe.hf.readable_rows import readable_rows, readable_weight

_WEIGHTS_MAX = 1 << 20
"""Larger matrices keep several threads busy."""


class FusedLinear(FusedModule):
    """Placed before ``nn.Linear``."""

    in_features: int
    out_features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` (..., in_features) to (..., out_features)."""
        parameters: dict[str, Any] = self._parameters
        weight: Any = parameters.get("weight")
        bias: Any = parameters.get("bias")
        if (
            not readable_rows(input, self.in_features)
            or not readable_weight(weight, 2)
            or weight.shape != (self.out_features, self.in_features)
            or (bias is None and getattr(self, "bias", None) is not None)
            or (bias is not None and not readable_weight(bias, 1))
            or not self._zipmoe_stands_for_own()
        ):
            output: torch.Tensor = super().forward(input)
            return output
        out = torch.empty((*input.shape[:-1], self.out_features), dtype=torch.bfloat16)
        _native.small_linear(
            bfloat16_words(weight.detach()),
            bfloat16_words(input.detach().view(-1, self.in_features)),
            bfloat16_words(out.view(-1, self.out_features)),
            None if bias is None else bfloat16_words(bias.detach()),
        )
        return out


def fuse_linear(module: Any) -> bool:
    """Let the native core compute few rows of ``module``, if it is a small unpacked linear layer on the CPU."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or module.weight.numel() > _WEIGHTS_MAX:
        return False
    if module.weight.dtype is not torch.bfloat16:
        return False
    fuse(module, FusedLinear)
    return True
