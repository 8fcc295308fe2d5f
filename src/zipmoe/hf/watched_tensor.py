"""Tensors that let code do nothing with them but add, multiply, take the sigmoid, and reshape: for asking code what it
does, so that one answer holds for all values.

Whatever depends on values or sizes (comparisons, choices, indices, numbers that are added) is an error, and so it does
not pass because the values at hand happened to be harmless.
"""

from __future__ import annotations

from typing import Any

import torch

_OF_TWO = {torch.Tensor.add, torch.Tensor.add_, torch.Tensor.mul, torch.Tensor.mul_}
_SIGMOID = {torch.Tensor.sigmoid, torch.sigmoid}
_RESHAPING = {torch.Tensor.view, torch.Tensor.reshape, torch.Tensor.flatten, torch.reshape, torch.flatten}
_SIZES = {torch.Tensor.shape.__get__, torch.Tensor.size}  # type: ignore[attr-defined]


class UnexpectedOperationError(ValueError):
    """Something else was done. (Of a ``TypeError`` in ``x == y`` Python makes ``x is y``.)"""


class WatchedTensor(torch.Tensor):
    """Of its own class, and so is everything that comes out of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not (
            func in _SIZES
            or (func in _OF_TWO and not given and all(isinstance(each, cls) for each in args))
            or func in _SIGMOID
            or (func in _RESHAPING and not given and all(map(_is_shape, args[1:])))
        ):
            raise UnexpectedOperationError(func)
        # torch has no types for it.
        found = super().__torch_function__(func, types, args, given)  # type: ignore[no-untyped-call]
        return _watched_sizes(found) if func in _SIZES else found


class WatchedSize:
    """Can be multiplied with another, and be a part of a shape."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    def __mul__(self, other: WatchedSize) -> WatchedSize:
        return WatchedSize(self._value * other._value)

    def __eq__(self, other: object) -> bool:
        raise UnexpectedOperationError("a size that is compared")

    def __bool__(self) -> bool:
        raise UnexpectedOperationError("a size that is looked at")

    __hash__ = None  # type: ignore[assignment]


def watched(tensor: torch.Tensor) -> WatchedTensor:
    """A copy."""
    return tensor.clone().as_subclass(WatchedTensor)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, to look at."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


def _watched_sizes(sizes: Any) -> Any:
    return WatchedSize(sizes) if isinstance(sizes, int) else tuple(map(WatchedSize, sizes))


def _is_shape(given: Any) -> bool:
    return isinstance(given, int | WatchedSize) or (isinstance(given, tuple) and all(map(_is_shape, given)))
