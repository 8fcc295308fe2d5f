"""What the ``forward`` of a class mentions: the names in its code, also those that ``getattr`` is given as strings.

The comparison at the first use cannot see what happens only later, such as values that are clamped where they are
large, or scores whose scale grows with the position. Code that does such things has names for them: so attention,
feed-forward networks and routers are computed by the native core only if their code mentions nothing but what the
native core knows. Norms need no names: they are compared before their first use, on values of every size.

What comes after the mention of one attribute tells the same of the rest of a pass (``last_layer.py``).
"""

from __future__ import annotations

import dis
import inspect
from dataclasses import dataclass
from types import CodeType
from typing import Any

_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def mentioned_names(original: Any) -> list[str] | None:
    """Attributes and globals of ``original.forward`` in the order of their first use; None if its code is unknown, or
    has more at hand than it mentions: nested functions, variables of outer ones.
    """
    function = inspect.unwrap(original.forward)
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or any(isinstance(constant, CodeType) for constant in code.co_consts):
        return None
    if code.co_freevars:
        return None
    if "getattr" not in code.co_names:
        return [*code.co_names]
    documentation = getattr(function, "__doc__", None)
    return [*code.co_names, *(each for each in code.co_consts if isinstance(each, str) and each != documentation)]


@dataclass(frozen=True)
class CodeAfter:
    """What the code of a ``forward`` does after it has mentioned one of the module's attributes."""

    names: frozenset[str]
    """Attributes and globals."""
    slices: int
    """Slices that it takes, of whatever."""


def code_after(function: Any, attribute: str) -> CodeAfter | None:
    """What a class's ``forward`` of Transformers does, in the order of its code, after the mention of an attribute.

    Args:
        function: the class's ``forward``.
        attribute: mentioned once, outside of loops and nested functions.

    Returns:
        None if that is not so, or not to be told from names: somebody else's code, or around it; nested functions,
        variables of outer ones, or matrix products.
    """
    while hasattr(function, "__wrapped__"):
        if not is_of_transformers(function):
            return None
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or not is_of_transformers(function) or code.co_freevars:
        return None
    instructions = list(dis.get_instructions(code))
    mentions = [each.offset for each in instructions if each.opcode in dis.hasname and each.argval == attribute]
    if len(mentions) != 1:
        return None
    names, slices = set(), 0
    for each in instructions:
        if each.offset <= mentions[0]:
            continue
        if each.opcode in _JUMPS and each.argval <= mentions[0]:
            return None  # a loop around the mention
        if isinstance(each.argval, CodeType) or (each.opname == "BINARY_OP" and each.argrepr in ("@", "@=")):
            return None
        if each.opcode in dis.hasname:
            names.add(each.argval)
        slices += each.opname in ("BUILD_SLICE", "BINARY_SLICE") or _holds_slice(each.argval)
    return CodeAfter(frozenset(names), slices)


def _holds_slice(constant: Any) -> bool:
    """Constant slices are built by the compiler of newer versions of Python."""
    return isinstance(constant, slice) or (isinstance(constant, tuple) and any(map(_holds_slice, constant)))


def is_of_transformers(function: Any) -> bool:
    """Whether a function is Transformers' own, as what it wraps around a class's ``forward`` is."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("transformers.")
