"""How much of a memory budget is left for the expert pools of a packed folder, before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from zipmoe.codecs.registry import get_codec
from zipmoe.engine.budget import MemoryBudget, plan_budget
from zipmoe.engine.memory_plan import MemoryPlan
from zipmoe.engine.pool_memory_plan import PoolMemoryPlan
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.engine.rows_on_demand import RowsOnDemand, looked_up_matrices, model_on_meta
from zipmoe.store.manifest import Manifest


def budget_without_pools(
    manifest: Manifest, memory: str | int | None, config: Any, context_tokens: int | None
) -> MemoryBudget:
    """The budget of a run with everything reserved but the pools: what is free is theirs. Rows of embeddings are read
    on demand, as they are unless a caller asks for resident ones.

    To be called in a process that has imported torch and Transformers, as the run will have.

    Raises:
        BudgetTooSmallError: the budget is below the floor.
    """
    unpacked = sum(reason.bytes for reason in manifest.unpacked)
    budget = plan_budget(memory, config=config, unpacked_bytes=unpacked, context_tokens=context_tokens)
    looked_up = looked_up_matrices(model_on_meta(config, manifest.architecture), manifest)
    plan = MemoryPlan.of(
        manifest,
        len(os.sched_getaffinity(0)),
        separable=get_codec(manifest.codec.name).separable,
        rows_on_demand=RowsOnDemand.of_manifest(manifest, looked_up),
    )
    smallest = pools_bytes(manifest, PoolSlots(compressed=1))
    plan.reserve_fixed(budget, smallest, "one expert per layer, and what is being read")
    return budget


def pools_bytes(manifest: Manifest, slots: PoolSlots) -> int:
    """Memory of these pools in every sparse layer, staging included."""
    separable = get_codec(manifest.codec.name).separable
    return PoolMemoryPlan.of(manifest.expert_groups, PoolSettings(slots), separable=separable).wanted_bytes
