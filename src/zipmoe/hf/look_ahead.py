"""Look-ahead: while a layer computes, the next layer's router says which experts that one will probably ask for.

The router of the next sparse block is asked with the input of the present one. Hidden states change little from one
layer to the next, so that most of what it says comes true (docs/results/look_ahead.md); what does not costs a read in
idle disk time. Its own norm is left out: the present block's input is normed already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zipmoe.engine.engine import Engine
from zipmoe.engine.look_ahead import LookAhead, can_look_ahead, holds_all_experts
from zipmoe.engine.record_catalogue import GroupHandle
from zipmoe.hf.call_shape import call_shape
from zipmoe.hf.early_routing import EarlyRouter, block_input
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.last_positions import LastPositions

ROWS_MAX = 3
"""Rows of a step for which the likeliest experts are predicted: with more, a layer asks for too many of them, until
it asks for most."""


_CHOICES_OF_ALL = 4
"""Choices for each expert with which a layer asks for nearly all of them (94 % of 60: docs/results/look_ahead.md)."""


_AGAIN_TOKENS_MIN = 3
"""Tokens of a step that ask for an expert, with which it is likely enough to be asked for in the next step (2: twice as
many reads in vain, docs/results/look_ahead.md)."""


def _most_tokens_first(chosen: torch.Tensor, experts: int, tokens_min: int = 1) -> list[int]:
    """Ids that occur so often, those of many tokens first; ``chosen``: ids, some perhaps out of range."""
    ids = chosen.reshape(-1)
    counts = torch.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)
    order: list[int] = counts.argsort(descending=True, stable=True)[: int((counts >= tokens_min).sum())].tolist()
    return order


class RoutedBlock:
    """A sparse block whose router is given the block's input, and which block comes after it.

    Args:
        block: the block; it is not kept alive.
        router: name of the router among its children.
        experts: name of the experts, a ``PackedInterfaceExperts``.
        flattened: whether the router is given the input as (tokens, hidden), not as it is.
        width: of the hidden states.
        top_k: experts that the router chooses for each row.
    """

    def __init__(self, block: nn.Module, router: str, experts: str, flattened: bool, width: int, top_k: int) -> None:
        self.following: RoutedBlock | None = None
        self.last_positions: LastPositions | None = None
        """Which of a pass's hidden states the block will be given; None: all."""
        self._block = weakref.ref(block)
        self._router = router
        self._experts = experts
        self._flattened = flattened
        self.width = width
        """Of the hidden states that the block is given."""
        self._top_k = top_k

    def before(self, look_ahead: LookAhead, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The block is called with these arguments: predict the experts of the one after it."""
        given = block_input(args, kwargs)
        if self.following is not None and given is not None and given.numel() > 0:
            self.following.predict(look_ahead, given)

    def predict(self, look_ahead: LookAhead, given: torch.Tensor) -> None:
        """Predict this block's experts from the hidden states that another block was given."""
        found = self.likely(given if self.last_positions is None else self.last_positions.narrow(given))
        if found is not None:
            look_ahead.predict(*found)

    @property
    def router(self) -> nn.Module | None:
        """The block's router, as long as there is the block."""
        block = self._block()
        return None if block is None else block._modules[self._router]

    def likely(self, given: torch.Tensor) -> tuple[GroupHandle, list[int]] | None:
        """What this block's router says of hidden states (..., hidden): experts of its group, the likeliest first.

        None if the block is gone, or the hidden states have another width than its own.
        """
        block: Any = self._block()
        rows = given.numel() // self.width
        if block is None or given.shape[-1] != self.width or not self.is_predictable(rows):
            return None
        router, experts = block._modules[self._router], block._modules[self._experts]
        if self._flattened:
            given = given.reshape(-1, given.shape[-1])
        with torch.no_grad():
            chosen = router.route(given)[2] if isinstance(router, EarlyRouter) else router.forward(given)[2]
        if rows <= ROWS_MAX:
            by_rank = chosen.reshape(-1, chosen.shape[-1]).t().reshape(-1).tolist()  # every token's first choice first
            likely = [expert for expert in dict.fromkeys(by_rank) if 0 <= expert < experts.num_experts]
        else:
            likely = _most_tokens_first(chosen, experts.num_experts)
        source: ExpertSource = experts._zipmoe_source
        return source.group, likely

    def is_predictable(self, rows: int) -> bool:
        """Whether few or most experts are likely for so many rows: between lie too many that do not come true."""
        block: Any = self._block()
        return rows <= ROWS_MAX or (
            block is not None and rows * self._top_k >= block._modules[self._experts].num_experts
        )

    def predict_again(self, look_ahead: LookAhead, chosen: torch.Tensor) -> None:
        """The router chose these experts (rows, top_k) in this step: it will choose about the same in the next one."""
        block: Any = self._block()
        if block is None or not self.is_predictable(chosen.shape[0]):
            return
        experts = block._modules[self._experts]
        source: ExpertSource = experts._zipmoe_source
        look_ahead.predict(source.group, _most_tokens_first(chosen, experts.num_experts, _AGAIN_TOKENS_MIN))

    def predict_all(self, look_ahead: LookAhead, rows: int) -> None:
        """The block is the first of a pass with so many rows that begins: predict all experts, if it will ask for
        nearly all of them.
        """
        block: Any = self._block()
        if block is None:
            return
        experts = block._modules[self._experts]
        if rows * self._top_k >= _CHOICES_OF_ALL * experts.num_experts:
            source: ExpertSource = experts._zipmoe_source
            look_ahead.predict_sweep(source.group)


def may_look_ahead(engine: Engine, wanted: bool | None) -> bool:
    """Whether to look ahead, or at least to say why not.

    Args:
        engine: of the model.
        wanted: what a person asked for; None: wherever it is possible and there is something to predict.
    """
    return wanted if wanted is not None else can_look_ahead(engine) and not holds_all_experts(engine)


class LookAheadChain:
    """The sparse blocks of a model in the order in which they are called, as ``router_discovery`` finds them.

    Args:
        engine: the model's.
    """

    def __init__(self, engine: Engine) -> None:
        self._look_ahead = LookAhead(engine) if can_look_ahead(engine) else None
        self.last_positions: LastPositions | None = None
        """What the model's last sparse block leaves out."""
        self.first: RoutedBlock | None = None
        """The first sparse block of a pass, if it is one that can be predicted, once it has been called."""
        self._last: RoutedBlock | None = None
        self._found = 0
        self.watched = 0
        """Blocks of which the first call is, or was, watched."""
        self.seen = 0
        """Those that have been called."""
        self._sequences = 0  # of the step at hand; 0: none, or several tokens of each
        self._first_chosen: torch.Tensor | None = None  # by the first block's router, in this step
        self.first_choice_listeners: list[Callable[[torch.Tensor], None]] = []
        """Are told what the first block's router chooses: ids (rows, top_k)."""

    @property
    def look_ahead(self) -> LookAhead | None:
        """What reads ahead; None where the engine cannot."""
        return self._look_ahead

    def add(self, block: nn.Module, routed: RoutedBlock) -> None:
        """The next block that can be predicted, and from which the one after it can."""
        look_ahead = self._look_ahead
        if look_ahead is None:
            return
        self._found += 1
        if self.last_positions is not None and self.last_positions.place.block() is block:
            routed.last_positions = self.last_positions
        if self._last is not None:
            self._last.following = routed
        elif self.seen == 1:
            self.first = routed
            self._watch_first_router(routed)
        self._last = routed

        def before_block(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            routed.before(look_ahead, args, kwargs)
            if routed is self._last:
                self._predict_next_step(look_ahead)

        block.register_forward_pre_hook(before_block, with_kwargs=True)

    def _watch_first_router(self, first: RoutedBlock) -> None:
        router = first.router
        if router is None:
            return

        def experts_chosen(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, tuple) and len(output) > 2 and isinstance(output[2], torch.Tensor):
                self._first_chosen = output[2].detach()
                for listener in self.first_choice_listeners:
                    listener(self._first_chosen)

        router.register_forward_hook(experts_chosen)

    def _predict_next_step(self, look_ahead: LookAhead) -> None:
        """The last layer of a step of many sequences begins: next comes the first one.

        Its next tokens are not known yet, but most of what so many ask for, they ask for again. Predicted from then on
        (``next_token_look_ahead.py``) is what they really will.
        """
        chosen, self._first_chosen = self._first_chosen, None
        if self.first is None or chosen is None or chosen.dim() != 2 or chosen.shape[0] <= ROWS_MAX:
            return
        if chosen.shape[0] == self._sequences:
            self.first.predict_again(look_ahead, chosen)

    def watch_passes(self, model: nn.Module) -> None:
        """Predict the first layer whenever a pass of ``model`` with many rows begins."""
        look_ahead = self._look_ahead
        if look_ahead is None:
            return

        def before_pass(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sequences, length = call_shape(args, kwargs)
            self._sequences = sequences if length == 1 else 0
            self._first_chosen = None
            if self.first is not None and sequences * length > ROWS_MAX:
                self.first.predict_all(look_ahead, sequences * length)

        model.register_forward_pre_hook(before_pass, with_kwargs=True)

    def describe(self) -> str:
        """The part of the mode line."""
        if self._look_ahead is None:
            return "no look-ahead, which needs one pool of whole experts (pools none)"
        if self.watched == 0 or (self.seen > 0 and self._found < 2):
            return "no look-ahead, as this model's routers cannot be asked early"
        layers = "" if self.seen == 0 else f" in {self._found - 1} layers"
        fewest, most = min(self._look_ahead.slots), max(self._look_ahead.slots)
        kept = f"{most} slot{'' if most == 1 else 's'}" if fewest == most else f"{fewest} to {most} slots"
        return f"look-ahead to the next layer's experts{layers}, {kept} kept for it"
