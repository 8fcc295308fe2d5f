"""What the modules of the native core share: copies of them are the family's own modules."""

from __future__ import annotations

from typing import Any

from torch import nn


class FusedModule(nn.Module):
    """Placed before a family's class."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For ``copy.deepcopy`` and ``pickle``: the family's class, without what the native core has made."""
        own = next(
            each
            for each in type(self).__mro__
            if not issubclass(each, FusedModule) and not each.__module__.startswith("zipmoe.")
        )
        state = {name: value for name, value in self.__dict__.items() if not name.startswith("_zipmoe_")}
        return _new, (own,), state


def _new(own: Any) -> Any:
    return own.__new__(own)
