"""What decoder layers and sparse blocks of the widespread shape do with their parts, told by asking their own code.

The code runs once on an object that has nothing but stand-ins for the parts: each looks at what it is given and answers
with random values. From the result follows how the answers are put together. Code that mentions anything beside the
parts and the reshaping of tensors is not asked: it may do something else with other values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from zipmoe.hf.experts_forward import PackedInterfaceExperts
from zipmoe.hf.fused_attention import CACHE_NAMES, FusedAttention
from zipmoe.hf.fused_feed_forward import FusedFeedForward
from zipmoe.hf.fused_linear import FusedLinear
from zipmoe.hf.fused_norm import FusedNorm
from zipmoe.hf.fused_router import FusedRouter
from zipmoe.hf.mentioned_names import mentioned_names
from zipmoe.hf.module_parts import family_forward

_RESHAPING = {"shape", "view", "reshape", "size", "flatten", "hidden_dim", "input_size"}
_SIGMOID = {"F", "functional", "nn", "torch", "sigmoid"}
_TRAINING = {"training", "jitter_noise", "input_jitter_noise", "torch", "empty_like", "uniform_"}
"""Blocks that make their inputs noisy say so: in training only, which none of this is for."""
_SHAPES = ((1, 1), (3, 1))
"""Sequences and tokens of each that the code is asked with."""
_WIDTH = 16
_EXPERTS = 8
_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Of code that wants something else."""


class _UnexpectedError(ValueError):
    """A part was given something else than in the known shape."""


@dataclass(frozen=True)
class LayerParts:
    """Names of a layer's children: h = x + attention(norm(x)), then h + feed_forward(norm(h))."""

    attention_norm: str
    attention: str
    feed_forward_norm: str
    feed_forward: str


@dataclass(frozen=True)
class BlockParts:
    """Names of a sparse block's children: experts(x, router(x)), plus the output of the shared expert, if there is one,
    which is multiplied with sigmoid(gate(x)), if there is a gate.
    """

    router: str
    experts: str
    shared: str | None = None
    gate: str | None = None


def layer_parts(layer: Any) -> LayerParts | None:
    """The parts of a layer of the known shape, with an attention and norms of the native core; else None."""
    names = mentioned_names(type(layer))
    children = _children(layer)
    if names is None or len(names) != len(LayerParts.__annotations__) or {*names} != {*children}:
        return None
    if layer._parameters or layer._buffers:
        return None
    parts = LayerParts(*names)
    kinds = [(parts.attention_norm, FusedNorm), (parts.attention, FusedAttention), (parts.feed_forward_norm, FusedNorm)]
    if not all(isinstance(children[name], kind) for name, kind in kinds):
        return None
    function = inspect.unwrap(family_forward(layer))
    return parts if all(_is_layer(function, parts, shape) for shape in _SHAPES) else None


def block_parts(block: Any) -> BlockParts | None:
    """The parts of a sparse block of the known shape, all of the native core; else None."""
    names = mentioned_names(type(block))
    children = _children(block)
    if names is None or block._parameters or block._buffers:
        return None

    def of(kind: type) -> list[str]:
        return [name for name, child in children.items() if isinstance(child, kind)]

    routers, experts, shared, gates = map(of, (FusedRouter, PackedInterfaceExperts, FusedFeedForward, FusedLinear))
    if len(routers) != 1 or len(experts) != 1 or len(shared) > 1 or len(gates) > len(shared):
        return None
    parts = BlockParts(routers[0], experts[0], *shared, *gates)
    if len(children) != 2 + len(shared) + len(gates):
        return None
    if not {*children} <= {*names} <= {*children} | _RESHAPING | _SIGMOID | _TRAINING:
        return None
    function = inspect.unwrap(family_forward(block))
    width = children[parts.router].weight.shape[1]
    return parts if all(_is_block(function, block, parts, (*shape, width)) for shape in _SHAPES) else None


def _children(module: Any) -> dict[str, Any]:
    return {name: child for name, child in module._modules.items() if child is not None}


def _is_layer(function: Callable[..., Any], parts: LayerParts, shape: tuple[int, int]) -> bool:
    x, normed, attended, normed_again, fed = _gaussian(5, (*shape, _WIDTH))
    given = _known_options(function)
    summed = x + attended

    def attention(**options: Any) -> tuple[torch.Tensor, None]:
        _require(options.pop("hidden_states", None), normed)
        for name, value in options.items():
            if value is not None and value is not False and value is not given.get(name):
                raise _UnexpectedError(name)
        for name in ("position_embeddings", *(name for name in CACHE_NAMES if name in given)):
            if options.get(name) is not given[name]:
                raise _UnexpectedError(name)
        return attended, None

    stand_in = SimpleNamespace(
        **{
            parts.attention_norm: _answering(normed, x),
            parts.attention: attention,
            parts.feed_forward_norm: _answering(normed_again, summed),
            parts.feed_forward: _answering(fed, normed_again),
        }
    )
    return _same(_answer(function, stand_in, x, **given), summed + fed)


def _known_options(function: Callable[..., Any]) -> dict[str, Any]:
    """What a layer of a model is given beside its hidden states; values that are like no others."""
    parameters = inspect.signature(function).parameters
    given: dict[str, Any] = {name: object() for name in CACHE_NAMES if name in parameters}
    given["position_embeddings"] = (object(), object())
    given |= {name: None for name in ("attention_mask",) if name in parameters}
    given |= {name: object() for name in ("position_ids",) if name in parameters}
    return given | {name: True for name in ("use_cache",) if name in parameters}


def _is_block(function: Callable[..., Any], block: Any, parts: BlockParts, shape: tuple[int, int, int]) -> bool:
    rows = shape[0] * shape[1]
    x, routed, shared, logits = _gaussian(4, shape)
    routed, flat = routed.view(rows, -1), x.view(rows, -1)
    weights = torch.rand((rows, 2), generator=torch.Generator().manual_seed(1))
    ids = torch.arange(2 * rows).view(rows, 2) % _EXPERTS
    gate = logits.view(rows, -1)[:, :1].contiguous()
    called = []

    def router(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _require(given.reshape(flat.shape), flat)
        called.append(parts.router)
        return logits.view(rows, -1)[:, :_EXPERTS], weights, ids

    def experts(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        _require(hidden_states, flat)
        if top_k_index is not ids or top_k_weights is not weights:
            raise _UnexpectedError("the router's answer")
        called.append(parts.experts)
        return routed

    def of_tokens(name: str, answer: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def called_with(given: torch.Tensor) -> torch.Tensor:
            _require(given.reshape(flat.shape), flat)
            called.append(name)
            return answer.view(*given.shape[:-1], answer.shape[-1])

        return called_with

    held = {name: value for name, value in vars(block).items() if isinstance(value, bool | int | float)}
    stand_in = SimpleNamespace(**{**held, "training": False, parts.router: router, parts.experts: experts})
    expected = routed
    if parts.shared is not None:
        output = shared.view(rows, -1)
        setattr(stand_in, parts.shared, of_tokens(parts.shared, output))
        if parts.gate is not None:
            setattr(stand_in, parts.gate, of_tokens(parts.gate, gate))
            output = functional.sigmoid(gate) * output
        expected = routed + output
    found = _answer(function, stand_in, x)
    names = [parts.router, parts.experts, *(name for name in (parts.shared, parts.gate) if name is not None)]
    return _same(found, expected.view(x.shape)) and sorted(called) == sorted(names)


def _answer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.inference_mode():
        try:
            return function(*args, **kwargs)
        except _FAILURES:
            return None


def _answering(answer: torch.Tensor, expected: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def part(given: torch.Tensor) -> torch.Tensor:
        _require(given, expected)
        return answer

    return part


def _require(given: Any, expected: torch.Tensor) -> None:
    if not _same(given, expected):
        raise _UnexpectedError("a part's input")


def _same(found: Any, expected: torch.Tensor) -> bool:
    return isinstance(found, torch.Tensor) and found.dtype is expected.dtype and torch.equal(found, expected)


def _gaussian(count: int, shape: tuple[int, int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(count)]
