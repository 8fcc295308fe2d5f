"""Memory of the pools F, C, S and E.

The parts of an expert (E-chunks, SM-chunks; one packed part with codecs that are not separable) have slots of their
own, and an expert in C takes one of each: moving between C, S and E copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.engine.byte_quantity import format_bytes
from zipmoe.engine.pool_plan import plan_size_classes
from zipmoe.engine.pool_slots import POOL_LETTERS, PoolSettings, PoolSlots
from zipmoe.errors import InvalidArgumentError
from zipmoe.store.manifest import ExpertGroup, Record

HUGE_PAGE_BYTES = 2 << 20
READABLE_TAIL_BYTES = 4096
PAGE_BYTES = 4096
MATRIX_ALIGNMENT_BYTES = 64
BF16_BYTES = 2
_SCALE_STEPS = 256

NativePools = tuple[
    list[tuple[int, list[int], int, int, int]], list[tuple[int, list[int], list[int]]], float | None, str
]
"""Classes, groups, tolerance and order of reads; see native/bindings."""


def part_bytes(record: Record) -> tuple[int, ...]:
    """Bytes of each part of a record: an extent with the padding behind it."""
    begins = [extent.offset for extent in record.extents]
    ends = [*begins[1:], record.length]
    return tuple(end - begin for begin, end in zip(begins, ends, strict=True))


def full_bytes(record: Record) -> int:
    """Bytes of the decoded matrices of a record, each aligned."""
    sizes = (matrix.rows * matrix.columns * BF16_BYTES for matrix in record.matrices)
    return sum(-(-size // MATRIX_ALIGNMENT_BYTES) * MATRIX_ALIGNMENT_BYTES for size in sizes)


def exponent_bytes(record: Record) -> int:
    """Bytes of the decompressed exponents of a record, one per weight, each matrix aligned."""
    sizes = (matrix.rows * matrix.columns for matrix in record.matrices)
    return sum(-(-size // MATRIX_ALIGNMENT_BYTES) * MATRIX_ALIGNMENT_BYTES for size in sizes)


@dataclass(frozen=True)
class PoolClass:
    """Slot lengths for the experts of some groups, multiples of 4096."""

    full_bytes: int
    part_bytes: tuple[int, ...]
    """E-chunks and SM-chunks, or the one packed part."""
    groups: tuple[int, ...]
    """Indices of the groups in the manifest."""
    staging: int
    exponent_bytes: int = 0
    """Decompressed exponents of one expert, a multiple of 4096."""
    exponent_buffers: int = 0
    """Experts whose exponents can be decompressed ahead."""

    @property
    def expert_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of one expert in F, C, S and E; 0 for a pool that the codec does not have."""
        separable = len(self.part_bytes) > 1
        exponent, sign_mantissa = (self.part_bytes[0], self.part_bytes[1]) if separable else (0, 0)
        return (self.full_bytes, sum(self.part_bytes), sign_mantissa, exponent)

    @property
    def staging_bytes(self) -> int:
        """Bytes for experts that are read or executed."""
        return self.staging * sum(self.part_bytes)

    @property
    def ahead_bytes(self) -> int:
        """Bytes for exponents that are decompressed ahead."""
        return self.exponent_buffers * self.exponent_bytes


@dataclass(frozen=True)
class PoolMemoryPlan:
    """Slots of all pools, and what they take."""

    classes: tuple[PoolClass, ...]
    slots: tuple[PoolSlots, ...]
    """Wanted slots of each group."""
    settings: PoolSettings

    @classmethod
    def of(cls, groups: Sequence[ExpertGroup], settings: PoolSettings, *, separable: bool) -> PoolMemoryPlan:
        """The plan of a packed folder's expert groups.

        Raises:
            InvalidArgumentError: S or E are asked for, but the codec is not separable.
        """
        slots = settings.of_groups([len(group.records) for group in groups])
        if not separable and any(group.sign_mantissa or group.exponent for group in slots):
            raise InvalidArgumentError(
                "the pools S and E hold parts of experts, but this codec's records have no parts",
                hint="use F and C, or pack the model with zstd, lz4 or lz4hc",
            )
        classes = []
        for shape in plan_size_classes(groups):
            records = [record for index in shape.groups for record in groups[index].records]
            parts = zip(*(part_bytes(record) for record in records), strict=True)
            full = max(full_bytes(record) for record in records)
            exponents = max(exponent_bytes(record) for record in records)
            most_experts = max(len(groups[index].records) for index in shape.groups)
            classes.append(
                PoolClass(
                    full_bytes=-(-full // PAGE_BYTES) * PAGE_BYTES,
                    part_bytes=tuple(max(sizes) for sizes in parts),
                    groups=shape.groups,
                    staging=min(settings.staging, most_experts),
                    exponent_bytes=-(-exponents // PAGE_BYTES) * PAGE_BYTES,
                    exponent_buffers=min(settings.decompress_ahead, most_experts) if separable else 0,
                )
            )
        return cls(tuple(classes), slots, settings)

    @property
    def rounding_bytes(self) -> int:
        """What whole huge pages may add: one row of slots for decoded experts, one for each part and one for
        decompressed exponents.
        """
        rows = sum(1 + len(shape.part_bytes) + (shape.exponent_buffers > 0) for shape in self.classes)
        return (HUGE_PAGE_BYTES + READABLE_TAIL_BYTES) * rows

    @property
    def floor_bytes(self) -> int:
        """Smallest reservation: nothing is kept, experts are only staged and decompressed."""
        return self.reservation_bytes([PoolSlots()] * len(self.slots))

    @property
    def wanted_bytes(self) -> int:
        """Reservation of all slots that were asked for."""
        return self.reservation_bytes(self.slots)

    def reservation_bytes(self, slots: Sequence[PoolSlots]) -> int:
        """Reservation of pools with these slots of each group."""
        total = self.rounding_bytes
        for shape in self.classes:
            total += shape.staging_bytes + shape.ahead_bytes
            for group in shape.groups:
                pairs = zip(slots[group].experts, shape.expert_bytes, strict=True)
                total += sum(experts * size for experts, size in pairs)
        return total

    def itemise(self) -> str:
        """The wanted slots, and what else is reserved beside them, in words."""
        ahead = max((shape.exponent_buffers for shape in self.classes), default=0)
        text = f"pools {describe_slots(self.slots)} per layer"
        if ahead:
            size = format_bytes(sum(shape.ahead_bytes for shape in self.classes))
            text += f", {size} for exponents of {ahead} experts decompressed ahead"
        return text

    def slots_within(self, reservation_bytes: int) -> list[PoolSlots]:
        """Slots of each group in a reservation (at least the floor): those asked for, or the same share of all."""
        if self.wanted_bytes <= reservation_bytes:
            return list(self.slots)
        fitting = [PoolSlots()] * len(self.slots)
        low, high = 0, _SCALE_STEPS
        while high - low > 1:
            middle = (low + high) // 2
            scaled = [group.scaled(middle / _SCALE_STEPS) for group in self.slots]
            if self.reservation_bytes(scaled) <= reservation_bytes:
                low, fitting = middle, scaled
            else:
                high = middle
        return fitting


def describe_slots(slots: Sequence[PoolSlots]) -> str:
    """Slots of a layer in words; where layers differ, the smallest and the largest number."""
    columns = [sorted({group.experts[pool] for group in slots}) for pool in range(len(POOL_LETTERS))]
    ranges = [str(c[0]) if len(c) == 1 else f"{c[0]} to {c[-1]}" for c in columns if c]
    return ", ".join(f"{letter} {count}" for letter, count in zip(POOL_LETTERS, ranges, strict=False))


def pool_line(plan: PoolMemoryPlan, slots: Sequence[PoolSlots], experts: Sequence[int]) -> str:
    """The pools' part of the mode line; ``experts``: of each group."""
    count = str(min(experts)) if len(set(experts)) == 1 else f"{min(experts)} to {max(experts)}"
    pool_bytes = plan.reservation_bytes(slots) - plan.rounding_bytes
    staged = max(shape.staging for shape in plan.classes)
    ahead = max(shape.exponent_buffers for shape in plan.classes)
    return (
        f"pools {describe_slots(slots)} of {count} experts per layer and {staged} staged "
        + (f"and {ahead} decompressed ahead " if ahead else "")
        + f"({format_bytes(pool_bytes)}, reads in {plan.settings.order} order)"
    )


def native_pools(plan: PoolMemoryPlan, group_records: Sequence[Sequence[int]]) -> NativePools:
    """The plan as the native engine takes it; ``group_records``: record numbers of each group."""
    settings = plan.settings
    class_of_group = {group: number for number, shape in enumerate(plan.classes) for group in shape.groups}
    return (
        [
            (shape.full_bytes, list(shape.part_bytes), shape.staging, shape.exponent_bytes, shape.exponent_buffers)
            for shape in plan.classes
        ],
        [
            (class_of_group[group], list(records), list(plan.slots[group].experts))
            for group, records in enumerate(group_records)
        ],
        settings.tolerance,
        settings.order,
    )
