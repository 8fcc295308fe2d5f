"""A tensor that knows its shape and dtype and is decoded only when somebody computes with it.

Model code asks ``module.weight.dtype`` or ``.shape`` far more often than it needs the numbers; for a language-model
head the numbers are hundreds of megabytes. Metadata is therefore answered from the wrapper, and everything else
decodes. The same C++ operation runs on the same operands as in plain Transformers: arguments are replaced before the
call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from zipmoe.errors import UnsupportedOperationError


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


_METADATA_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes"),
    *("requires_grad", "is_leaf", "grad", "grad_fn"),
    *("is_cpu", "is_cuda", "is_meta", "is_mps", "is_xla", "is_mkldnn", "is_nested", "is_quantized", "is_sparse"),
)
_METADATA_METHODS = (
    *("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("stride", "is_contiguous", "storage_offset", "__len__"),
)
_METADATA = frozenset(
    [_getter(name) for name in _METADATA_ATTRIBUTES]
    + [getattr(torch.Tensor, name) for name in _METADATA_METHODS]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
_ITSELF = frozenset([_getter("data"), torch.Tensor.detach, torch.Tensor.contiguous])
"""Would return an alias: answering with the lazy tensor keeps writes through the alias from vanishing silently."""
_WRITING_METHODS = frozenset(
    ["__set__", "__setitem__"]
    + [f"__i{name}__" for name in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "matmul")]
    + [f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")]
)


class LazyWeight(torch.Tensor):
    """A packed matrix of shape (rows, columns); decoded at most once per object, and never kept by the model.

    Args:
        shape: (rows, columns).
        dtype: of the decoded matrix.
        parameter: name of the matrix, for messages.
        decode: decodes it; called when the numbers are needed for the first time.

    Counts as a Parameter (``isinstance(weight, torch.nn.Parameter)``), as the weight that it stands for did.

    Raises:
        UnsupportedOperationError: on any attempt to write to it or to require its gradient.
    """

    _is_param = True
    _is_hf_initialized = True  # Transformers initialises the rest of the module (buffers), not this
    _parameter: str
    _decode: Callable[[], torch.Tensor]
    _decoded: torch.Tensor | None

    @staticmethod
    def __new__(  # noqa: D102 - documented by the class
        cls, shape: Sequence[int], dtype: torch.dtype, parameter: str, decode: Callable[[], torch.Tensor]
    ) -> LazyWeight:
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=torch.device("cpu"))
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
            self._decoded = as_parameter(self._decode())
        return self._decoded

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = tuple(self.shape), self.dtype
        return f"LazyWeight({self._parameter!r}, shape={shape}, dtype={dtype})"

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
        _refuse_writes(func, args or tuple((kwargs or {}).values()))
        # Products of torch choose their kernel also by whether an operand requires a gradient, even where none is
        # recorded: the decoded weight does, as the parameter did. Nothing is recorded.
        with torch.no_grad():
            return func(*tree_map(_unwrap, args), **tree_map(_unwrap, dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # Reached from C++ code that skips __torch_function__.
        return func(*tree_map(_unwrap, args), **tree_map(_unwrap, dict(kwargs or {})))


def as_parameter(decoded: torch.Tensor) -> torch.Tensor:
    """``decoded`` as a tensor that requires a gradient, as a parameter of a loaded model does; to be used where nothing
    is recorded.

    Torch chooses the kernels of some products by that alone: ``linear`` on a slice of a batch is one product with a
    parameter, but a batch of products with as many copies of any other weight.
    """
    return decoded.detach().requires_grad_()  # detach: it may be scratch of the engine, which stays as it is


def _unwrap(value: Any) -> Any:
    return value.materialise() if isinstance(value, LazyWeight) else value


def _refuse_writes(func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    if (in_place or name in _WRITING_METHODS) and args and isinstance(args[0], LazyWeight):
        raise UnsupportedOperationError(
            f"the packed weight {args[0].zipmoe_parameter} cannot be changed ({name})",
            hint="change the original checkpoint and pack it again",
        )
