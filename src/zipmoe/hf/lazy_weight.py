"""A tensor that knows its shape and dtype and is decoded only when somebody computes with it.

Model code asks ``module.weight.dtype`` or ``.shape`` far more often than it needs the numbers; for a language-model head
the numbers are hundreds of megabytes. Metadata is therefore answered from the wrapper, and everything else decodes.
The same C++ operation runs on the same operands as in plain Transformers: arguments are replaced before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zipmoe.errors import UnsupportedOperationError


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_METADATA = frozenset(
    [
        _getter(name)
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad", "grad_fn")
    ]
    + [_getter(name) for name in ("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps")]
    + [_getter(name) for name in ("itemsize", "nbytes", "is_xla", "is_mkldnn")]
    + [torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size]
    + [torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.stride, torch.Tensor.is_contiguous]
    + [torch.Tensor.__len__, torch.Tensor.storage_offset, torch.is_floating_point, torch.is_complex, torch.numel]
)
_ITSELF = frozenset([_getter("data"), torch.Tensor.detach, torch.Tensor.contiguous])
"""Would return an alias: answering with the lazy tensor keeps writes through the alias from vanishing silently."""


class LazyWeight(torch.Tensor):
    """A packed matrix of shape (rows, columns); decoded at most once per object, and never kept by the model.

    Counts as a Parameter (``isinstance(weight, torch.nn.Parameter)``), as the weight that it stands for did.

    Raises:
        UnsupportedOperationError: on any attempt to write to it or to require its gradient.
    """

    _is_param = True
    _is_hf_initialized = True
    _decode: Callable[[], torch.Tensor]
    _decoded: torch.Tensor | None

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parameter: str, decode: Callable[[], torch.Tensor]
    ) -> LazyWeight:
        self: LazyWeight = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device="cpu")  # type: ignore[attr-defined]
        self._parameter = parameter
        self._decode = decode
        self._decoded = None
        return self

    def __init__(self, *_: object) -> None:
        super().__init__()

    @property
    def zipmoe_parameter(self) -> str:
        """Name of the manifest's matrix behind this tensor."""
        return self._parameter

    def materialise(self) -> torch.Tensor:
        """The decoded matrix, an ordinary tensor that requires a gradient, as a parameter of a loaded model does."""
        if self._decoded is None:
            self._decoded = self._decode().requires_grad_()
        return self._decoded

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyWeight({self._parameter!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _ITSELF:
            return args[0]
        _refuse_writes(func, args)
        # A product of torch may choose its kernel by whether an operand requires a gradient, even where none is recorded:
        # the decoded weight does, as the parameter did. Nothing is recorded.
        with torch.no_grad():
            return func(*tree_map(_unwrap, args), **tree_map(_unwrap, dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Reached from C++ code that skips __torch_function__.
        return func(*tree_map(_unwrap, args), **tree_map(_unwrap, dict(kwargs or {})))


def _unwrap(value: Any) -> Any:
    return value.materialise() if isinstance(value, LazyWeight) else value


def _refuse_writes(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    name = getattr(func, "__name__", "")
    writes = (
        (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__set__") or name.startswith("__i")
    )
    if writes and name not in ("__index__", "__int__", "__invert__") and args and isinstance(args[0], LazyWeight):
        raise UnsupportedOperationError(
            f"the packed weight {args[0].zipmoe_parameter} cannot be changed ({name})",
            hint="change the original checkpoint and pack it again",
        )
