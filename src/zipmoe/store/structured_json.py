"""Frozen dataclasses to JSON and back, strictly: a wrong type, a missing key or an unknown key is an error that names
its place.

Supports what the manifest needs: nested dataclasses, ``str``, ``int``, ``None``, unions of these, ``tuple[X, ...]`` and
``dict[str, X]``. Integers are JSON numbers; booleans are not integers; negative integers are refused unless they are a
codec level.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


class StructureError(ValueError):
    """The JSON value does not have the structure of the dataclass."""


def to_json(value: Any) -> Any:
    """Plain JSON value of a dataclass (nested), tuple, dict or scalar."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    return value


@cache
def _field_types(cls: type) -> dict[str, tuple[Any, bool]]:
    hints = typing.get_type_hints(cls)
    return {
        f.name: (
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(cls)
    }


def from_json(cls: type[T], value: Any, where: str = "") -> T:
    """Build the dataclass ``cls`` from a JSON value.

    Raises:
        StructureError: with the path of the offending value.
    """
    return typing.cast(T, _convert(cls, value, where or cls.__name__))


def _convert(expected: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(expected):
        return _convert_dataclass(typing.cast(type, expected), value, where)
    origin = typing.get_origin(expected)
    if origin is tuple:
        if not isinstance(value, list):
            raise StructureError(f"{where}: expected a list, found {_describe(value)}")
        item_type = typing.get_args(expected)[0]
        return tuple(_convert(item_type, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise StructureError(f"{where}: expected an object, found {_describe(value)}")
        item_type = typing.get_args(expected)[1]
        return {key: _convert(item_type, item, f"{where}[{key!r}]") for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        for option in typing.get_args(expected):
            try:
                return _convert(option, value, where)
            except StructureError:
                continue
        raise StructureError(f"{where}: {_describe(value)} is none of the allowed types")
    return _convert_scalar(expected, value, where)


def _convert_scalar(expected: Any, value: Any, where: str) -> Any:
    if expected is type(None):
        if value is None:
            return None
    elif expected is int:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 0 and not where.endswith(".level"):
                raise StructureError(f"{where}: {value} is negative")
            return value
    elif expected is str and isinstance(value, str):
        return value
    name = getattr(expected, "__name__", str(expected))
    raise StructureError(f"{where}: expected {name}, found {_describe(value)}")


def _convert_dataclass(cls: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise StructureError(f"{where}: expected an object, found {_describe(value)}")
    fields = _field_types(cls)
    if unknown := value.keys() - fields.keys():
        raise StructureError(f"{where}: unknown key {min(unknown)!r}")
    arguments = {}
    for name, (expected, required) in fields.items():
        if name in value:
            arguments[name] = _convert(expected, value[name], f"{where}.{name}")
        elif required:
            raise StructureError(f"{where}: key {name!r} is missing")
    return cls(**arguments)


def _describe(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
