"""A request that begins before its experts are asked for, so that they are read while something else is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zipmoe.engine.record_catalogue import GroupHandle

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine


class EarlyRequest:
    """What ``Engine.early`` is: at most one request, begun and not yet asked for.

    It does not hold the engine: dense matrices may be used meanwhile, by any thread. The next request takes it over if
    it is the same one. Any other request, a change of the pools' sizes and ``Engine.close`` end it first; then it
    counts neither as a request nor as hits and misses; only its reads were made, and the pool's policy has counted its
    experts. So it needs no end of its own: whoever began it may fail on the way.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._begun: tuple[GroupHandle, list[int], bool, list[int]] | None = None

    def begin(
        self, group: GroupHandle, expert_ids: Sequence[int], *, ascending: bool = False, tokens: Sequence[int] = ()
    ) -> bool:
        """Pin what is resident and start the reads of the others. Errors of reads come with the request itself.

        Args:
            group: of the experts.
            expert_ids: distinct ids; order, ``ascending`` and ``tokens`` are those of the request to come.
            ascending: hand out by ascending id.
            tokens: how many tokens are routed to each of them, or none.

        Returns:
            Whether it began: not while the same thread has a request open.
        """
        engine = self._engine
        with engine._exclusive():
            if engine._request is not None:
                return False
            self.cancel()
            engine._decoded.settle()
            records = [group.records[expert_id] for expert_id in expert_ids]
            # Noted first: an interruption after the call must not leave a request open that nobody knows of.
            self._begun = (group, list(expert_ids), ascending, list(tokens))
            try:
                engine._native.begin_request(records, ascending, self._begun[3])
            except BaseException:
                self.cancel()
                raise
        return True

    def take(self, group: GroupHandle, expert_ids: list[int], ascending: bool, tokens: list[int]) -> bool:
        """Whether the open request is the one that is described; any other one is cancelled. For who holds the engine.

        From this call on the caller ends whatever request is open, also when the call itself is interrupted.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        if begun[0] is group and begun[1:] == (expert_ids, ascending, tokens):
            return True
        self._engine._native.abandon_request()
        return False

    def cancel(self) -> None:
        """End it, if there is one: reads that have not begun are dropped, others waited for."""
        if self._begun is not None:
            try:
                self._engine._native.abandon_request()
            finally:  # also when Ctrl-C strikes as the call returns
                self._begun = None
