"""Opens the engine of a model within its memory budget, before any weight is loaded.

At that moment the process holds the interpreter and its libraries only, and the model on the meta device tells how many
bytes its unpacked tensors will take: everything is reserved before it is allocated, and a budget that is too small is
refused before anything was read.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from zipmoe.engine.budget import MemoryBudget, plan_budget
from zipmoe.engine.engine import Engine
from zipmoe.engine.pool_budget import tables_on_demand
from zipmoe.engine.rows_on_demand import looked_up_matrices
from zipmoe.hf.automatic_pools import automatic_pools
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.measured_reads import measured_reads
from zipmoe.hf.thread_placement import place_threads
from zipmoe.store.manifest import Manifest
from zipmoe.store.packed_folder import PackedFolder

WIDENED = "weights widened to float32"
_FLOAT32_BYTES = 4


def open_engine(model: Any, folder: PackedFolder, settings: ZipMoEConfig) -> Engine:
    """Open the engine for ``model``, on the meta device, whose packed parameters have been replaced.

    Raises:
        InvalidArgumentError: the process may not use the CPUs that were asked for.
        BudgetTooSmallError: the budget is below the floor, which the message itemises.
        PackedFolderError: a file or record of the folder is missing or damaged.
    """
    place_threads(settings.cpus)
    pools = settings.pools
    notes: tuple[str, ...] = ()
    on_demand: tuple[str, ...] | None = None
    if isinstance(pools, str):
        automatic = automatic_pools(model, folder, settings, lambda: _budget(model, folder, settings))
        pools, notes, on_demand = automatic.settings, automatic.notes, automatic.on_demand
    budget = _budget(model, folder, settings)
    if on_demand is None:
        looked_up = looked_up_matrices(model, folder.manifest)
        on_demand = tables_on_demand(
            folder.manifest, looked_up, settings.embedding, budget, settings.decode_threads, pools
        )
    engine = Engine(
        folder,
        budget,
        verify=settings.verify,
        io_mode=settings.io_mode,
        io_threads=settings.io_threads,
        io_depth=settings.io_depth,
        measured_reads=measured_reads(folder, settings),
        io_backend=settings.io_backend,
        decode_threads=settings.decode_threads,
        policy=settings.policy,
        half_life_steps=settings.half_life_steps,
        pools=pools,
        fused=settings.resolved_mode() == "fast",
        rows_on_demand=on_demand,
    )
    for note in notes:
        sys.stderr.write(f"{note}\n")
    return engine


def _budget(model: Any, folder: PackedFolder, settings: ZipMoEConfig) -> MemoryBudget:
    """The budget with what the process keeps at this moment, and what loading will add outside of the engine."""
    budget = plan_budget(
        settings.resolved_memory(),
        config=model.config,
        unpacked_bytes=unpacked_bytes(model),
        context_tokens=settings.context_tokens,
    )
    if model.config.dtype == torch.float32:
        ledger = budget.ledger | {WIDENED: widened_bytes(folder.manifest)}
        budget = MemoryBudget(budget.total_bytes, ledger)  # may exceed the total: the engine itemises its refusal
    return budget


def unpacked_bytes(model: Any) -> int:
    """Bytes that the parameters and buffers of ``model`` (still on the meta device) will take once loaded."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(model.config.dtype)
    kept_in_float32 = build_glob_alternation(list(plan))[0] if plan else None
    total = sum(buffer.nbytes for buffer in model.buffers())
    for name, parameter in model.named_parameters():
        if name in model.all_tied_weights_keys:
            continue
        widened = kept_in_float32 is not None and kept_in_float32.search(name) is not None
        total += parameter.numel() * (_FLOAT32_BYTES if widened else parameter.element_size())
    return int(total)


def widened_bytes(manifest: Manifest) -> int:
    """Bytes of float32 copies of decoded weights that exist at once: two matrices or tiles at most."""
    return 2 * max(m.rows * m.columns for record in manifest.records() for m in record.matrices) * _FLOAT32_BYTES
