"""What the modules of the native core share: how they are made, and that copies of them are the family's own."""

from __future__ import annotations

from typing import Any

from torch import nn

from zipmoe.hf.dynamic_class import dynamic_class


class FusedModule(nn.Module):
    """Placed before a family's class."""

    _zipmoe_own: tuple[Any, Any]
    """The class whose ``forward`` the native core stands for, and that function."""

    def _zipmoe_stands_for_own(self) -> bool:
        """Whether that is still the function of the class."""
        holder, function = self._zipmoe_own
        return holder.__dict__.get("forward") is function

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For ``copy.deepcopy`` and ``pickle``: the family's class, without what the native core has made."""
        own = next(
            each
            for each in type(self).__mro__
            if not issubclass(each, FusedModule) and not each.__module__.startswith("zipmoe.")
        )
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_zipmoe_")}
        return _new, (own,), state


def fuse(module: Any, kind: type[FusedModule], **made: Any) -> None:
    """Place ``kind`` before the class of ``module``, and give it what was ``made`` for it."""
    original = type(module)
    module.__class__ = dynamic_class(original.__name__, (kind, original), original)
    holder = next(each for each in original.__mro__ if "forward" in each.__dict__)
    module._zipmoe_own = holder, holder.__dict__["forward"]
    for name, value in made.items():
        setattr(module, name, value)


def _new(own: Any) -> Any:
    return own.__new__(own)
