"""Classes made at run time: a family's class combined with ours, so that an object of the first becomes one of both."""

from __future__ import annotations

from typing import Any

_MADE: dict[tuple[str, tuple[Any, ...]], Any] = {}


def dynamic_class(name: str, bases: tuple[Any, ...], original: Any) -> Any:
    """The class ``name`` with these bases; it claims the module and the documentation of ``original``.

    Asked twice it is the same class. Transformers looks up a model's source by the module of its class.
    """
    key = (name, bases)
    if key not in _MADE:
        made = _MADE[key] = type(name, bases, {"__module__": original.__module__, "__doc__": original.__doc__})
        # Transformers wraps the forward of every class of layers. The original's is wrapped already; a second wrapper,
        # here, would be taken for the family's own code.
        if "forward" in vars(made):
            del made.forward  # type: ignore[attr-defined]
    return _MADE[key]
