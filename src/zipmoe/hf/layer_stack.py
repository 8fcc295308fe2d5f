"""The decoder layers of a model one behind the other: the first one's call computes those after it, too, because the
native core goes from one to the next without Python in between.

What was computed so is a guess until its layer is called, with what the layer before has returned, bit for bit, and
otherwise with the very same objects; then it is the layer's result. Whatever else comes is computed anew: a guess is
seen nowhere in the cache of keys and values, which does not grow by a token before the layer is called (experts were
requested and counted, though). Layers with hooks, around which somebody may do anything, are computed when they are
called.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from zipmoe import _native
from zipmoe.engine.fused_compute import LayerStep
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

    __slots__ = ("call", "feed_forward", "keys", "layer", "norms", "room")

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
        self.keys = call.cache_layer.keys

    @property
    def tokens(self) -> int:
        """Cached ones."""
        return int(self.keys.shape[2])

    def grow_cache(self) -> None:
        """Let the cache hold the new token."""
        self.room.give(self.call.cache_layer, self.tokens + 1)


class _Guess:
    """A layer's output that was computed ahead. Keeps neither the layer nor the cache alive.

    Args:
        step: what it was computed with.
        given: BF16 (sequences, 1, hidden), the layer's input; nobody else's.
        output: alike.
    """

    def __init__(self, step: PreparedLayer, given: torch.Tensor, output: torch.Tensor) -> None:
        self._layer = weakref.ref(step.layer)
        self._cache_layer: weakref.ref[Any] = weakref.ref(step.call.cache_layer)
        self._keys = weakref.ref(step.keys)
        self._room = weakref.ref(step.room)
        self._given = given
        self.output = output

    def take(self, layer: Any, hidden: torch.Tensor) -> bool:
        """Whether the layer is called with this input; then its cache grows."""
        cache_layer, room, keys, given = self._cache_layer(), self._room(), self._keys(), self._given
        if (
            self._layer() is not layer
            or cache_layer is None
            or room is None
            or keys is None
            or cache_layer.keys is not keys
            or hidden.shape != given.shape
            or hidden.dtype is not given.dtype
            or not hidden.is_contiguous()
            or not torch.equal(hidden.view(torch.int16), given.view(torch.int16))
        ):
            return False
        room.give(cache_layer, keys.shape[2] + 1)
        return True


class _Ahead:
    """The guesses of one call.

    Args:
        first: the position of the layer that was called.
        guesses: for the layers after it.
        options: keyword arguments of the call, of which none is kept alive that can be referred to otherwise.
    """

    def __init__(self, first: int, guesses: list[_Guess], options: dict[str, Any]) -> None:
        self.first = first
        self.taken = 0
        self._guesses = guesses
        self._options = {name: _reference(value) for name, value in options.items()}

    @property
    def is_used_up(self) -> bool:
        """Whether all have been taken."""
        return self.taken == len(self._guesses)

    def take(self, layer: Any, hidden: torch.Tensor, options: dict[str, Any]) -> torch.Tensor | None:
        """The next guess, if it is that of this call."""
        guess = self._guesses[self.taken]
        same = options.keys() == self._options.keys() and all(
            self._options[name]() is value for name, value in options.items()
        )
        if not same or not guess.take(layer, hidden):
            return None
        self.taken += 1
        return guess.output if self.is_used_up else guess.output.clone()


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class _OfThread(threading.local):
    ahead: _Ahead | None = None


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
        output = ahead.take(layer, hidden, options)
        if output is None:
            self._limits[ahead.first] = (ahead.taken + 1, _TRIAL_STEPS)
        if output is None or ahead.is_used_up:
            of_thread.ahead = None
        return output

    def run(self, first: PreparedLayer, options: dict[str, Any]) -> torch.Tensor:
        """The output of a layer that is called with these keyword arguments, and, to be taken later, of those after it.

        Args:
            first: with a second half.
            options: of the call.
        """
        call = first.call
        steps = [first, *self._prepared_after(first, options)]
        outs = call.native.compute.layers(
            [_layer_step(step) for step in steps], call.hidden_states, call.cosines, call.sines
        )
        first.grow_cache()
        if len(steps) == 1:
            return outs[0]
        guesses = [_Guess(step, outs[number], outs[number + 1]) for number, step in enumerate(steps[1:])]
        self._of_thread.ahead = _Ahead(self._position(first.layer), guesses, options)
        return outs[0].clone()

    def _prepared_after(self, first: PreparedLayer, options: dict[str, Any]) -> list[PreparedLayer]:
        position = self._position(first.layer)
        most, steps_left = self._limits.get(position, (len(self._layers), 0))
        if steps_left == 1:
            self._limits.pop(position, None)  # another thread may have been faster
        elif steps_left > 1:
            self._limits[position] = (most, steps_left - 1)
        found: list[PreparedLayer] = []
        if any(hooks_of_all_modules()) or not _is_called_plainly(first.layer):
            return found
        for reference in self._layers[position + 1 : position + most]:
            layer = reference()
            if layer is None or not _is_called_plainly(layer) or not layer.zipmoe_is_ready():
                break
            prepared = layer.zipmoe_prepared(first.call.hidden_states, options)
            if prepared is None or prepared.feed_forward is None:
                break
            if prepared.call.native.compute is not first.call.native.compute:
                break
            found.append(prepared)
        return found

    def _position(self, layer: FusedLayer) -> int:
        return self._positions[id(layer)]


def _is_called_plainly(layer: Any) -> bool:
    """Whether a call of a layer runs its class's ``forward`` and nothing else."""
    held = vars(layer)
    return not any(held[name] for name in HOOKS) and "forward" not in held and not is_compiled(layer)


def _layer_step(step: PreparedLayer) -> LayerStep:
    assert step.feed_forward is not None
    return LayerStep(step.norms, step.call.native.layer, step.feed_forward, step.room, step.tokens)
