"""The stand-in for an expert parameter: it has a shape and a dtype, and ``parameter[expert]`` decodes one matrix.

Families iterate their experts in ascending order in their own (eager) forward and index the parameters. While such a
forward runs inside an ``ExpertWalk``, indexing advances the walk, so that reads of later experts overlap with the
computation of earlier ones and each expert is read at most once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from zipmoe.errors import UnsupportedOperationError
from zipmoe.hf.engine_slot import EngineSlot


class ExpertSource:
    """Experts of one group, served one matrix at a time.

    Args:
        slot: the model's engine slot.
        path: path of the expert group in the manifest.
        experts: number of experts that are packed.
        dtype: dtype to compute in, one of ``EXACT_DTYPES``.
    """

    def __init__(self, slot: EngineSlot, path: str, experts: int, dtype: torch.dtype) -> None:
        self.slot = slot
        self.path = path
        self.experts = experts
        self.dtype = dtype
        self._walk: Iterator[int] | None = None
        self._current: int | None = None

    @property
    def group(self) -> Any:
        """The engine's handle of the group."""
        return self.slot.group(self.path)

    @contextmanager
    def walk(self, experts: Sequence[int]) -> Iterator[None]:
        """While active, ``matrix`` serves ``experts`` in ascending order from one request to the engine."""
        with self.slot.engine.request(self.group, sorted(experts), ascending=True) as request:
            self._walk, self._current = iter(request), None
            try:
                yield
            finally:
                self._walk = self._current = None

    def matrix(self, expert: int, parameter: str) -> torch.Tensor:
        """(rows, columns) matrix of ``expert`` in the computing dtype.

        Inside a walk it is valid until the walk moves on; outside it is a fresh tensor.
        """
        while self._walk is not None and (self._current is None or self._current < expert):
            self._current = next(self._walk, None)
            if self._current is None:
                self._walk = None
        if self._walk is not None and self._current == expert:
            return self.resident_matrix(expert, parameter)
        return self.slot.engine.expert_matrix(self.group, expert, parameter).to(self.dtype)

    def request(
        self, experts: Sequence[int], tokens: Sequence[int] | None = None
    ) -> AbstractContextManager[Iterable[int]]:
        """The engine's request for ``experts``: iterating it yields them as they become resident, hits first.

        Args:
            experts: distinct ids.
            tokens: how many tokens are routed to each of them, for the order of the reads.
        """
        return self.slot.engine.request(self.group, list(experts), tokens=tokens)

    def resident_matrix(self, expert: int, parameter: str) -> torch.Tensor:
        """(rows, columns) matrix of the expert that a request has just yielded, in the computing dtype (scratch)."""
        return self.slot.engine.matrix(self.group, expert, parameter).to(self.dtype)


class ExpertParameter:
    """Replaces a fused expert parameter; supports indexing by one expert id, and metadata.

    Args:
        source: where the matrices come from.
        name: name of the parameter relative to the group's path.
        shape: shape of the parameter that was removed from the module.
    """

    _is_hf_initialized = True  # Transformers initialises the rest of the module (buffers), not this
    device = torch.device("cpu")
    requires_grad = False

    def __init__(self, source: ExpertSource, name: str, shape: Sequence[int]) -> None:
        self._source = source
        self._name = name
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        """The computing dtype."""
        return self._source.dtype

    @property
    def zipmoe_parameter(self) -> str:
        """Name of the parameter that it stands for, with the manifest's path."""
        return f"{self._source.path}.{self._name}"

    @property
    def ndim(self) -> int:
        """Number of dimensions of the parameter."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions of the parameter."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one entry of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Number of elements of the parameter."""
        return self.shape.numel()

    def view(self, *shape: Any) -> ExpertParameter:
        """The same experts under another shape (dbrx stores them as (experts * rows, columns))."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        known = torch.Size([size for size in sizes if size != -1]).numel()
        sizes = [self.numel() // known if size == -1 else size for size in sizes]
        if sizes[0] != self._source.experts:
            raise self._unsupported(f"view{tuple(sizes)}")
        return ExpertParameter(self._source, self._name, sizes)

    def __getitem__(self, expert: Any) -> torch.Tensor:
        try:
            index = int(expert)
        except (TypeError, ValueError):
            raise self._unsupported(f"indexing with {expert!r}") from None
        if not 0 <= index < self._source.experts:
            raise IndexError(f"expert {index} of {self._source.path} does not exist: there are {self._source.experts}")
        return self._source.matrix(index, self._name)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __repr__(self) -> str:
        return f"ExpertParameter({self._source.path}.{self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = next((a for a in args if isinstance(a, ExpertParameter)), None)
        if stand_in is None:
            raise UnsupportedOperationError(f"{func.__name__} needs all experts at once")
        raise stand_in._unsupported(func.__name__)

    def _unsupported(self, operation: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"{operation} on {self._source.path}.{self._name} would need all its experts in memory at once",
            hint='the experts of a packed model run under experts_implementation "zipmoe", "grouped_mm" or "eager"',
        )
