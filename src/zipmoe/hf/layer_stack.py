"""The decoder layers of a model one behind the other: the first one's call computes those after it, too, because the
native core goes from one to the next without Python in between.

What was computed so is a guess until its layer is called, with what the layer before has returned, bit for bit, and
otherwise with the very same objects; then it is the layer's result. Whatever else comes is computed anew: a guess is
seen nowhere in the cache of keys and values, which does not grow by a token before the layer is called (experts were
requested and counted, though). It is made within calls of the model around the layers only, and layers with hooks,
around which somebody may do anything, are computed when they are called.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from zipmoe import _native
from zipmoe.engine.fused_compute import LayerStep
from zipmoe.errors import ZipMoEError
from zipmoe.hf.cache_room import CacheRoom
from zipmoe.hf.compiled_calls import is_compiled
from zipmoe.hf.fused_attention import AttentionCall
from zipmoe.hf.quiet_modules import HOOKS, hooks_of_all_modules

if TYPE_CHECKING:
    from zipmoe.hf.fused_layer import FusedLayer

_TRIAL_STEPS = 32
"""Where a guess was wrong, as many steps later it is made again."""


class PreparedLayer:
    """A layer, and what it computes with in a step.

    Args:
        layer: the module.
        norms: of the layer.
        call: of its attention.
        feed_forward: the second half; None for one that is called as ever.
    """

    __slots__ = ("_keys", "_values", "call", "feed_forward", "layer", "norms", "room")

    def __init__(
        self,
        layer: FusedLayer,
        norms: _native.LayerNorms,
        call: AttentionCall,
        feed_forward: _native.DenseNetwork | _native.SparseBlock | None,
    ) -> None:
        self.layer = layer
        self.norms = norms
        self.call = call
        self.feed_forward = feed_forward
        self.room = CacheRoom.behind(call.cache_layer)
        self._keys = call.cache_layer.keys
        self._values = call.cache_layer.values

    @property
    def tokens(self) -> int:
        """Cached ones."""
        return int(self._keys.shape[2])

    def is_as_prepared(self) -> bool:
        """Whether the cache still holds the same."""
        held = self.call.cache_layer
        return held.keys is self._keys and held.values is self._values

    def grow_cache(self) -> None:
        """Let the cache hold the new token."""
        self.room.give(self.call.cache_layer, self.tokens + 1)

    def leave_no_trace(self) -> None:
        """The cache will not hold the new token: a room that was made for it ends."""
        self.room.leave(self.call.cache_layer)


@dataclass(slots=True)
class _Ahead:
    steps: list[PreparedLayer]
    outs: torch.Tensor
    """BF16 [layers, sequences, 1, hidden]; nobody else's."""
    options: dict[str, Any]
    """Keyword arguments of the call that has computed them."""
    taken: int = 1
    """So many layers' results have been asked for."""

    def is_next(self, layer: Any, hidden: torch.Tensor, options: dict[str, Any]) -> bool:
        """Whether the next result is that of this call."""
        step = self.steps[self.taken]
        given = self.outs[self.taken - 1]
        return (
            step.layer is layer
            and options.keys() == self.options.keys()
            and all(options[name] is value for name, value in self.options.items())
            and step.is_as_prepared()
            and hidden.shape == given.shape
            and hidden.dtype is given.dtype
            and hidden.is_contiguous()
            and torch.equal(hidden.view(torch.int16), given.view(torch.int16))
        )


class _OfThread(threading.local):
    ahead: _Ahead | None = None
    calls = 0
    """Of the model around the layers, that are at hand."""


class LayerStack:
    """Layers in the order in which they are called, as far as that is known.

    Args:
        layers: distinct ones; are not kept alive.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self._positions = {id(layer): position for position, layer in enumerate(layers)}
        self._of_thread = _OfThread()
        self._limits: dict[int, tuple[int, int]] = {}  # by the first layer: how many layers, for how many steps to come

    def take(self, layer: FusedLayer, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
        """The layer's output for ``hidden`` (sequences, 1, width) and these keyword arguments, if it is known."""
        of_thread = self._of_thread
        ahead = of_thread.ahead
        if ahead is None:
            return None
        if not ahead.is_next(layer, hidden, options):
            self._give_up(ahead)
            return None
        ahead.steps[ahead.taken].grow_cache()
        output = ahead.outs[ahead.taken].clone()
        ahead.taken += 1
        if ahead.taken == len(ahead.steps):
            of_thread.ahead = None
        return output

    def begin(self) -> None:
        """A call of the model begins, whose own code goes from layer to layer."""
        self._of_thread.calls += 1

    def end(self) -> None:
        """That call has ended: what it has not asked for, nobody will."""
        of_thread = self._of_thread
        of_thread.calls -= 1
        if of_thread.ahead is not None:
            self._give_up(of_thread.ahead)

    def _give_up(self, ahead: _Ahead) -> None:
        """Nobody asks for the rest of these results: for a while no more of them are made."""
        self._of_thread.ahead = None
        for step in ahead.steps[ahead.taken :]:
            step.leave_no_trace()
        self._limits[self._position(ahead.steps[0].layer)] = (ahead.taken, _TRIAL_STEPS)

    def run(self, first: PreparedLayer, options: dict[str, Any]) -> torch.Tensor:
        """The output of a layer that is called with these keyword arguments, and, to be taken later, of those after it.

        Args:
            first: with a second half.
            options: of the call.
        """
        steps = [first, *self._prepared_after(first, options)]
        try:
            outs = _computed(steps)
        except ZipMoEError:  # of a layer that may never be called, and else when it is
            if len(steps) == 1:
                raise
            for step in steps[1:]:
                step.leave_no_trace()
            steps = [first]
            outs = _computed(steps)
        first.grow_cache()
        if len(steps) == 1:
            return outs[0]
        self._of_thread.ahead = _Ahead(steps, outs, options)
        return outs[0].clone()

    def _prepared_after(self, first: PreparedLayer, options: dict[str, Any]) -> list[PreparedLayer]:
        position = self._position(first.layer)
        most, steps_left = self._limits.get(position, (len(self._layers), 0))
        if steps_left > 1:
            self._limits[position] = (most, steps_left - 1)
        else:
            self._limits.pop(position, None)
        found: list[PreparedLayer] = []
        if self._of_thread.calls == 0 or any(hooks_of_all_modules()) or not _is_called_plainly(first.layer):
            return found
        places = {id(first.call.cache_layer)}
        for reference in self._layers[position + 1 : position + most]:
            layer = reference()
            if layer is None or not _is_called_plainly(layer) or not layer.zipmoe_is_ready():
                break
            prepared = layer.zipmoe_prepared(first.call.hidden_states, options)
            if prepared is None or prepared.feed_forward is None:
                break
            if prepared.call.native.compute is not first.call.native.compute:
                break
            if id(prepared.call.cache_layer) in places:
                break  # which is another one after the layer before
            places.add(id(prepared.call.cache_layer))
            found.append(prepared)
        return found

    def _position(self, layer: FusedLayer) -> int:
        return self._positions[id(layer)]


class LayersAhead:
    """The stacks of one model, which are computed ahead within calls of it only, as long as its code is Transformers':
    whoever else goes through the layers may do something in between.

    Args:
        model: around the layers; is not kept alive.
        stacks: its lists of layers.
    """

    def __init__(self, model: Any, stacks: Sequence[LayerStack]) -> None:
        self._forward = type(model).forward
        self._stacks = tuple(stacks)

    def call(self, model: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``call``, which is a call of ``model`` with these arguments."""
        if "forward" in vars(model) or type(model).forward is not self._forward:
            return call(*args, **kwargs)
        for stack in self._stacks:
            stack.begin()
        try:
            return call(*args, **kwargs)
        finally:
            for stack in self._stacks:
                stack.end()


def _is_called_plainly(layer: Any) -> bool:
    """Whether a call of a layer runs its class's ``forward`` and nothing else."""
    held = vars(layer)
    return not any(held[name] for name in HOOKS) and "forward" not in held and not is_compiled(layer)


def _computed(steps: list[PreparedLayer]) -> torch.Tensor:
    call = steps[0].call
    return call.native.compute.layers(
        [_layer_step(step) for step in steps], call.hidden_states, call.cosines, call.sines
    )


def _layer_step(step: PreparedLayer) -> LayerStep:
    assert step.feed_forward is not None
    return LayerStep(step.norms, step.call.native.layer, step.feed_forward, step.room, step.tokens)
