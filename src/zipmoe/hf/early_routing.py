"""Early routing: the router is asked before the shared expert runs, so that the disk reads while that is computed.

Some blocks compute the shared expert first, then route, then run the experts. A hook before such a block asks the
router with what the block will hand to it, and begins the request for the experts. The router's own call then returns
what is known already; if it comes with anything else, it computes as ever. Either way the block sees what the router's
computation on its input gives: no bit of the logits depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zipmoe.hf.combine_order import CombineOrder, combine_order
from zipmoe.hf.dynamic_class import dynamic_class
from zipmoe.hf.expert_parameter import ExpertSource
from zipmoe.hf.implementation_choice import experts_implementation
from zipmoe.hf.routing import Routing


@dataclass(frozen=True)
class _Known:
    """What the router said, before it was asked by its block."""

    given: torch.Tensor
    given_version: int | None
    result: Any
    index_version: int | None
    routing: Routing


class EarlyRouting:
    """Early routing of one block; shared by the block's hook, its router and its experts.

    Args:
        router: name of the router among the block's children.
        experts: name of the experts, a ``PackedInterfaceExperts``.
        flattened: whether the router is given the block's input as (tokens, hidden), not as it is.
    """

    def __init__(self, router: str, experts: str, flattened: bool) -> None:
        self.router = router
        self._experts = experts
        self._flattened = flattened
        self._of_router: _Known | None = None
        self._of_experts: _Known | None = None

    def install(self, block: nn.Module) -> None:
        """Route early whenever ``block`` is called from now on."""
        router: Any = block.get_submodule(self.router)
        experts: Any = block.get_submodule(self._experts)
        original = type(router)
        router.__class__ = dynamic_class(original.__name__, (EarlyRouter, original), original)
        router._zipmoe_early = experts._zipmoe_early = self
        block.register_forward_pre_hook(self._before_block, with_kwargs=True)

    def _before_block(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._of_router = self._of_experts = None
        given = block_input(args, kwargs)
        if given is None or given.numel() == 0:
            return
        if self._flattened:
            given = given.reshape(-1, given.shape[-1])
        experts: Any = block._modules[self._experts]
        router: Any = block._modules[self.router]
        result = router.route(given)
        routing = Routing(result[2], experts.num_experts)
        source: ExpertSource = experts._zipmoe_source
        early = source.slot.engine.early
        if combine_order(experts_implementation(experts.config)) is CombineOrder.EAGER:
            early.begin(source.group, routing.experts, ascending=True)
        else:
            early.begin(source.group, routing.experts, tokens=routing.tokens)
        self._of_router = self._of_experts = _Known(given, _version(given), result, _version(result[2]), routing)

    def take_result(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the router returns for these arguments, if that is known; at most once."""
        known, self._of_router = self._of_router, None
        if known is None or kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return None
        given = args[0]
        same = (
            given.data_ptr() == known.given.data_ptr()
            and given.shape == known.given.shape
            and given.stride() == known.given.stride()
            and given.dtype == known.given.dtype
            and _version(given) == known.given_version
        )
        return known.result if same else None

    def take_routing(self, top_k_index: torch.Tensor) -> Routing | None:
        """The routing that ``top_k_index`` stands for, if it is the router's own tensor; at most once."""
        known, self._of_experts = self._of_experts, None
        if known is None or known.result[2] is not top_k_index or _version(top_k_index) != known.index_version:
            return None
        return known.routing


class EarlyRouter(nn.Module):
    """A router that may have been asked before; placed before the family's class."""

    _zipmoe_early: EarlyRouting

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the family's router."""
        known = self._zipmoe_early.take_result(args, kwargs)
        return known if known is not None else super().forward(*args, **kwargs)

    def route(self, given: torch.Tensor) -> Any:
        """The family's router; hooks do not run, because they will around the block's own call."""
        return super().forward(given)


def block_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The hidden states that a block is called with."""
    given = args[0] if args else kwargs.get("hidden_states")
    return given if isinstance(given, torch.Tensor) else None


def _version(tensor: torch.Tensor) -> int | None:
    """Counts changes in place; tensors made in inference mode do not count them.

    A block that changes its input before it routes is found out by its values when its router is looked for.
    """
    return None if tensor.is_inference() else tensor._version
