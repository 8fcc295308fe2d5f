"""Where the budget goes when an engine starts: what must fit, what is refused, and what is left for experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.codecs.bfloat16_fields import BFLOAT16_BYTES
from zipmoe.engine.budget import (
    DENSE,
    EXPERT_POOL,
    PROCESS,
    ROWS_ON_DEMAND,
    SCRATCH,
    WORKSPACE,
    WORKSPACE_BYTES,
    MemoryBudget,
    format_bytes,
    itemise,
)
from zipmoe.engine.memory_usage import charged_bytes
from zipmoe.engine.pool_plan import SizeClass, distribute_slots, floor_bytes, plan_size_classes
from zipmoe.engine.rows_on_demand import RowsOnDemand
from zipmoe.errors import BudgetTooSmallError
from zipmoe.store.manifest import Manifest, MatrixEntry

HUGE_PAGE_BYTES = 2 << 20
REGION_TAIL_BYTES = 4096
"""The arena keeps this much readable after each region, because decoders load whole vectors."""
ALL_RESIDENT = RowsOnDemand()


def _whole_huge_pages(count: int) -> int:
    return -(-count // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def decoded_bytes(matrix: MatrixEntry) -> int:
    """Bytes of a matrix in BF16."""
    return matrix.rows * matrix.columns * BFLOAT16_BYTES


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes of everything in the arena, and the buffers of decoding threads outside of it."""

    size_classes: tuple[SizeClass, ...]
    scratch_bytes: tuple[int, ...]
    """One buffer for each matrix of an expert, then one for a block of a dense matrix."""
    dense_bytes: int
    thread_buffer_bytes: int
    """What decoding threads allocate while they look up single rows (codecs whose unit is a shard)."""
    rows_on_demand: RowsOnDemand = ALL_RESIDENT
    """Matrices that are not in the arena."""

    @classmethod
    def of(
        cls, manifest: Manifest, decode_threads: int, *, separable: bool, rows_on_demand: RowsOnDemand = ALL_RESIDENT
    ) -> MemoryPlan:
        """The plan of a packed folder; ``separable``: its codec decodes whole shards."""
        experts = [record for group in manifest.expert_groups for record in group.records]
        blocks = [block for matrix in manifest.dense for block in matrix.blocks]
        positions = max((len(record.matrices) for record in experts), default=0)
        scratch = [
            max(decoded_bytes(record.matrices[i]) for record in experts if i < len(record.matrices))
            for i in range(positions)
        ]
        tile = max((decoded_bytes(block.matrices[0]) for block in blocks), default=0)
        # Looking up rows decompresses a shard of exponents (1 byte per weight) and decodes the rows wanted from it (2).
        matrices = [block.matrices[0] for block in blocks]
        shard = max((decoded_bytes(m) * 3 // 2 // max(1, len(m.shard_bytes)) for m in matrices), default=0)
        return cls(
            size_classes=tuple(plan_size_classes(manifest.expert_groups)),
            scratch_bytes=(*scratch, tile),
            dense_bytes=sum(block.length for block in blocks) - rows_on_demand.record_bytes,
            thread_buffer_bytes=shard * decode_threads if separable else 0,
            rows_on_demand=rows_on_demand,
        )

    @property
    def dense_reservation_bytes(self) -> int:
        """Arena memory of the packed dense matrices."""
        return _whole_huge_pages(self.dense_bytes)

    @property
    def rows_on_demand_bytes(self) -> int:
        """What matrices take at least that are not in the arena."""
        return self.rows_on_demand.reservation_bytes

    @property
    def scratch_reservation_bytes(self) -> int:
        """Memory for decoded matrices."""
        arena = sum(_whole_huge_pages(max(count, 1) + REGION_TAIL_BYTES) for count in self.scratch_bytes)
        return arena + self.thread_buffer_bytes

    @property
    def pool_rounding_bytes(self) -> int:
        """What whole huge pages may add to the slots."""
        return (HUGE_PAGE_BYTES + REGION_TAIL_BYTES) * len(self.size_classes)

    @property
    def pool_floor_bytes(self) -> int:
        """Smallest reservation of the expert pool."""
        return floor_bytes(self.size_classes) + self.pool_rounding_bytes

    def pool_reservation_bytes(self, slots: Sequence[int]) -> int:
        """Reservation of a pool with these slots of each class."""
        used = sum(shape.slot_bytes * count for shape, count in zip(self.size_classes, slots, strict=True))
        return used + self.pool_rounding_bytes

    def slots_within(self, reservation_bytes: int) -> list[int]:
        """Slots of each class in a pool whose reservation is at most this (at least the floor)."""
        return distribute_slots(self.size_classes, reservation_bytes - self.pool_rounding_bytes)

    def reserve(self, budget: MemoryBudget) -> list[int]:
        """Enter everything into the budget's ledger and give the rest to the expert pool.

        Returns:
            Slots of each size class.

        Raises:
            BudgetTooSmallError: the budget is below the floor, which the message itemises.
        """
        slots = sum(shape.floor_slots for shape in self.size_classes)
        self.reserve_fixed(budget, self.pool_floor_bytes, f"{slots} experts")
        slots_by_class = self.slots_within(budget.free_bytes)
        budget.set_reservation(EXPERT_POOL, self.pool_reservation_bytes(slots_by_class))
        return slots_by_class

    def reserve_fixed(self, budget: MemoryBudget, pool_bytes: int, pool: str) -> None:
        """Enter everything but the expert pool into the budget's ledger, with the details of rows on demand if there is
        memory for them (``RowsOnDemand.within``).

        Args:
            budget: what has been reserved in it is kept.
            pool_bytes: what must be left for the expert pool.
            pool: what fits into that, for the message.

        Raises:
            BudgetTooSmallError: the budget is below the floor, which the message itemises.
        """
        fixed = budget.ledger
        fixed.setdefault(PROCESS, charged_bytes())
        fixed.setdefault(WORKSPACE, WORKSPACE_BYTES)
        fixed[DENSE] = self.dense_reservation_bytes
        if self.rows_on_demand_bytes:
            fixed[ROWS_ON_DEMAND] = self.rows_on_demand_bytes
        fixed[SCRATCH] = self.scratch_reservation_bytes
        floor = {**fixed, EXPERT_POOL: pool_bytes}
        floor_total = sum(floor.values())
        if floor_total > budget.total_bytes:
            raise BudgetTooSmallError(
                f"a budget of {format_bytes(budget.total_bytes)} is below this model's floor of "
                f"{format_bytes(floor_total)}: {itemise(floor)} ({pool})",
                floor_bytes=floor_total,
                hint=f"give at least {math.ceil(floor_total / 1e7) / 100:.2f}GB, or reserve less context",
            )
        for name, count in fixed.items():
            budget.set_reservation(name, count)
        if self.rows_on_demand_bytes:
            rows = self.rows_on_demand.within(budget.free_bytes, pool_bytes)
            budget.set_reservation(ROWS_ON_DEMAND, rows.memory_bytes)
