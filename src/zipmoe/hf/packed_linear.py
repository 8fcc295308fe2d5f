"""A linear layer whose weight is decoded tile by tile while it is applied."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import nn
from torch.nn import functional

from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.engine_slot import refuse_gradients
from zipmoe.hf.lazy_weight import as_parameter
from zipmoe.hf.packed_module import PackedModule


class PackedLinear(PackedModule, nn.Linear):  # type: ignore[misc]
    """``nn.Linear`` with a packed weight.

    A weight that fits into one tile is applied by one ``linear`` call with the bias, exactly as in ``nn.Linear``. A
    larger one is applied in tiles of output rows: each output element is the same dot product over the same operands,
    and its bias is added in the same call.

    In the mode ``fast``, rows of BF16 inputs are multiplied with the weight as it lies in memory.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` (..., in_features) to (..., out_features), in ``input``'s dtype."""
        refuse_gradients(input)
        fused = self._fused(input)
        if fused is not None:
            rows = input.reshape(-1, self.in_features).contiguous()
            bias = None if self.bias is None else self.bias.contiguous()
            result = fused.linear(self._zipmoe_parameter, rows, bias)
            return result.view(*input.shape[:-1], self.out_features)
        output: torch.Tensor | None = None
        with torch.no_grad(), closing(self._zipmoe_slot.engine.dense_tiles(self._zipmoe_parameter)) as tiles:
            for begin, end, tile in tiles:
                weight = as_parameter(tile.to(self._zipmoe_dtype))
                if end - begin == self.out_features:
                    return functional.linear(input, weight, self.bias)
                if output is None:
                    output = input.new_empty((*input.shape[:-1], self.out_features))
                bias = self.bias[begin:end] if self.bias is not None else None
                output[..., begin:end] = functional.linear(input, weight, bias)
        assert output is not None
        return output

    def _fused(self, input: torch.Tensor) -> FusedCompute | None:
        """Kernels on the packed weight, if they pay for this input."""
        rows = input.numel() // self.in_features
        types = {input.dtype, self._zipmoe_dtype, torch.bfloat16 if self.bias is None else self.bias.dtype}
        fused = self._zipmoe_slot.engine.fused
        if fused is None or types != {torch.bfloat16} or input.shape[-1:] != (self.in_features,):
            return None  # inputs of another shape get torch's own error
        return fused if fused.takes(rows) else None
