"""The modules below another one, and the code that they run: whether both are what they were."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

_CODE_OF_OTHERS = ("transformers.", "torch.")


def modules_as_called(module: nn.Module) -> Iterator[nn.Module]:
    """``module`` and all below it, each as often as it has a place there."""
    waiting = [module]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += [child for child in each._modules.values() if child is not None]


def family_forward(module: nn.Module) -> Any:
    """The ``forward`` of the first class of ``module`` that is not this package's."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("zipmoe.") and "forward" in vars(kind):
            return vars(kind)["forward"]
    raise AssertionError("unreachable: nn.Module has one")


class ModuleParts:
    """The modules below one, of which none is kept alive, and the families' code of each."""

    def __init__(self, module: nn.Module) -> None:
        self._parts = [(weakref.ref(each), family_forward(each)) for each in modules_as_called(module)]

    @property
    def are_known(self) -> bool:
        """Whether all of the code is Transformers' or torch's."""
        return all(_module_of(forward).startswith(_CODE_OF_OTHERS) for _, forward in self._parts)

    def are_those_of(self, module: nn.Module) -> bool:
        """Whether ``module`` has the same ones at the same places, with the same code."""
        found = [*modules_as_called(module)]
        return len(found) == len(self._parts) and all(
            each is known() and family_forward(each) is forward
            for each, (known, forward) in zip(found, self._parts, strict=True)
        )


def _module_of(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", ""))
