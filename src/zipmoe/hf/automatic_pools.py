"""Pools chosen by the planner while a model is loaded: for its budget, with the kept profile of machine and folder.

Where that is not possible, one line says why, and the single pool of whole records is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zipmoe.engine.budget import MemoryBudget
from zipmoe.engine.cache_policy import DEFAULT_HALF_LIFE_STEPS
from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, largest, text_config
from zipmoe.engine.pool_budget import pools_bytes, reserve_all_but_pools, tables_on_demand
from zipmoe.engine.pool_slots import PoolSettings
from zipmoe.engine.rows_on_demand import RowsOnDemand, looked_up_matrices
from zipmoe.errors import BudgetTooSmallError, InvalidArgumentError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.embedding_parameters import embedding_parameters
from zipmoe.hf.packed_products import packed_products
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.folder_plan import check_trace
from zipmoe.planning.trace import RoutingTrace, read_trace
from zipmoe.profiling.kept_traces import usable_kept_trace
from zipmoe.profiling.profile_store import look_up_profile, profile_command, refusal
from zipmoe.simulation.budget_plan import BudgetPlan, PlanRequest, StepForecast, plan_for_budget
from zipmoe.store.packed_folder import PackedFolder

_Note = Callable[[str], None]
_ATTEMPTS = 3
"""Planning itself takes some memory of the process, and with less left the plan is another."""


@dataclass(frozen=True)
class AutomaticPools:
    """What came of planning."""

    settings: PoolSettings | None
    """None: the single pool."""
    notes: tuple[str, ...] = ()
    """Lines to tell a person once the engine is open."""
    on_demand: tuple[str, ...] | None = None
    """Tables whose rows are read on demand, as it was planned with; None where nothing was planned."""


def automatic_pools(
    model: Any, folder: PackedFolder, settings: ZipMoEConfig, measure_budget: Callable[[], MemoryBudget]
) -> AutomaticPools:
    """The planner's pools for a model on the meta device.

    Args:
        model: as it will run.
        folder: its packed folder.
        settings: mode, threads, and the trace to plan with.
        measure_budget: the run's budget with what the process keeps when it is called.

    Raises:
        InvalidArgumentError: the trace that was asked for is not one of this model.
        InvalidArgumentError, PackedFolderError: from the budget, as without planning.
    """
    notes: list[str] = []
    trace, trace_name = _trace(folder, settings, notes.append)
    profile = _profile(folder, settings, notes.append)
    if profile is None:
        return AutomaticPools(None, tuple(notes))
    first = measure_budget()  # refuses what is wrong with it
    looked_up = embedding_parameters(model)
    top_k = largest(text_config(model.config), EXPERTS_PER_TOKEN) or 1
    looked_up_tables = looked_up_matrices(model, folder.manifest)
    tables = tables_on_demand(folder.manifest, looked_up_tables, settings.embedding, first, settings.decode_threads)
    rows_on_demand = RowsOnDemand.of_manifest(folder.manifest, tables)
    products = packed_products(model, folder.manifest, settings.resolved_mode())
    try:
        plan: BudgetPlan | None = None
        for _ in range(_ATTEMPTS):
            budget = measure_budget()
            free = reserve_all_but_pools(folder.manifest, budget, rows_on_demand, settings.decode_threads).free_bytes
            if plan is not None and plan.slots is not None and pools_bytes(folder.manifest, plan.slots) <= free:
                measured = f"{profile.measured_at:%Y-%m-%d %H:%M}"
                origin = f"pools planned with the profile of {measured} and {trace_name}: {_expected(plan.chosen)}"
                return AutomaticPools(PoolSettings(plan.slots, origin=origin), tuple(notes), tables)
            plan = plan_for_budget(
                PlanRequest(
                    folder.manifest,
                    profile,
                    top_k,
                    free,
                    trace,
                    settings.half_life_steps or DEFAULT_HALF_LIFE_STEPS,
                    looked_up=looked_up,
                    products=products,
                )
            )
            if plan.slots is None and plan.single_pool is not None:
                notes.append(f"note: a single pool holds every expert: {_expected(plan.single_pool)}")
                return AutomaticPools(None, tuple(notes), tables)
        notes.append("note: the process grows while it is planned, so a single pool of experts is used")
    except (InvalidArgumentError, BudgetTooSmallError) as error:
        notes.append(f"note: no pools were planned, a single pool of experts is used: {error}")
    return AutomaticPools(None, tuple(notes))


def _expected(forecast: StepForecast) -> str:
    return f"{forecast.step_seconds * 1e3:.0f} ms per token expected"


def _trace(folder: PackedFolder, settings: ZipMoEConfig, note: _Note) -> tuple[RoutingTrace | None, str]:
    """The trace to plan with, and what to call it."""
    if settings.trace is not None:
        path = Path(settings.trace)
        trace = read_trace(path)
        check_trace(trace, folder.manifest)
        return trace, f"the trace {path.name!r}"
    kept = usable_kept_trace(folder.manifest, note)
    if kept is not None:
        return kept, "the kept trace"
    return None, "no trace (all experts alike)"


def _profile(folder: PackedFolder, settings: ZipMoEConfig, note: _Note) -> DeviceProfile | None:
    kept = look_up_profile(folder)
    if kept is None:
        note(
            "note: this machine was not measured with this folder, so a single pool of experts is used; "
            f"to plan the memory: {profile_command(folder.path, settings.cpus)}"
        )
        return None
    if kept.doubts:
        note(refusal(kept, folder.path, settings.cpus))
        return None
    return kept.profile
