"""``zipmoe plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zipmoe.cli.progress import talk

if TYPE_CHECKING:
    from zipmoe.planning.device import DeviceProfile
    from zipmoe.planning.packed_products import PackedProducts
    from zipmoe.planning.trace import RoutingTrace
    from zipmoe.simulation.budget_plan import BudgetPlan, StepForecast
    from zipmoe.store.packed_folder import PackedFolder

NO_TRACE = "none"
_SHOWN_RUNNER_UPS = 5
_PROCESS_MARGIN_BYTES = 16 << 20
"""A run's process is somewhat larger than the one that plans; slots that just fit here would be refused there."""


def plan_command(
    folder: Annotated[Path, typer.Argument(metavar="DST", help="Packed folder")],
    memory: Annotated[
        str | None, typer.Option(help="Budget of the run, e.g. 4GB (1 GB = 10^9 bytes) [default: what run would take]")
    ] = None,
    pools: Annotated[
        str | None, typer.Option(help="Pools that the plan may use, e.g. C or FCSE [default: all that the codec has]")
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Forecast exactly these experts per layer instead, as run --pools takes them")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Routing recorded with run --record-trace, which is kept for later runs of this model; none: all "
            "experts alike [default: the kept one]",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Device profile [default: what zipmoe profile kept for this folder]")
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option(help="Tokens of context to leave room for [default: 2048, or the model's limit]")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="For run --exact, which decodes before every product")] = False,
    half_life: Annotated[float, typer.Option(help="Steps after which an activation counts half")] = 16.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the cost over all partitions: FILE.png or FILE.svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Divide the memory of a run among cache pools: the partition with the smallest expected time per token."""
    from zipmoe.engine.pool_slots import PoolSlots
    from zipmoe.planning.partition import parse_pools
    from zipmoe.store.packed_folder import PackedFolder

    _check_options(context_tokens, half_life, slots, pools)
    wanted = parse_pools(pools) if pools is not None else None
    asked = PoolSlots.parse(slots) if slots is not None else None
    if plot is not None:
        from zipmoe.cli.plan_plot import check_plot

        check_plot(plot)
    opened = PackedFolder.open(folder)
    routing = _trace(opened, trace)
    device = _profile(opened, profile)

    from transformers import AutoConfig

    from zipmoe.engine.model_shape import EXPERTS_PER_TOKEN, largest, text_config
    from zipmoe.engine.pool_budget import budget_without_pools
    from zipmoe.profiling.kept_traces import keep_trace
    from zipmoe.simulation.budget_plan import PlanRequest, plan_for_budget

    config = AutoConfig.from_pretrained(folder)
    # With the model everything is imported that a run will keep in memory.
    model = _model(config, opened)
    looked_up, products, mode = _products(model, opened, exact=exact)
    budget = budget_without_pools(opened.manifest, memory, model, context_tokens)
    request = PlanRequest(
        opened.manifest,
        device,
        largest(text_config(config), EXPERTS_PER_TOKEN) or 1,
        max(0, budget.free_bytes - _PROCESS_MARGIN_BYTES),
        routing,
        half_life,
        wanted,
        looked_up,
        products,
    )
    plan = plan_for_budget(request, asked)
    command = f"zipmoe run {folder} --memory {budget.total_bytes} --pools {_pools_option(plan)}"
    command += " --exact" if exact else ""
    if plot is not None:
        from zipmoe.cli.plan_plot import draw_plan

        draw_plan(plan, plot, f"{folder.resolve().name}, {budget.total_bytes / 1e9:.2f} GB, {device.name}")
    if as_json:
        value: dict[str, Any] = {
            "memory_bytes": budget.total_bytes,
            "device": device.name,
            "mode": mode,
            "command": command,
        }
        typer.echo(json.dumps({**plan.to_json(), **value}, indent=2))
    else:
        _print_plan(plan, f"{device.name}, mode {mode}", asked=asked is not None)
        if plan.fits:
            talk(f"hint: {command}")
    if trace not in (None, NO_TRACE) and routing is not None:
        keep_trace(routing, opened.manifest)  # last: the plan has been seen even if the disk is full


def _check_options(context_tokens: int | None, half_life: float, slots: str | None, pools: str | None) -> None:
    from zipmoe.errors import InvalidArgumentError

    if context_tokens is not None and context_tokens < 1:
        raise InvalidArgumentError(f"--context-tokens {context_tokens} is not a positive number")
    if not 0 < half_life < float("inf"):
        raise InvalidArgumentError(f"--half-life {half_life:g} is not a positive number of steps")
    if slots is not None and pools is not None:
        raise InvalidArgumentError("--slots is a whole partition", hint="leave out --pools, or --slots")


def _pools_option(plan: BudgetPlan) -> str:
    """The value of ``run --pools``."""
    if plan.slots is None:
        return "none"
    pairs = zip("FCSE", plan.slots.experts, strict=True)
    return ",".join(f"{letter}={count}" for letter, count in pairs if count) or "C=0"


def _print_plan(plan: BudgetPlan, device: str, *, asked: bool) -> None:
    report = plan.report
    talk(f"for {plan.workload.source}; {device}; cost by {report.cost}, hit law {report.hit_law}")
    if plan.replayed_steps:
        talk(f"experts' part by replay of {plan.replayed_steps} steps with each of these partitions")
    for note in report.notes:
        talk(f"note: {note}")
    if not plan.fits:
        talk("note: these slots do not fit into the budget: run would refuse them")
    if plan.slots is None:
        talk("note: every expert fits into a single pool, which is faster")
    _print_table(plan, "asked" if asked else "chosen")


def _trace(folder: PackedFolder, trace: str | None) -> RoutingTrace | None:
    from zipmoe.planning.trace import read_trace
    from zipmoe.profiling.kept_traces import usable_kept_trace

    if trace == NO_TRACE:
        return None
    if trace is not None:
        return read_trace(Path(trace))
    return usable_kept_trace(folder.manifest, talk)


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


def _model(config: Any, folder: PackedFolder) -> Any:
    """The model without its weights."""
    from transformers.generation import utils  # noqa: F401

    import zipmoe.hf.quantizer  # noqa: F401
    from zipmoe.engine.rows_on_demand import model_on_meta

    return model_on_meta(config, folder.manifest.architecture)


def _products(model: Any, folder: PackedFolder, *, exact: bool) -> tuple[set[str], PackedProducts, str]:
    """Names of the weights of which a step looks single rows up, which products of the run read packed weights, and
    its mode.
    """
    from zipmoe.hf.configuration import ZipMoEConfig
    from zipmoe.hf.embedding_parameters import embedding_parameters
    from zipmoe.hf.packed_products import packed_products

    mode = ZipMoEConfig(mode="exact" if exact else None).resolved_mode()
    return embedding_parameters(model), packed_products(model, folder.manifest, mode), mode


def _print_table(plan: BudgetPlan, first: str) -> None:
    from rich.console import Console
    from rich.table import Table

    from zipmoe.planning.partition import POOLS

    console = Console(soft_wrap=True)
    console.width = max(console.width, 100)
    table = Table("", "experts per layer", "ms/token", "in experts", "MB held", box=None, pad_edge=False)
    for column in table.columns[2:]:
        column.justify = "right"

    def add(name: str, forecast: StepForecast) -> None:
        table.add_row(
            name,
            forecast.plan.describe(),
            f"{forecast.step_seconds * 1e3:.2f}",
            f"{forecast.expert_seconds * 1e3:.2f}",
            f"{forecast.held_bytes / 1e6:,.0f}",
        )

    add(first, plan.chosen)
    for number, forecast in enumerate(plan.runner_ups[:_SHOWN_RUNNER_UPS], 1):
        add(f"runner-up {number}", forecast)
    for name, forecast in plan.pure.items():
        add("no cache" if name == "none" else f"all {name}", forecast)
    if plan.single_pool is not None:
        add("single pool", plan.single_pool)
    console.print(table)
    value = plan.to_json()
    rates = ", ".join(f"{p.letter} {value['hit_rates'][p.letter]:.1%}" for p in POOLS if p in plan.report.pools)
    console.print(f"hits: {rates}; {value['read_bytes_per_step'] / 1e6:.0f} MB read per token", highlight=False)
    rest = plan.rest
    console.print(
        f"beside the experts: {rest.seconds * 1e3:.2f} ms per token (dense matrices decoded "
        f"{rest.decode_seconds * 1e3:.2f}, multiplied {rest.execute_seconds * 1e3:.2f}, "
        f"small operations {rest.dispatch_seconds * 1e3:.2f})",
        highlight=False,
    )
