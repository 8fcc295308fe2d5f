"""How much of a memory budget is left for the expert pools of a packed folder, before anything is loaded."""

from __future__ import annotations

import os
from typing import Any

from zipmoe.codecs.registry import get_codec
from zipmoe.engine.budget import MemoryBudget, plan_budget
from zipmoe.engine.memory_plan import ALL_RESIDENT, MemoryPlan
from zipmoe.engine.pool_memory_plan import PoolMemoryPlan
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.engine.rows_on_demand import RowsOnDemand, looked_up_matrices
from zipmoe.errors import BudgetTooSmallError
from zipmoe.store.manifest import Manifest


def budget_without_pools(
    manifest: Manifest, memory: str | int | None, model: Any, context_tokens: int | None
) -> MemoryBudget:
    """The budget of a run with everything reserved but the pools: what is free is theirs. Embeddings are kept as they
    are unless a caller asks for another place.

    To be called in a process that has imported torch and Transformers, as the run will have; ``model`` is on the meta
    device (``model_on_meta``).

    Raises:
        BudgetTooSmallError: the budget is below the floor.
    """
    in_checkpoint = model.state_dict().keys()
    unpacked = sum(reason.bytes for reason in manifest.unpacked)
    unpacked += sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in in_checkpoint)
    budget = plan_budget(memory, config=model.config, unpacked_bytes=unpacked, context_tokens=context_tokens)
    tables = tables_on_demand(manifest, looked_up_matrices(model, manifest), "auto", budget)
    return reserve_all_but_pools(manifest, budget, RowsOnDemand.of_manifest(manifest, tables))


def tables_on_demand(
    manifest: Manifest,
    looked_up: tuple[str, ...],
    place: str,
    budget: MemoryBudget,
    decode_threads: int | None = None,
    pools: PoolSettings | PoolSlots | None = None,
) -> tuple[str, ...]:
    """The parameters of ``looked_up`` whose rows are read on demand.

    Args:
        manifest: of the folder.
        looked_up: matrices that are only looked up (``looked_up_matrices``).
        place: one of ``EMBEDDING_PLACES``.
        budget: of the run, before the engine reserves anything; is not changed.
        decode_threads: of the engine; None: one per core.
        pools: of the engine; None: the single pool, or pools that are yet to be planned.

    Raises:
        InvalidArgumentError: the codec does not have these pools.
    """
    if place == "resident" or not looked_up:
        return ()
    if place == "auto":
        try:
            free = reserve_all_but_pools(manifest, budget, ALL_RESIDENT, decode_threads).free_bytes
        except BudgetTooSmallError:
            return looked_up
        fits = single_pool_holds_all(manifest, free) if pools is None else pools_bytes(manifest, pools) <= free
        if fits:
            return ()
    return looked_up


def reserve_all_but_pools(
    manifest: Manifest, budget: MemoryBudget, rows_on_demand: RowsOnDemand, decode_threads: int | None = None
) -> MemoryBudget:
    """A copy of a budget with everything reserved that an engine needs beside its pools.

    Raises:
        BudgetTooSmallError: the budget is below the floor.
    """
    plan = MemoryPlan.of(
        manifest,
        decode_threads or len(os.sched_getaffinity(0)),
        separable=get_codec(manifest.codec.name).separable,
        rows_on_demand=rows_on_demand,
    )
    smallest = pools_bytes(manifest, PoolSlots())
    reserved = MemoryBudget(budget.total_bytes, budget.ledger)
    plan.reserve_fixed(reserved, smallest, "what is being read; nothing is kept")
    return reserved


def pools_bytes(manifest: Manifest, pools: PoolSettings | PoolSlots) -> int:
    """Memory of these pools in every sparse layer, staging included."""
    separable = get_codec(manifest.codec.name).separable
    settings = PoolSettings(pools) if isinstance(pools, PoolSlots) else pools
    return PoolMemoryPlan.of(manifest.expert_groups, settings, separable=separable).wanted_bytes


def single_pool_holds_all(manifest: Manifest, pool_bytes: int) -> bool:
    """Whether the single pool of whole records, given so many bytes, has a slot for every expert."""
    plan = MemoryPlan.of(manifest, 1, separable=get_codec(manifest.codec.name).separable)
    return plan.pool_reservation_bytes([shape.records for shape in plan.size_classes]) <= pool_bytes
