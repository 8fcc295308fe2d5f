"""The modules below another one, and the code that they run: whether both are what they were."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

_CODE_OF_OTHERS = ("transformers.", "torch.")


def places(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and all below it, each as often as it has a place there: as a child of these, each of which is looked
    into once, so that circles come to an end.
    """
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        if id(each) not in seen:
            seen.add(id(each))
            waiting += [child for child in each._modules.values() if child is not None]


def called_once(parts: Collection[nn.Module], all_places: Collection[nn.Module]) -> bool:
    """Whether each of ``parts`` has one of these places, and so has everything around it."""
    seen: set[int] = set()
    repeated = []
    for each in all_places:
        if id(each) in seen:
            repeated.append(each)
        seen.add(id(each))
    wanted = {id(part) for part in parts}
    return wanted <= seen and not any(id(each) in wanted for module in repeated for each in module.modules())


def family_forward(module: nn.Module) -> Any:
    """The ``forward`` of the first class of ``module`` that is not this package's."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("zipmoe.") and "forward" in vars(kind):
            return vars(kind)["forward"]
    raise AssertionError("unreachable: nn.Module has one")


def has_known_code(module: nn.Module) -> bool:
    """Whether the ``forward`` of its family is Transformers' or torch's."""
    return _module_of(family_forward(module)).startswith(_CODE_OF_OTHERS)


def is_called_as_known(module: nn.Module) -> bool:
    """Whether no class of ``module`` has a ``__call__`` of its own, beside ours, Transformers' and torch's."""
    kind = type(module)
    if kind.__call__ is nn.Module.__call__:
        return True
    calls = [vars(each)["__call__"] for each in kind.__mro__ if "__call__" in vars(each)]
    return all(_module_of(call).startswith(("zipmoe.", *_CODE_OF_OTHERS)) for call in calls)


class ModuleParts:
    """The modules below one, of which none is kept alive, and the families' code of each."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(weakref.ref(each), family_forward(each)) for each in places(module)]

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether ``module`` has the same ones at the same places, with the same code."""
        found = [*places(module)]
        return len(found) == len(self._parts) and all(
            each is known() and family_forward(each) is forward
            for each, (known, forward) in zip(found, self._parts, strict=True)
        )


def _module_of(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
