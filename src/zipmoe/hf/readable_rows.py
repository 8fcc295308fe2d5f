"""What the native core computes with: rows and weights, as they lie in memory, of a run that wants results only."""

from __future__ import annotations

from typing import Any

import torch

from zipmoe.engine.fused_compute import STEP_ROWS_MAX


def readable_rows(x: Any, columns: int, rows_max: int = STEP_ROWS_MAX) -> bool:
    """Whether ``x`` is BF16 (..., columns) with at most ``rows_max`` rows, contiguous on the CPU, and neither
    gradients nor the conversions of ``torch.autocast`` are asked for.
    """
    return (
        isinstance(x, torch.Tensor)
        and x.dtype is torch.bfloat16
        and x.dim() > 0
        and x.shape[-1] == columns
        and 0 < x.numel() <= rows_max * columns
        and x.is_contiguous()
        and x.is_cpu
        and not records_gradients(x)
        and not torch.is_autocast_enabled("cpu")
    )


def readable_weight(weight: torch.Tensor | None, dimensions: int) -> bool:
    """Whether the native core reads a parameter where it lies: BF16, contiguous, of so many dimensions, no gradients.

    None stands for one that something else has taken the place of (torch.nn.utils.parametrize, pruning).
    """
    return (
        weight is not None
        and weight.dim() == dimensions
        and weight.dtype is torch.bfloat16
        and weight.is_contiguous()
        and not records_gradients(weight)
    )


def records_gradients(tensor: torch.Tensor | None) -> bool:
    """Whether autograd would record an operation on ``tensor``."""
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()
