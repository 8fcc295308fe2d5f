"""What decoder layers and sparse blocks of the widespread shape do with their parts, told by asking their own code.

The code runs once on an object that has nothing but stand-ins for the parts: each looks at what it is given and answers
with random values. From the result follows how the answers are put together. Code that mentions anything beside the
parts and the reshaping of tensors is not asked, and nothing else can be done with the values (``watched_tensor.py``):
what it did once, it does always.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.nn import functional

from zipmoe.hf.experts_forward import PackedInterfaceExperts
from zipmoe.hf.fused_attention import CACHE_NAMES, FusedAttention
from zipmoe.hf.fused_feed_forward import FusedFeedForward
from zipmoe.hf.fused_linear import FusedLinear
from zipmoe.hf.fused_norm import FusedNorm
from zipmoe.hf.fused_router import FusedRouter
from zipmoe.hf.mentioned_names import is_of_transformers, mentioned_names
from zipmoe.hf.module_parts import family_forward, is_called_as_known
from zipmoe.hf.watched_tensor import WatchedSize, WatchedTensor, plain, watched

_SIZES = {"hidden_dim", "input_size"}
"""Attributes of blocks: of the hidden states."""
_RESHAPING = {"shape", "view", "reshape", "size", "flatten"}
_SIGMOID = {"F", "functional", "nn", "torch", "sigmoid"}
_TRAINING = {"training", "jitter_noise", "input_jitter_noise", "torch", "empty_like", "uniform_"}
"""Blocks that make their inputs noisy say so: in training only, which none of this is for."""
_SHAPES = ((1, 1), (3, 1))
"""Sequences and tokens of each that the code is asked with."""
_WIDTH = 16
_EXPERTS = 8
_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Of code that wants something else."""
_CHOICES = {*dis.hasjrel, *dis.hasjabs} | {
    dis.opmap[name] for name in ("COMPARE_OP", "CONTAINS_OP", "IS_OP", "UNARY_NOT")
}
"""Instructions of code that does one thing or another."""


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
    function = _own_function(layer)
    if function is None or not _is_straight(function.__code__) or not all(map(is_called_as_known, children.values())):
        return None
    asked = [(options, shape) for options in _known_options(function) for shape in _SHAPES]
    return parts if all(_is_layer(function, parts, *each) for each in asked) else None


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
    if not {*children} <= {*names} <= {*children} | _SIZES | _RESHAPING | _SIGMOID | _TRAINING:
        return None
    function = _own_function(block)
    if function is None or not all(map(is_called_as_known, (block, *children.values()))):
        return None
    width = children[parts.router].weight.shape[1]
    return parts if all(_is_block(function, block, parts, (*shape, width)) for shape in _SHAPES) else None


def _children(module: Any) -> dict[str, Any]:
    return {name: child for name, child in module._modules.items() if child is not None}


def _own_function(module: Any) -> Callable[..., Any] | None:
    """The ``forward`` of the family; None if there is more to it than its code."""
    function = family_forward(module)
    while hasattr(function, "__wrapped__"):
        if not is_of_transformers(function):
            return None
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or code.co_exceptiontable:
        return None  # what went wrong would go on otherwise
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return function if all(value is None or isinstance(value, bool) for value in defaults) else None


def _is_straight(code: CodeType) -> bool:
    """Whether code does the same whatever the options are that it is given."""
    return not any(instruction.opcode in _CHOICES for instruction in dis.get_instructions(code))


class _StandIn:
    """For a module: has these attributes, which stay."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __setattr__(self, name: str, value: Any) -> None:
        raise _UnexpectedError(name)

    __delattr__ = __setattr__  # type: ignore[assignment]


class _Part:
    """Stands for a child. It answers with a copy, so that nobody changes what is expected."""

    def __init__(self, given: torch.Tensor, answer: torch.Tensor) -> None:
        self._given, self._answer = given, answer
        self.calls = 0

    def answer_to(self, given: Any) -> WatchedTensor:
        self.calls += 1
        if not _same(given, self._given):
            raise _UnexpectedError("a part's input")
        return watched(self._answer)


class _PartOfTokens(_Part):
    """Does the same to each token, in any shape."""

    def answer_to(self, given: Any) -> WatchedTensor:
        answer = super().answer_to(given.reshape(self._given.shape))
        return watched(plain(answer).view(*plain(given).shape[:-1], -1))


def _is_layer(function: Callable[..., Any], parts: LayerParts, options: dict[str, Any], shape: tuple[int, int]) -> bool:
    x, normed, attended, normed_again, fed = _gaussian(5, (*shape, _WIDTH))
    summed = x + attended
    asked = [_Part(x, normed), _Part(normed, attended), _Part(summed, normed_again), _Part(normed_again, fed)]
    first, attention, second, feed_forward = asked

    def attend(*, hidden_states: Any, **given: Any) -> tuple[torch.Tensor, None]:
        for name, value in given.items():
            if value is not None and value is not False and value is not options.get(name):
                raise _UnexpectedError(name)
        for name in ("position_embeddings", *(name for name in CACHE_NAMES if name in options)):
            if given.get(name) is not options[name]:
                raise _UnexpectedError(name)
        return attention.answer_to(hidden_states), None

    stand_in = _StandIn(
        **{
            parts.attention_norm: first.answer_to,
            parts.attention: attend,
            parts.feed_forward_norm: second.answer_to,
            parts.feed_forward: feed_forward.answer_to,
        }
    )
    found = _answer(function, stand_in, x, **options)
    return _same(found, summed + fed) and all(part.calls == 1 for part in asked)


def _known_options(function: Callable[..., Any]) -> list[dict[str, Any]]:
    """What a layer of a model may be given beside its hidden states, in each call its cache under another name; values
    that are like no others.
    """
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())

    def taken(*names: str) -> list[str]:
        return [name for name in names if takes_all or name in parameters]

    given: dict[str, Any] = {name: object() for name in taken("position_ids", "use_cache")}
    given |= {name: None for name in taken("attention_mask")} | {"position_embeddings": (object(), object())}
    return [given | {name: object()} for name in taken(*CACHE_NAMES)] or [given]


def _is_block(function: Callable[..., Any], block: Any, parts: BlockParts, shape: tuple[int, int, int]) -> bool:
    rows = shape[0] * shape[1]
    x, routed, shared, logits = _gaussian(4, shape)
    flat, routed, shared = (values.view(rows, -1) for values in (x, routed, shared))
    gate = logits.view(rows, -1)[:, :1].contiguous()
    weights = torch.rand((rows, 2), generator=torch.Generator().manual_seed(1))
    ids = torch.arange(2 * rows).view(rows, 2) % _EXPERTS
    told = watched(weights), watched(ids)
    routes_any_shape = _routes_any_shape(block._modules[parts.router])
    router = (_PartOfTokens if routes_any_shape else _Part)(flat, logits.view(rows, -1)[:, :_EXPERTS])
    experts = _Part(flat, routed)

    def route(given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return router.answer_to(given), *told

    def compute(hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        if top_k_weights is not told[0] or top_k_index is not told[1]:
            raise _UnexpectedError("the router's answer")
        if not (_same(told[0], weights) and _same(told[1], ids)):
            raise _UnexpectedError("the router's answer, changed")
        return experts.answer_to(hidden_states)

    held = {name: WatchedSize(value) for name, value in vars(block).items() if name in _SIZES and type(value) is int}
    attributes = {**held, "training": False, parts.router: route, parts.experts: compute}
    asked, expected = [router, experts], routed
    if parts.shared is not None:
        asked.append(_PartOfTokens(flat, shared))
        attributes[parts.shared] = asked[-1].answer_to
        if parts.gate is not None:
            asked.append(_PartOfTokens(flat, gate))
            attributes[parts.gate] = asked[-1].answer_to
            shared = functional.sigmoid(gate) * shared
        expected = routed + shared
    found = _answer(function, _StandIn(**attributes), x)
    return _same(found, expected.view(x.shape)) and all(part.calls == 1 for part in asked)


def _routes_any_shape(router: FusedRouter) -> bool:
    native = router._zipmoe_native
    return native is not None and native.any_shape


def _answer(function: Callable[..., Any], stand_in: _StandIn, x: torch.Tensor, **options: Any) -> Any:
    """Of code that leaves its inputs as they are; else None."""
    given = watched(x)
    with torch.inference_mode():
        try:
            answer = function(stand_in, given, **options)
        except _FAILURES:
            return None
    return answer if _same(given, x) else None


def _same(found: Any, expected: torch.Tensor) -> bool:
    if not isinstance(found, WatchedTensor):
        return False
    values = plain(found)
    return values.dtype is expected.dtype and torch.equal(values, expected)


def _gaussian(count: int, shape: tuple[int, int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(count)]
