"""Floating-point operations of a prompt's pass as plain Transformers makes it, from the shapes of the model.

That is a yardstick, and stays the same whatever the engine leaves out. Beside it stands what the logits need: of the
last layer only the keys and values are needed of every position. Counted are multiplications and additions, two for
every weight that a token passes: dense matrices, routers, and as many experts as the model activates per token; the
output matrix once per sequence, since only the last position's logits are needed; and causal attention, query by key
and weight by value, for the positions that a token may look at. Norms, activations, softmax and rotary embeddings are
left out, as they are little work.
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
    last_layer_parameters: float = 0.0
    """Of ``token_parameters``, those that only the last token of every sequence needs to pass: in the last layer."""
    last_layer_attention_width: int = 0
    """The last layer's part of the widths, where only the last token needs to look at others."""
    last_layer_slides: bool = False
    """Whether it is part of ``sliding_attention_width``."""

    def operations(self, tokens: int, sequences: int = 1) -> float:
        """For ``sequences`` prompts of ``tokens`` tokens each."""
        linear = 2.0 * (tokens * self.token_parameters + self.sequence_parameters)
        full = self.full_attention_width * _pairs(tokens, tokens)
        sliding = self.sliding_attention_width * _pairs(tokens, self.window)
        return sequences * (linear + 2.0 * (full + sliding))

    def needed_operations(self, tokens: int, sequences: int = 1) -> float:
        """The same without what the last layer computes of positions whose logits nobody asks for."""
        window = self.window if self.last_layer_slides else tokens
        pairs = _pairs(tokens, window) - min(tokens, window)
        spared = (tokens - 1) * self.last_layer_parameters + self.last_layer_attention_width * pairs
        return self.operations(tokens, sequences) - 2.0 * sequences * spared

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
    attention = _attention(text)
    if experts_per_token is None or attention is None or getattr(config, "is_encoder_decoder", False):
        return None
    looked_up, output = embedding_parameters(model), _output_parameter(model)
    matrices = _matrices(model, manifest)
    passed = [each for each in matrices if output not in each.names and not each.names <= looked_up]
    experts = [experts_per_token * _expert_weights(group.records) for group in manifest.expert_groups]
    groups = manifest.expert_groups
    last = _LastLayer.of(groups[-1].path, len(attention.kinds)) if groups else None
    spared = [] if last is None else [each for each in passed if each.is_of(last.block, last.queries, last.output)]
    pairs_spared = last is not None and any(each.is_of(last.queries) for each in spared)
    return PrefillWork(
        token_parameters=sum(each.weights for each in passed) + sum(experts),
        sequence_parameters=sum(each.weights for each in matrices if output in each.names),
        full_attention_width=attention.width * attention.kinds.count(_FULL),
        sliding_attention_width=attention.width * attention.kinds.count(_SLIDING),
        window=attention.window,
        last_layer_parameters=0.0 if last is None else sum(each.weights for each in spared) + experts[-1],
        last_layer_attention_width=attention.width if pairs_spared and attention.kinds[-1] in (_FULL, _SLIDING) else 0,
        last_layer_slides=attention.kinds[-1] == _SLIDING,
    )


@dataclass(frozen=True)
class _Matrix:
    names: frozenset[str]
    """Of the parameter, and of those that are tied to it."""
    weights: int

    def is_of(self, *modules: str) -> bool:
        """Whether it belongs to one of these modules, or to a part of one."""
        return any(name.startswith(f"{module}.") for name in self.names for module in modules)


def _matrices(model: nn.Module, manifest: Manifest) -> list[_Matrix]:
    """Those of no expert, packed or not."""
    packed = [
        _Matrix(frozenset((each.parameter, *each.tied_parameters)), each.rows * each.columns) for each in manifest.dense
    ]
    return packed + [
        _Matrix(frozenset((name,)), parameter.numel())
        for name, parameter in model.named_parameters()
        if parameter.device.type != "meta" and parameter.dim() >= 2
    ]


@dataclass(frozen=True)
class _LastLayer:
    """Names of its modules that only tokens need to pass whose logits are asked for."""

    block: str
    """Router, experts and shared expert."""
    queries: str
    output: str
    """Of attention."""

    @classmethod
    def of(cls, last_experts: str, layers: int) -> _LastLayer | None:
        """None if the last layer is not a sparse one.

        Args:
            last_experts: path of the last experts of the model.
            layers: of the model.
        """
        block = last_experts.rpartition(".")[0]
        layer = block.rpartition(".")[0]
        if layer.rpartition(".")[2] != str(layers - 1):
            return None
        return cls(block, f"{layer}.self_attn.q_proj", f"{layer}.self_attn.o_proj")


def _expert_weights(records: Sequence[Record]) -> float:
    """Weights of an expert, mean."""
    return sum(matrix.rows * matrix.columns for record in records for matrix in record.matrices) / len(records)


def _output_parameter(model: nn.Module) -> str | None:
    output = getattr(model, "get_output_embeddings", lambda: None)()
    names = (name for name, module in model.named_modules(remove_duplicate=False) if module is output)
    return next((f"{name}.weight" for name in names), None) if output is not None else None


@dataclass(frozen=True)
class _Attention:
    width: int
    """Heads times (query width + value width), of a layer."""
    kinds: list[str]
    """By layer; others than full and sliding attention need no pairs."""
    window: int


def _attention(text: Any) -> _Attention | None:
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
    return _Attention(width, list(kinds), window)


def _pairs(tokens: int, window: int) -> float:
    """Pairs of a position and one that it looks at, itself included, no more than ``window`` each."""
    reach = min(tokens, window)
    return reach * (reach + 1) / 2 + (tokens - reach) * reach
