"""Weights of which a step looks single rows up instead of multiplying with all of them."""

from __future__ import annotations

from torch import nn


def embedding_parameters(model: nn.Module) -> set[str]:
    """Full names of the weights of all embeddings of ``model``, packed or not, on the meta device or not.

    A table that is tied to a linear layer has a second name there, which is not among them.
    """
    modules = model.named_modules(remove_duplicate=False)
    return {f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)}
