"""Bytes of packed weights that one step of a model must read from memory, whatever is cached."""

from __future__ import annotations

from torch import nn

from zipmoe.hf.embedding_parameters import embedding_parameters
from zipmoe.store.manifest import Manifest


def always_active_bytes(model: nn.Module, manifest: Manifest) -> int:
    """Weights that every step uses: packed dense matrices as they are stored, and what was left unpacked.

    Embedding tables are left out, of which a step uses a row per token, unless they are tied to an output matrix.
    """
    looked_up = embedding_parameters(model)
    packed = sum(
        block.length
        for matrix in manifest.dense
        if not {matrix.parameter, *matrix.tied_parameters} <= looked_up
        for block in matrix.blocks
    )
    parameters = (parameter for name, parameter in model.named_parameters() if name not in looked_up)
    plain = sum(parameter.nbytes for parameter in parameters if parameter.device.type != "meta")
    return packed + plain


def mean_expert_bytes(manifest: Manifest) -> float:
    """Mean length of an expert's record; 0 for a model without packed experts."""
    lengths = [record.length for group in manifest.expert_groups for record in group.records]
    return sum(lengths) / len(lengths) if lengths else 0.0
