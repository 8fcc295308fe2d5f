"""What a native layer was made from, looked at before every use: modules are changed after loading, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zipmoe import _native
from zipmoe.hf.fused_module import FusedModule
from zipmoe.hf.packed_experts import PackedExperts
from zipmoe.hf.packed_module import PackedModule
from zipmoe.hf.quiet_modules import HOOKS, hooks_of_all_modules

_SCALARS = bool | int | float | torch.dtype
_IRRELEVANT = {"training", "in_features", "out_features", "_is_hf_initialized"}


class NativeIngredients:
    """Attributes, children and parameters of ``module`` and its children.

    Args:
        module: the module that the native layer stands for.
        attributes: names of its attributes that were built in.
        children: names of its children whose calls are left out.
        called: names of children that are only to be the same ones.
    """

    def __init__(
        self, module: Any, attributes: Iterable[str], children: Iterable[str], called: Iterable[str] = ()
    ) -> None:
        parts = {name: module._modules[name] for name in children if module._modules.get(name) is not None}
        holders: list[tuple[dict[str, Any], Iterable[str]]] = [
            (vars(module), attributes),
            (module._modules, (*parts, *called)),
        ]
        for part in parts.values():
            held = vars(part).items()
            scalars = [name for name, value in held if isinstance(value, _SCALARS) and name not in _IRRELEVANT]
            holders += [(vars(part), scalars), (part._parameters, part._parameters)]
        held = [(holder, name, holder.get(name)) for holder, names in holders for name in names]
        tensors = [value for _, _, value in held if isinstance(value, nn.Parameter)]
        self._places = [(tensor, tensor.data_ptr()) for tensor in tensors]
        self._held = tuple(held)
        self._kinds = [(part, type(part)) for part in parts.values()]
        # Calls of the children are left out: nothing may run there but their class's forward.
        hooks = [(vars(part), name, vars(part)[name]) for part in parts.values() for name in HOOKS]
        self._calls = (
            *hooks,
            *((vars(part), "forward", None) for part in parts.values()),
            *(entry for part in parts.values() for entry in _functions(part)),
        )
        self._hooks = (*(found for _, _, found in hooks), *hooks_of_all_modules())

    def unchanged(self) -> bool:
        """Whether all are the same objects, in the same memory."""
        for tensor, place in self._places:
            if tensor.data_ptr() != place:
                return False
        for part, kind in self._kinds:
            if type(part) is not kind:
                return False
        return _native.holds(self._held)

    def are_quiet(self) -> bool:
        """Whether leaving out the calls of the children is not noticed by anybody."""
        return _native.all_empty(self._hooks) and _native.holds(self._calls)


def _functions(module: nn.Module) -> Iterator[tuple[type, str, Any]]:
    """Where classes hold the ``forward`` that a call of ``module`` runs, or stands for, and what is to be there: what
    was there when that was found out, and not what somebody may have put there since.
    """
    if isinstance(module, FusedModule):
        holder, function = module._zipmoe_own
        yield holder, "forward", function
    if isinstance(module, FusedModule | PackedModule | PackedExperts):
        yield type(module), "forward", None  # classes made at run time have none of their own
    else:
        kind = next(each for each in type(module).__mro__ if "forward" in vars(each))
        yield kind, "forward", vars(kind)["forward"]


def up_to_date(module: Any, make: Callable[[Any], Any]) -> Any:
    """``module._zipmoe_native``; None where it cannot be used now.

    Where something was replaced, or converted and converted back, ``make(module)`` gives another one, which is kept,
    or None for good.
    """
    native = module._zipmoe_native
    if native is not None and not native.ingredients.unchanged():
        native = module._zipmoe_native = make(module)
    return native if native is not None and native.ingredients.are_quiet() else None
