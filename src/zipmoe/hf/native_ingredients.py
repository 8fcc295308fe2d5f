"""What a native layer was made from, looked at before every use: modules are changed after loading, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zipmoe.hf.fused_module import FusedModule
from zipmoe.hf.quiet_modules import is_quiet, nobody_watches

_SCALARS = bool | int | float | torch.dtype
_IRRELEVANT = {"training", "in_features", "out_features", "_is_hf_initialized"}


class NativeIngredients:
    """Attributes, children and parameters of ``module`` and its children.

    Args:
        module: the module that the native layer stands for.
        attributes: names of its attributes that were built in.
        children: names of its children whose calls are left out.
    """

    def __init__(self, module: Any, attributes: Iterable[str], children: Iterable[str]) -> None:
        parts = {name: module._modules[name] for name in children if module._modules.get(name) is not None}
        self._parts = list(parts.values())
        holders: list[tuple[dict[str, Any], Iterable[str]]] = [(vars(module), attributes), (module._modules, parts)]
        for part in self._parts:
            held = vars(part).items()
            scalars = [name for name, value in held if isinstance(value, _SCALARS) and name not in _IRRELEVANT]
            holders += [(vars(part), scalars), (part._parameters, part._parameters)]
        self._held = [(holder, name, holder.get(name)) for holder, names in holders for name in names]
        tensors = [value for _, _, value in self._held if isinstance(value, nn.Parameter)]
        self._places = [(tensor, tensor.data_ptr()) for tensor in tensors]

    def unchanged(self) -> bool:
        """Whether all are the same objects, in the same memory."""
        return all(holder.get(name) is value for holder, name, value in self._held) and all(
            tensor.data_ptr() == place for tensor, place in self._places
        )

    def are_quiet(self) -> bool:
        """Whether leaving out the calls of the children is not noticed by anybody."""
        own = all(part._zipmoe_stands_for_own() for part in self._parts if isinstance(part, FusedModule))
        return own and all(map(is_quiet, self._parts)) and nobody_watches()


def up_to_date(module: Any, make: Callable[[Any], Any]) -> Any:
    """``module._zipmoe_native``; None where it cannot be used now.

    Where something was replaced, or converted and converted back, ``make(module)`` gives another one, which is kept,
    or None for good.
    """
    native = module._zipmoe_native
    if native is not None and not native.ingredients.unchanged():
        native = module._zipmoe_native = make(module)
    return native if native is not None and native.ingredients.are_quiet() else None
