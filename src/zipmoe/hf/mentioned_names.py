"""What the ``forward`` of a class mentions: the names in its code, also those that ``getattr`` is given as strings.

The comparison at the first use cannot see what happens only later, such as values that are clamped where they are
large, or scores whose scale grows with the position. Code that does such things has names for them: so attention,
feed-forward networks and routers are computed by the native core only if their code mentions nothing but what the
native core knows. Norms need no names: they are compared before their first use, on values of every size.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any


def mentioned_names(original: Any) -> list[str] | None:
    """Attributes and globals of ``original.forward`` in the order of their first use; None if its code is unknown."""
    function = inspect.unwrap(original.forward)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or any(isinstance(constant, CodeType) for constant in code.co_consts):
        return None
    if "getattr" not in code.co_names:
        return [*code.co_names]
    documentation = getattr(function, "__doc__", None)
    return [*code.co_names, *(each for each in code.co_consts if isinstance(each, str) and each != documentation)]
