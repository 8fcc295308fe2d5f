"""How the expert pool is cut into slots.

Every slot holds one expert. Groups whose largest records are of similar length share a size class, so that a model with
uniform layers has one pool and no memory lies idle behind small experts of an unusual layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.store.manifest import ExpertGroup

SIZE_CLASS_SPREAD = 1.25
"""A group joins a class if the class's slots are at most this factor longer than its largest record."""
FLOOR_SLOTS = 2
"""One expert being computed while the next one is read: the least that makes progress without stalling every read."""


@dataclass(frozen=True)
class SizeClass:
    """Slots of one length, for the experts of some groups."""

    slot_bytes: int
    """Length of the longest record of the groups."""
    records: int
    """Experts in all groups: more slots are of no use."""
    groups: tuple[int, ...]
    """Indices of the groups in the manifest."""

    @property
    def floor_slots(self) -> int:
        """Slots without which the engine does not start."""
        return min(FLOOR_SLOTS, self.records)


def plan_size_classes(groups: Sequence[ExpertGroup]) -> list[SizeClass]:
    """Classes with the longest slots first; every group is in exactly one."""
    longest = {index: max(record.length for record in group.records) for index, group in enumerate(groups)}
    classes: list[list[int]] = []
    for index in sorted(longest, key=lambda i: (-longest[i], i)):
        if classes and longest[classes[-1][0]] <= longest[index] * SIZE_CLASS_SPREAD:
            classes[-1].append(index)
        else:
            classes.append([index])
    return [
        SizeClass(
            slot_bytes=longest[members[0]],
            records=sum(len(groups[i].records) for i in members),
            groups=tuple(sorted(members)),
        )
        for members in classes
    ]


def floor_bytes(classes: Sequence[SizeClass]) -> int:
    """Bytes of the smallest pool that the engine starts with."""
    return sum(size_class.slot_bytes * size_class.floor_slots for size_class in classes)


def distribute_slots(classes: Sequence[SizeClass], pool_bytes: int) -> list[int]:
    """Slots of each class in a pool of at most ``pool_bytes`` (at least the floor): the same share of each class's
    records, as far as whole slots allow, never more slots than records.
    """
    slots = [size_class.floor_slots for size_class in classes]
    left = pool_bytes - floor_bytes(classes)
    if left < 0:
        raise ValueError("the pool is smaller than its floor")
    total = sum(size_class.slot_bytes * size_class.records for size_class in classes)
    share = min(1.0, pool_bytes / total) if total else 0.0
    for index, size_class in enumerate(classes):
        extra = min(int(share * size_class.records) - slots[index], left // size_class.slot_bytes)
        if extra > 0:
            slots[index] += extra
            left -= extra * size_class.slot_bytes
    for index, size_class in enumerate(classes):  # what rounding left over
        extra = min(size_class.records - slots[index], left // size_class.slot_bytes)
        slots[index] += extra
        left -= extra * size_class.slot_bytes
    return slots
