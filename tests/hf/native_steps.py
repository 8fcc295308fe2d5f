"""Models that compute parts of a step natively beside the same ones that do not, for comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import zipmoe
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.configuration import ZipMoEConfig


@dataclass
class Calls:
    """How often the native core was asked for a whole attention, or a whole feed-forward network, be it in a call of
    its own or in that of a layer.
    """

    attention: int = 0
    feed_forward: int = 0
    layers: int = 0
    """Whole layers, with their feed-forward networks or sparse blocks."""
    layer_calls: int = 0
    """Calls for one or several of those."""
    first_halves: int = 0
    """Calls for a layer without those."""
    tokens: list[int] = field(default_factory=list)
    """Cached tokens at each call of attention."""


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    attention, feed_forward = FusedCompute.attention, FusedCompute.feed_forward
    layers, first_half = FusedCompute.layers, FusedCompute.attention_in_layer

    def counted_attention(self: FusedCompute, *args: Any) -> torch.Tensor:
        calls.attention += 1
        calls.tokens.append(args[-1])
        return attention(self, *args)

    def counted_feed_forward(self: FusedCompute, *args: Any) -> torch.Tensor:
        calls.feed_forward += 1
        return feed_forward(self, *args)

    def counted_layers(self: FusedCompute, steps: Any, *args: Any) -> torch.Tensor:
        calls.attention += len(steps)
        calls.layers += len(steps)
        calls.layer_calls += 1
        calls.tokens += [step.tokens for step in steps]
        return layers(self, steps, *args)

    def counted_first_half(self: FusedCompute, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.attention += 1
        calls.first_halves += 1
        calls.tokens.append(args[-1])
        return first_half(self, *args)

    monkeypatch.setattr(FusedCompute, "layers", counted_layers)
    monkeypatch.setattr(FusedCompute, "attention_in_layer", counted_first_half)
    monkeypatch.setattr(FusedCompute, "attention", counted_attention)
    monkeypatch.setattr(FusedCompute, "feed_forward", counted_feed_forward)
    return calls


def load(folder: Path, fused_steps: bool = True) -> Any:
    settings = ZipMoEConfig(memory="8GB", mode="fast", fused_steps=fused_steps)
    return zipmoe.load(folder, quantization_config=settings).eval()


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Attention:
    """Attention of the first layer of a model, fed with random hidden states."""

    def __init__(self, model: Any, layer: int = 0) -> None:
        self.model = model
        self.module = model.model.layers[layer].self_attn
        self.layer = layer
        self._seed = 0

    def __call__(self, cache: Any, rows: int = 1, tokens: int = 1, **options: Any) -> torch.Tensor:
        """Output for new tokens of each row, drawn from a sequence that is the same for every object."""
        self._seed += 1
        hidden = gaussian(rows, tokens, self.model.config.hidden_size, seed=self._seed)
        begin = cache.layers[self.layer].get_seq_length() if len(cache.layers) > self.layer else 0
        return self.of(hidden, begin, cache, **options)

    def of(self, hidden: torch.Tensor, begin: int, cache: Any, **options: Any) -> torch.Tensor:
        positions = self.model.model.rotary_emb(hidden, torch.arange(begin, begin + hidden.shape[1])[None])
        options = {"position_embeddings": positions, "attention_mask": None, "cache": cache} | options
        with torch.no_grad():
            return self.module(hidden_states=hidden, **options)[0]


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Alike but for roundings to BF16, row by row."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    difference = (found.double() - expected.double()).norm(dim=-1)
    return bool((difference <= 2.0**-6 * expected.double().norm(dim=-1)).all())
