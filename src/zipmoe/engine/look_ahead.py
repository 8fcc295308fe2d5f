"""Experts that the next layer will probably ask for, read in idle disk time (native/runtime/look_ahead.hpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zipmoe.engine.record_catalogue import GroupHandle

if TYPE_CHECKING:
    from zipmoe.engine.engine import Engine

SPARED_SLOTS = 2
"""Of every size class: about what a disk reads while the attention of a layer is computed."""


SLOTS_OF_OTHERS = 2
"""Of every size class: fewer are not left for what is asked for (``kSlotsMin`` of the native core)."""


class LookAhead:
    """Predictions for one engine with one pool of whole records.

    They change when experts are read, and nothing else: reads wait for all others, and go to slots that the pool spares
    for them; in a pass that asks every layer for most of its experts, also to those of experts that it has passed. What
    the next layer asks for is used, the rest is dropped.

    Args:
        engine: whose pool lends the slots from now on.
        slots: of every size class, as far as two are left to the others.
    """

    def __init__(self, engine: Engine, slots: int = SPARED_SLOTS) -> None:
        self._wanted = slots
        self._engine = engine
        engine._native.enable_look_ahead(slots)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of each size class that the pool, as large as it is now, keeps for predictions."""
        present = [slots for _, slots in self._engine._native.size_classes]
        return tuple(
            0 if slots >= shape.records else min(self._wanted, max(0, slots - SLOTS_OF_OTHERS))
            for slots, shape in zip(present, self._engine._plan.size_classes, strict=True)
        )

    def predict(self, group: GroupHandle, expert_ids: Sequence[int]) -> None:
        """What the request after the open one will ask for; if none is open or begun, the one after the next.

        Args:
            group: of the experts.
            expert_ids: the likeliest first.
        """
        engine = self._engine
        with engine._exclusive():
            engine._native.predict([group.records[expert_id] for expert_id in expert_ids])

    def predict_next(self, group: GroupHandle, expert_ids: Sequence[int], of_pass: bool = False) -> list[int]:
        """What the next request will ask for; reads begin at once. Nothing happens while a request is open or begun.

        Args:
            group: of the experts.
            expert_ids: the likeliest first.
            of_pass: the request begins a pass of as many rows as the last one: if that asked every layer for most of
                its experts, so will this one, and what ``predict`` has begun for it goes on.

        Returns:
            Those of which nothing was in memory: reads were queued for as many of them as slots are spared.
        """
        engine = self._engine
        with engine._exclusive():
            absent = engine._native.predict_next([group.records[expert_id] for expert_id in expert_ids], of_pass)
        return [expert_ids[position] for position in absent]

    def predict_sweep(self, group: GroupHandle) -> None:
        """A pass is about to begin that asks every layer for nearly all of its experts, the first one of this group.

        Args:
            group: of the first sparse layer.
        """
        engine = self._engine
        with engine._exclusive():
            if engine._request is None:
                engine.early.cancel()
                engine._native.predict_sweep(list(group.records))


def can_look_ahead(engine: Engine) -> bool:
    """Whether the engine has the one pool that predictions need, and not pools by residency."""
    return engine._pools is None


def holds_all_experts(engine: Engine) -> bool:
    """Whether the single pool has a slot for every expert, so that there is nothing to predict."""
    present = [slots for _, slots in engine._native.size_classes]
    return all(slots >= shape.records for slots, shape in zip(present, engine._plan.size_classes, strict=True))
