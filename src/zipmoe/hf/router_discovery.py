"""Finds the routers of blocks by watching what happens in their first call: no table of families.

The router is the block's child that returns a triple whose last item is the tensor of ids that the experts are called
with. Asking it early is possible if it was given the block's input, flattened at most, and nothing else. Early routing
pays if a packed linear layer, of the shared expert, ran before the experts; look-ahead needs no more than the router.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch
from torch import nn

from zipmoe.hf.early_routing import EarlyRouter, EarlyRouting, block_input
from zipmoe.hf.experts_forward import PackedInterfaceExperts
from zipmoe.hf.look_ahead import LookAheadChain, RoutedBlock
from zipmoe.hf.packed_linear import PackedLinear


def discover_routers(model: nn.Module, *, early: bool, chain: LookAheadChain | None) -> None:
    """Watch the first call of every block of ``model`` with packed experts.

    Args:
        model: the loaded model.
        early: route early where it pays from then on.
        chain: gets the blocks whose routers can be asked early, for look-ahead; or None.
    """
    for block in list(model.modules()):
        names = [name for name, child in block.named_children() if isinstance(child, PackedInterfaceExperts)]
        if len(names) == 1:
            if chain is not None:
                chain.watched += 1
            _Discovery(names[0], early, chain).watch(block)


class _Discovery:
    """Watches one block. Holds no modules, which hold this object's hooks."""

    def __init__(self, experts: str, early: bool, chain: LookAheadChain | None) -> None:
        self._experts = experts
        self._early = early
        self._chain = chain
        self._hooks: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._thread = threading.get_ident()
        self._given: torch.Tensor | None = None
        self._values: torch.Tensor | None = None
        self._triples: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._linear_ran = False
        self._found: tuple[str, bool, int] | None = None  # the router's name, whether its input is flattened, top k
        self._pays = False

    def watch(self, block: nn.Module) -> None:
        """Until its first call has ended."""
        experts = block.get_submodule(self._experts)
        self._hooks = [
            block.register_forward_pre_hook(self._block_begins, with_kwargs=True),
            block.register_forward_hook(self._block_ends),
            experts.register_forward_pre_hook(self._experts_begin, with_kwargs=True),
        ]
        for name, child in block.named_children():
            if child is not experts:
                self._hooks.append(child.register_forward_hook(partial(self._child_ended, name), with_kwargs=True))
        for module in block.modules():
            if isinstance(module, PackedLinear):
                self._hooks.append(module.register_forward_pre_hook(self._linear_begins))

    def _block_begins(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._reset()  # the call before may have failed
        self._given = block_input(args, kwargs)
        self._values = None if self._given is None else self._given.detach().clone()

    def _linear_begins(self, *_: Any) -> None:
        self._linear_ran = True

    def _child_ended(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 3:
            self._triples.append((name, args, kwargs, output))

    def _experts_begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        self._pays = self._linear_ran
        inputs = (*args, *kwargs.values())
        for name, router_args, router_kwargs, output in self._triples:
            if any(output[2] is tensor for tensor in inputs):
                flattened = self._is_flattened(router_args, router_kwargs)
                self._found = None if flattened is None else (name, flattened, output[2].shape[-1])

    def _is_flattened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
        """Whether the router was given the block's input flattened (True) or as it is; None: something else."""
        given, values = self._given, self._values
        if given is None or values is None or kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return None
        routed = args[0]
        flat = (given.numel() // given.shape[-1], given.shape[-1])
        if routed.data_ptr() != given.data_ptr() or routed.dtype != given.dtype:
            return None
        if routed.shape not in (given.shape, flat) or not torch.equal(routed.reshape(values.shape), values):
            return None
        return routed.shape != given.shape

    def _block_ends(self, block: nn.Module, *_: Any) -> None:
        found, pays, given = self._found, self._pays, self._given
        for hook in self._hooks:
            hook.remove()
        self._reset()
        if found is not None and self._early and pays and not isinstance(block.get_submodule(found[0]), EarlyRouter):
            EarlyRouting(found[0], self._experts, found[1]).install(block)
        if self._chain is not None:
            self._chain.seen += 1
            if found is not None and given is not None:
                router, flattened, top_k = found
                routed = RoutedBlock(block, router, self._experts, flattened, given.shape[-1], top_k)
                self._chain.add(block, routed)
