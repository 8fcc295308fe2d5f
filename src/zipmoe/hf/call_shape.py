"""How many tokens a call of a model is for, told from its arguments."""

from __future__ import annotations

from typing import Any

import torch

_INPUTS = ("decoder_input_ids", "input_ids", "inputs_embeds", "decoder_inputs_embeds")


def call_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """(sequences, new tokens of each) of a call."""
    given = next((kwargs[name] for name in _INPUTS if kwargs.get(name) is not None), args[0] if args else None)
    return (given.shape[0], given.shape[1]) if isinstance(given, torch.Tensor) and given.dim() > 1 else (0, 0)
