"""One sparse layer's need for experts, handed out one by one as they become resident."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from zipmoe.engine.record_catalogue import GroupHandle
from zipmoe.engine.record_errors import named_record_errors
from zipmoe.errors import InvalidArgumentError, UnsupportedOperationError

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine


class ExpertRequest:
    """Experts of one sparse layer; see ``Engine.request``."""

    def __init__(
        self, engine: Engine, group: GroupHandle, expert_ids: list[int], ascending: bool, tokens: list[int]
    ) -> None:
        count = len(group.records)
        for expert_id in expert_ids:
            if not 0 <= expert_id < count:
                raise InvalidArgumentError(f"{group.path} has experts 0 to {count - 1}, not {expert_id}")
        self.group = group
        self.current: int | None = None
        """The expert handed out last, while it is usable."""
        self._engine = engine
        self._expert_ids = expert_ids
        self._ascending = ascending
        self._tokens = tokens

    def __enter__(self) -> Self:
        engine = self._engine
        engine._require_usable()
        engine._access.acquire()
        try:
            engine._require_usable()  # it may have been closed while this thread waited
            if engine._request is not None:
                raise UnsupportedOperationError("this thread has a request open already: end it first")
            engine._request = self
            if not engine.early.take(self.group, self._expert_ids, self._ascending, self._tokens):
                engine._decoded.settle()
                wanted = [self.group.records[expert_id] for expert_id in self._expert_ids]
                engine._native.begin_request(wanted, self._ascending, self._tokens)
        except BaseException:
            # Ctrl-C may strike between any two of these steps: no request may stay open that nobody would end.
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        engine = self._engine
        self.current = None
        try:
            if engine._request is self:
                engine._native.end_request()
        finally:
            if engine._request is self:
                engine._request = None
            engine._access.release()

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        engine = self._engine
        if engine._request is not self:
            raise UnsupportedOperationError("a request is iterated over inside its with block")
        self.current = None
        with named_record_errors(engine._catalogue):
            position = engine._native.next_expert()
        if position is None:
            raise StopIteration
        self.current = self._expert_ids[position]
        return self.current
