"""Floating-point operations that a prompt needs at least, from the shapes of the model.

Counted are multiplications and additions, two for every weight that a token passes: dense matrices, routers, and as
many experts as the model activates per token; the output matrix once per sequence, since only the last position's
logits are needed; and causal attention, query by key and weight by value, for the positions that a token may look at.
Norms, activations, softmax and rotary embeddings are left out, as they are little work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, first, text_config, value
from zipmoe.hf.embedding_parameters import embedding_parameters
from zipmoe.store.manifest import Manifest, Record

_HEADS = ("num_attention_heads", "n_head", "n_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class PrefillWork:
    """What the worker tells of its model."""

    token_parameters: float
    """Weights that every token of the prompt passes."""
    sequence_parameters: int
    """Weights that only the last token of every sequence passes."""
    full_attention_width: int
    """Heads times (query width + value width), summed over the layers that look at all earlier positions."""
    sliding_attention_width: int = 0
    """The same for layers that look back no further than ``window``."""
    window: int = 0

    def operations(self, tokens: int, sequences: int = 1) -> float:
        """For ``sequences`` prompts of ``tokens`` tokens each."""
        linear = 2.0 * (tokens * self.token_parameters + self.sequence_parameters)
        full = self.full_attention_width * _pairs(tokens, tokens)
        sliding = self.sliding_attention_width * _pairs(tokens, self.window)
        return sequences * (linear + 2.0 * (full + sliding))

    def to_json(self) -> dict[str, Any]:
        """For the worker's line."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> PrefillWork:
        """The other side of ``to_json``."""
        return cls(**fields)


def prefill_work(model: nn.Module, manifest: Manifest) -> PrefillWork | None:
    """Of a decoder with packed experts; None if its config does not say what must be known, or it has an encoder."""
    config: Any = model.config
    text = text_config(config)
    experts_per_token = first(text, EXPERTS_PER_TOKEN)
    widths = _attention_widths(text)
    if experts_per_token is None or widths is None or getattr(config, "is_encoder_decoder", False):
        return None
    looked_up = embedding_parameters(model)
    output = _output_parameter(model)
    dense = sequence = 0
    sizes = [({each.parameter, *each.tied_parameters}, each.rows * each.columns) for each in manifest.dense]
    sizes += [
        ({name}, parameter.numel())
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta" and parameter.dim() >= 2
    ]
    for names, weights in sizes:
        if output in names:
            sequence += weights
        elif not names <= looked_up:
            dense += weights
    experts = sum(experts_per_token * _expert_weights(group.records) for group in manifest.expert_groups)
    return PrefillWork(dense + experts, sequence, *widths)


def _expert_weights(records: Sequence[Record]) -> float:
    """Weights of an expert, mean."""
    return sum(matrix.rows * matrix.columns for record in records for matrix in record.matrices) / len(records)


def _output_parameter(model: nn.Module) -> str | None:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    names = (name for name, module in model.named_modules(remove_duplicate=False) if module is output)
    return next((f"{name}.weight" for name in names), None) if output is not None else None


def _attention_widths(text: Any) -> tuple[int, int, int] | None:
    """Widths of layers with full and with sliding attention, and the window; other kinds of layers need no pairs."""
    heads, hidden, layers = first(text, _HEADS), first(text, _HIDDEN), first(text, ("num_hidden_layers", "n_layer"))
    if heads is None or hidden is None or layers is None:
        return None
    query = first(text, ("head_dim",)) or hidden // heads
    rotary = first(text, ("qk_rope_head_dim",))
    if rotary is not None:  # latent attention: a part with positions and one without
        query = rotary + (first(text, ("qk_nope_head_dim",)) or 0)
    width = heads * (query + (first(text, ("v_head_dim",)) or query))
    kinds = value(text, "layer_types") or [_FULL] * layers
    window = first(text, ("sliding_window",)) or 0
    return width * kinds.count(_FULL), width * kinds.count(_SLIDING), window


def _pairs(tokens: int, window: int) -> float:
    """Pairs of a position and one that it looks at, itself included, no more than ``window`` each."""
    reach = min(tokens, window)
    return reach * (reach + 1) / 2 + (tokens - reach) * reach
