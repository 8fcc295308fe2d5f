"""Pools chosen by the planner while a model is loaded: for its budget, with the kept profile of machine and folder.

Where that is not possible, one line on standard error says why, and the single pool of whole records is used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from zipmoe.engine.budget import MemoryBudget
from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, largest, text_config
from zipmoe.engine.pool_budget import pools_bytes, reserve_all_but_pools
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.errors import BudgetTooSmallError, InvalidArgumentError, ZipMoEError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.folder_plan import check_trace
from zipmoe.planning.trace import RoutingTrace, read_trace
from zipmoe.profiling.kept_traces import kept_trace_path
from zipmoe.profiling.profile_store import find_profile, look_up_profile
from zipmoe.simulation.budget_plan import BudgetPlan, PlanRequest, plan_for_budget
from zipmoe.store.packed_folder import PackedFolder

_ATTEMPTS = 3
"""Planning itself takes some memory of the process, and with less left the plan is another."""


def embedding_parameters(modules: Iterable[tuple[str, nn.Module]]) -> set[str]:
    """Full names of the weights of which a step looks single rows up.

    Args:
        modules: ``model.named_modules(remove_duplicate=False)``.
    """
    return {f"{name}.weight" for name, module in modules if isinstance(module, nn.Embedding)}


def automatic_pools(
    model: Any, folder: PackedFolder, settings: ZipMoEConfig, measure_budget: Callable[[], MemoryBudget]
) -> PoolSettings | None:
    """The planner's pools for a model on the meta device; None: the single pool.

    Args:
        model: as it will run.
        folder: its packed folder.
        settings: budget, threads, and the trace to plan with.
        measure_budget: the run's budget with what the process keeps when it is called.

    Raises:
        InvalidArgumentError: the trace that was asked for is not one of this model.
        BudgetTooSmallError, PackedFolderError: from the budget, as without planning.
    """
    top_k = largest(text_config(model.config), EXPERTS_PER_TOKEN) or 1
    trace, trace_name = _trace(folder, settings)
    profile = _profile(folder)
    if profile is None:
        return None
    looked_up = embedding_parameters(model.named_modules(remove_duplicate=False))
    try:
        slots: PoolSlots | None = None
        for _ in range(_ATTEMPTS):
            free = reserve_all_but_pools(folder.manifest, measure_budget(), settings.decode_threads).free_bytes
            if slots is not None and pools_bytes(folder.manifest, slots) <= free:
                break
            request = PlanRequest(folder.manifest, profile, top_k, free, trace, looked_up=looked_up)
            plan = plan_for_budget(request)
            slots = plan.slots
            if slots is None:
                _say(f"note: every expert fits into a single pool, which is used: {_forecast_of(plan)}")
                return None
        else:
            _say("note: the memory of this process changes while it is planned: a single pool of experts is used")
            return None
    except (InvalidArgumentError, BudgetTooSmallError) as error:
        _say(f"note: no pools were planned, a single pool of experts is used: {error}")
        return None
    measured = f"{profile.measured_at:%Y-%m-%d %H:%M}"
    origin = f"pools planned with the profile of {measured} and {trace_name}: {_forecast_of(plan)}"
    return PoolSettings(slots, origin=origin)


def _forecast_of(plan: BudgetPlan) -> str:
    forecast = plan.chosen if plan.slots is not None or plan.single_pool is None else plan.single_pool
    return f"{forecast.step_seconds * 1e3:.0f} ms per token expected"


def _trace(folder: PackedFolder, settings: ZipMoEConfig) -> tuple[RoutingTrace | None, str]:
    """The trace to plan with, and what to call it."""
    if settings.trace is not None:
        path = Path(settings.trace)
        trace = read_trace(path)
        check_trace(trace, folder.manifest)
        return trace, f"the trace {path.name!r}"
    kept = kept_trace_path(folder.manifest)
    if kept.is_file():
        try:
            trace = read_trace(kept)
            check_trace(trace, folder.manifest)
            return trace, "the kept trace"
        except ZipMoEError as error:
            _say(f"note: the kept trace {str(kept)!r} is not used: {error}")
    return None, "no trace (all experts alike)"


def _profile(folder: PackedFolder) -> DeviceProfile | None:
    if look_up_profile(folder) is None:
        _say(
            "note: this machine was not measured with this folder, so a single pool of experts is used; "
            f"to plan the memory: zipmoe profile {folder.path}"
        )
        return None
    return find_profile(folder, report=_say)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
