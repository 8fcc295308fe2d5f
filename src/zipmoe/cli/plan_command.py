"""``zipmoe plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zipmoe.cli.progress import talk

if TYPE_CHECKING:
    from zipmoe.engine.pool_slots import PoolSlots
    from zipmoe.planning.device import DeviceProfile
    from zipmoe.planning.partition import ExpertState
    from zipmoe.planning.plan_report import Candidate, PlanReport
    from zipmoe.planning.workload import Workload
    from zipmoe.store.packed_folder import PackedFolder


def plan_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Packed folder")],
    memory: Annotated[
        str | None, typer.Option(help="Budget of the run, e.g. 4GB (1 GB = 10^9 bytes) [default: what run would take]")
    ] = None,
    pools: Annotated[
        str | None, typer.Option(help="Pools that the plan may use, e.g. C or FCSE [default: all that the codec has]")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Routing recorded with run --record-trace [default: none, all experts alike]"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Device profile [default: what zipmoe profile kept for this folder]")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="Tokens of context to leave room for [default: 2048, or the model's limit]")
    ] = None,
    half_life: Annotated[float, typer.Option(help="Steps after which an activation counts half")] = 16.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Divide the memory of a run among cache pools: the partition with the smallest expected time per token."""
    from zipmoe.errors import InvalidArgumentError
    from zipmoe.planning.partition import parse_pools
    from zipmoe.planning.trace import read_trace
    from zipmoe.store.packed_folder import PackedFolder

    if context_tokens is not None and context_tokens < 1:
        raise InvalidArgumentError(f"--context-tokens {context_tokens} is not a positive number")
    if not 0 < half_life < float("inf"):
        raise InvalidArgumentError(f"--half-life {half_life:g} is not a positive number of steps")
    wanted = parse_pools(pools) if pools is not None else None
    routing = read_trace(trace) if trace is not None else None
    opened = PackedFolder.open(folder)
    device = _profile(opened, profile)

    from transformers import AutoConfig

    from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, largest, text_config
    from zipmoe.engine.pool_budget import budget_without_pools
    from zipmoe.engine.pool_slots import POOL_LETTERS
    from zipmoe.planning.folder_plan import workload_of

    config = AutoConfig.from_pretrained(folder)
    top_k = largest(text_config(config), EXPERTS_PER_TOKEN) or 1
    workload = workload_of(opened.manifest, top_k, routing, half_life)
    budget = budget_without_pools(opened.manifest, memory, config, context_tokens)
    report, slots = _fitting_plan(opened, device, workload, budget.free_bytes, wanted)
    option = ",".join(f"{letter}={count}" for letter, count in zip(POOL_LETTERS, slots.experts, strict=True) if count)
    command = f"zipmoe run {folder} --memory {budget.total_bytes}" + (f" --pools {option}" if option else "")
    if as_json:
        value = {**report.to_json(), "memory_bytes": budget.total_bytes, "device": device.name, "command": command}
        typer.echo(json.dumps(value, indent=2))
    else:
        talk(f"for {workload.source}; {device.name}; cost by {report.cost}, hit law {report.hit_law}")
        for note in report.notes:
            talk(f"note: {note}")
        _print_table(report)
        talk(f"hint: {command}")


def _profile(folder: PackedFolder, path: Path | None) -> DeviceProfile:
    from zipmoe.errors import InvalidArgumentError
    from zipmoe.planning.device import DeviceProfile
    from zipmoe.profiling.profile_store import find_profile

    if path is not None:
        return DeviceProfile.load(path)
    found = find_profile(folder)
    if found is None:
        raise InvalidArgumentError(
            f"this machine was not measured with {str(folder.path)!r}", hint=f"zipmoe profile {folder.path}"
        )
    return found


def _fitting_plan(
    folder: PackedFolder,
    device: DeviceProfile,
    workload: Workload,
    free_bytes: int,
    pools: tuple[ExpertState, ...] | None,
) -> tuple[PlanReport, PoolSlots]:
    """The plan, made for less memory as long as the slots with their staging do not fit into ``free_bytes``."""
    from zipmoe.engine.pool_budget import pools_bytes
    from zipmoe.engine.pool_slots import PoolSlots
    from zipmoe.planning.folder_plan import plan_folder

    layers = len(folder.manifest.expert_groups)
    given = free_bytes
    while True:
        report = plan_folder(folder.manifest, device, workload, max(given // layers, 1), pools)
        slots = PoolSlots(*report.plan.slots)
        surplus = pools_bytes(folder.manifest, slots) - free_bytes
        if surplus <= 0 or not report.plan.total_slots:
            return report, slots
        given -= surplus


def _print_table(report: PlanReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from zipmoe.planning.partition import POOLS

    console = Console(soft_wrap=True)
    console.width = max(console.width, 100)
    table = Table("", "experts per layer", "ms/token in experts", "MB held", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"

    def add(name: str, candidate: Candidate) -> None:
        held = candidate.held_bytes * len(report.layers)
        table.add_row(name, candidate.plan.describe(), f"{candidate.step_seconds * 1e3:.2f}", f"{held / 1e6:,.0f}")

    table.add_row(
        "chosen", report.plan.describe(), f"{report.step_seconds * 1e3:.2f}", f"{report.held_bytes / 1e6:,.0f}"
    )
    for number, candidate in enumerate(report.runner_ups, 1):
        add(f"runner-up {number}", candidate)
    for name, candidate in report.pure.items():
        add("no cache" if name == "none" else f"all {name}", candidate)
    console.print(table)
    rates = ", ".join(f"{pool.letter} {report.hit_rates[pool]:.1%}" for pool in POOLS if pool in report.pools)
    console.print(f"hits: {rates}; {report.read_bytes_per_step / 1e6:.0f} MB read per token", highlight=False)
