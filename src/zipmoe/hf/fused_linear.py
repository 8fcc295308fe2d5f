"""Small linear layers that are left unpacked (the gate of a shared expert), by the native core's kernels.

One row of inputs costs torch more than the product itself: it prepares a product of matrices each time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.hf.few_rows import few_rows, records_gradients
from zipmoe.hf.fused_module import FusedModule, fuse

_WEIGHTS_MAX = 1 << 20
"""Larger matrices keep several threads busy."""


class FusedLinear(FusedModule):
    """Placed before ``nn.Linear``."""

    in_features: int
    out_features: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` (..., in_features) to (..., out_features)."""
        parameters: dict[str, Any] = self._parameters
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (
            not few_rows(input, self.in_features)
            or weight is None  # something else has taken its place (torch.nn.utils.parametrize, pruning)
            or weight.dtype is not torch.bfloat16
            or not weight.is_contiguous()
            or weight.shape != (self.out_features, self.in_features)
            or records_gradients(weight)
            or (bias is None and getattr(self, "bias", None) is not None)
            or (bias is not None and (bias.dtype is not torch.bfloat16 or not bias.is_contiguous()))
            or records_gradients(bias)
            or not self._zipmoe_stands_for_own()
        ):
            output: torch.Tensor = super().forward(input)
            return output
        out = torch.empty((*input.shape[:-1], self.out_features), dtype=torch.bfloat16)
        _native.small_linear(
            _words(weight),
            _words(input.view(-1, self.in_features)),
            _words(out.view(-1, self.out_features)),
            None if bias is None else _words(bias),
        )
        return out


def _words(tensor: torch.Tensor) -> Any:
    return tensor.detach().view(torch.uint16).numpy()


def fuse_linear(module: Any) -> bool:
    """Let the native core compute few rows of ``module``, if it is a small unpacked linear layer on the CPU."""
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or module.weight.numel() > _WEIGHTS_MAX:
        return False
    if module.weight.dtype is not torch.bfloat16:
        return False
    fuse(module, FusedLinear)
    return True
