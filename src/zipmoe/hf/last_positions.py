"""The last layer computes only the positions whose logits are asked for: of a prompt, mostly one.

Of the other positions nothing is looked at after their keys and values are cached in the last layer. In a call of the
model with ``logits_to_keep``, the last sparse block is given the last positions only, and its result is put back at
its place among zeros, so that the layer's own code need not know. The experts of the other positions are neither
computed nor read.

Whose positions are not all asked for is known for one call of the model, and within it for the one call of the base
model that it makes: nested calls, and those of the base model by others, compute in full.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from zipmoe.hf.call_shape import call_shape
from zipmoe.hf.compiled_calls import is_compiled_call
from zipmoe.hf.engine_slot import refuse_copy
from zipmoe.hf.first_use import same_formula
from zipmoe.hf.last_layer import LastLayer, find_last_layer

_HARMLESS_OPTIONS = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "cache", "past_key_values"),
    *("use_cache", "logits_to_keep", "return_dict"),
}
_OUTPUTS_IN_CONFIG = ("output_hidden_states", "output_attentions", "output_router_logits")
_OUTPUT = {"logits", "cache", "past_key_values"}
"""What a model may return: nothing of every position."""
_TRIALS = 3
"""The block's result for some positions is compared with that for all: rounding may turn a near tie of a router over,
but not so often."""


class _State(threading.local):
    """Of the calls at hand, in this thread."""

    asked = 0
    """Last positions of which the base model's call to come is asked for; 0: all."""
    active = 0
    """The same, of the base model's call at hand."""
    shape = (0, 0)
    """Sequences and new positions of each, of the model's call at hand."""
    length = 0
    """Positions of the block's call at hand, which is given fewer; 0: it is not."""
    given: torch.Tensor | None = None
    """What the block's call at hand is given, if that is to be compared."""
    agreed = False
    """Whether the comparison in the model's call at hand has shown the same."""


class LastPositions:
    """What one model leaves out. Holds no modules, which hold this object's hooks.

    Args:
        place: the last sparse block.
    """

    def __init__(self, place: LastLayer) -> None:
        self.place = place
        self.with_attention = False
        """Whether the native core's attention of the last layer asks."""
        self.checked = False
        """Whether a pass has shown that the block's result for some positions is the same without the others."""
        self.fill = 0.0
        """At the other positions."""
        self._trials_left = _TRIALS
        self._state = _State()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy()

    def install(self, model: Any) -> None:
        """Leave out what is not asked for from now on."""
        block: Any = self.place.block()
        # Whoever looks at the block's input, to route early or to look ahead, is to see what the block will.
        block.register_forward_pre_hook(self._before_block, with_kwargs=True, prepend=True)
        block.register_forward_hook(self._after_block)
        layer: Any = self.place.layer()
        name = self.place.attention_name
        attention: Any = None if name is None else layer._modules[name]
        if hasattr(attention, "_zipmoe_last_positions"):
            attention._zipmoe_last_positions = self
            self.with_attention = True
        model._modules[self.place.base_name]._zipmoe_last_positions_of_caller = self
        model.zipmoe_last_positions = self

    def describe(self) -> str:
        """The part of the mode line."""
        if self._trials_left == 0:
            return ""
        what = "experts and queries" if self.with_attention else "experts"
        return f"{what} of the last layer for the positions whose logits are asked for"

    def call_model(self, model: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``call``, which is a call of ``model`` with these arguments."""
        state = self._state
        before = state.asked, state.shape
        state.asked = self._asked(model, args, kwargs)
        state.agreed = False
        try:
            output = call(*args, **kwargs)
        finally:
            state.asked, state.shape = before
        if state.agreed:
            state.agreed = False
            self._conclude(output)
        return output

    def _conclude(self, output: Any) -> None:
        if isinstance(output, dict):
            self.checked = {name for name, value in output.items() if value is not None} <= _OUTPUT
            self._trials_left = _TRIALS if self.checked else 0

    def call_base(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of ``call``, which is a call of the base model with these arguments."""
        state = self._state
        before, state.active, state.asked = state.active, state.asked, 0
        try:
            return call(*args, **kwargs)
        finally:
            state.active, state.given = before, None

    def _asked(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """How many last positions of each sequence, if the others are not looked at; else 0."""
        if is_compiled_call() or self._trials_left == 0 or call_shape(args, kwargs)[1] == 1:
            return 0
        try:
            options = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except TypeError:  # which the call will tell
            return 0
        options |= options.pop("kwargs", {})
        new = options.get("input_ids") if options.get("inputs_embeds") is None else options["inputs_embeds"]
        asked = options.get("logits_to_keep")
        if type(asked) is not int or not isinstance(new, torch.Tensor) or new.dim() < 2 or not 0 < asked < new.shape[1]:
            return 0
        for name, value in options.items():
            if value is not None and value is not False and name not in _HARMLESS_OPTIONS:
                return 0
        if not self.place.is_as_found(model):
            return 0
        configs = (model.config, model._modules[self.place.base_name].config)
        if any(getattr(config, name, False) for config in configs for name in _OUTPUTS_IN_CONFIG):
            return 0
        self._state.shape = (new.shape[0], new.shape[1])
        return asked

    def positions(self, given: torch.Tensor) -> int:
        """How many of the last positions of hidden states are asked for; 0: all.

        Args:
            given: (sequences, positions, hidden), of the base model's call at hand.
        """
        return self._state.active if self.checked and self._is_of_the_call(given) else 0

    def attention_positions(self, attention: nn.Module, given: torch.Tensor) -> int:
        """The same for what the last layer's attention is given, or a copy of it, which computes all."""
        return self.positions(given) if self.place.is_attention(attention) else 0

    def _is_of_the_call(self, given: torch.Tensor) -> bool:
        shape = self._state.shape
        return given.dtype is torch.bfloat16 and given.dim() == 3 and tuple(given.shape[:2]) == shape

    def narrow(self, given: torch.Tensor) -> torch.Tensor:
        """Those of the positions that the last sparse block will be given; ``given`` as for ``positions``."""
        asked = self.positions(given)
        return given[:, -asked:].contiguous() if asked else given

    def spread(self, result: torch.Tensor, length: int) -> torch.Tensor:
        """(sequences, asked positions, hidden) as the last ones of ``length`` positions."""
        whole = result.new_full((result.shape[0], length, result.shape[2]), self.fill)
        whole[:, -result.shape[1] :] = result
        return whole

    def _before_block(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if block is not self.place.block():  # a copy, which has its original's hooks
            return None
        state = self._state
        state.length, state.given = 0, None
        if state.active == 0 or len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
            return None
        given = args[0]
        if not self.checked:
            state.given = given if self._is_of_the_call(given) else None
            return None
        narrowed = self.narrow(given)
        if narrowed is given:
            return None
        state.length = given.shape[1]
        return (narrowed,), {}

    def _after_block(self, block: nn.Module, _: Any, output: Any) -> Any:
        if block is not self.place.block():
            return None
        state = self._state
        length, given = state.length, state.given
        state.length, state.given = 0, None
        if length:
            whole = self.spread(_hidden_states(output), length)
            return (whole, *output[1:]) if isinstance(output, tuple) else whole
        if given is not None:
            self._compare(block, given, output)
        return None

    def _compare(self, block: nn.Module, given: torch.Tensor, output: Any) -> None:
        """The block has been given all positions: would it say the same of the last ones alone?"""
        asked = self._state.active
        own = _hidden_states(output)
        if own is None or own.shape != given.shape:
            self._trials_left = 0
            return
        found = _hidden_states(block.forward(given[:, -asked:].contiguous()))  # not a call: its hooks have run
        verdict = found is not None and same_formula(found, own[:, -asked:])
        if verdict is False:
            self._trials_left -= 1
        self._state.agreed = verdict is True


def _hidden_states(output: Any) -> Any:
    """Of what a block returns: them, or them and its router's scores."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, torch.Tensor) and first.dim() == 3 else None


def leave_out_positions(model: Any) -> LastPositions | None:
    """Let the last layer of ``model``, whose weights are there, compute only what is asked for from now on.

    Returns:
        What does; None where that is not known to be safe.
    """
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return None
    place = find_last_layer(model)
    if place is None:
        return None
    positions = LastPositions(place)
    positions.install(model)
    return positions
