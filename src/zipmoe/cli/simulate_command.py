"""``zipmoe simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zipmoe.cli.progress import talk

if TYPE_CHECKING:
    from zipmoe.engine.cache_policy import PolicyChoice
    from zipmoe.planning.partition import PoolPlan
    from zipmoe.planning.trace import RoutingTrace
    from zipmoe.simulation.expert_shape import ExpertOnDevice
    from zipmoe.simulation.simulation_report import SimulationReport

DEFAULT_MEMORY_SHARE = 0.25


def simulate_command(
    trace: Annotated[Path, typer.Option(help="Routing trace: recorded by run --record-trace, or a published one")],
    device: Annotated[str, typer.Option(help="jetson-orin, this (its profile), or a device profile's path")] = "this",
    policy: Annotated[
        str | None,
        typer.Option(
            help="Cache policies, separated by commas, or 'all': auto, zipmoe, lru, lfu, lfuda, fifo, marking "
            "[default: auto]"
        ),
    ] = None,
    memory_share: Annotated[
        float | None,
        typer.Option(help=f"Pool memory as a share of the experts' BF16 bytes [default: {DEFAULT_MEMORY_SHARE}]"),
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Instead: experts per layer in pool C, or in pools F,C,S,E, e.g. 2,8,0,4")
    ] = None,
    pools: Annotated[
        str | None, typer.Option(help="Pools that the plan may use, e.g. C or FCSE [default: all that the codec has]")
    ] = None,
    codec: Annotated[str, typer.Option(help="Codec of the packed model: zstd, lz4, lz4hc or fx3")] = "zstd",
    shards: Annotated[int, typer.Option(help="Shards per E-chunk (K)")] = 4,
    workers: Annotated[int | None, typer.Option(help="Decompression workers (L) [default: the device's]")] = None,
    half_life: Annotated[
        float | None,
        typer.Option(
            help="Steps after which an activation counts half, for the policy zipmoe, which this makes the default, "
            "and for the plan [default: 16]"
        ),
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="delta of the rank thresholds in experts (zipmoe) [default: 10 % of a layer's]")
    ] = None,
    order: Annotated[str, typer.Option(help="Schedule: cache_affinity or fifo")] = "cache_affinity",
    expert_shape: Annotated[
        str | None, typer.Option(help="Matrices of an expert of an unknown model, e.g. 1024x2048,1024x2048,2048x1024")
    ] = None,
    warm_up: Annotated[
        float, typer.Option(help="First part of the trace: fills the pools, serves the planner, is not counted")
    ] = 0.5,
    other_seconds: Annotated[float, typer.Option(help="Seconds of a step outside of the experts")] = 0.0,
    prompts: Annotated[int, typer.Option(help="Of traces that count per prompt: prompts to draw steps from")] = 20,
    seed: Annotated[int, typer.Option(help="Of the drawing of steps, and of the policy marking")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Replay a routing trace on a machine: time and bytes per token, hit rates, utilisation, for each policy."""
    from dataclasses import replace

    from zipmoe.errors import InvalidArgumentError
    from zipmoe.simulation.belady import optimal_hit_rate
    from zipmoe.simulation.device_choice import load_device
    from zipmoe.simulation.experiment import warm_up_steps
    from zipmoe.simulation.expert_shape import ExpertOnDevice, ExpertShape
    from zipmoe.simulation.replay import CacheSettings, replay
    from zipmoe.simulation.trace_choice import open_trace

    if slots is not None and (memory_share is not None or pools is not None):
        raise InvalidArgumentError("--slots is a whole plan", hint="leave out --memory-share and --pools, or --slots")
    if order not in ("cache_affinity", "fifo"):
        raise InvalidArgumentError(f"--order {order!r} is unknown", hint="choose cache_affinity or fifo")
    if workers is not None and workers < 1:
        raise InvalidArgumentError(f"--workers {workers} cannot work")
    if not 0 <= other_seconds < float("inf"):
        raise InvalidArgumentError(f"--other-seconds {other_seconds:g} is not a duration")
    choices = _policies(policy, half_life)
    settings = [CacheSettings(choice.name, choice.half_life_steps, tolerance, seed) for choice in choices]
    profile = load_device(device)
    if workers is not None:
        profile = replace(profile, workers=workers)
    routing = open_trace(trace, prompts=prompts, seed=seed)
    model = routing.header.model
    shape = ExpertShape.parse(expert_shape) if expert_shape else ExpertShape.of_model(model)
    expert = ExpertOnDevice.of(shape, profile, codec, shards)
    warm = warm_up_steps(routing, warm_up)
    share = memory_share if memory_share is not None else DEFAULT_MEMORY_SHARE
    plan, planned = _plan(routing, expert, share, slots, pools, warm, choices[0].half_life_steps)
    talk(
        f"{model}: {len(routing.steps)} steps, the first {warm} as warm-up; {profile.name}, {profile.workers} workers; "
        f"{codec if expert.capabilities.whole else f'{codec}, {shards} shards'}; {order} schedule"
    )
    talk(
        f"{'planned from the warm-up' if planned else 'as asked'}: {plan.describe()} of "
        f"{routing.header.experts[0]} experts in each of {len(routing.header.experts)} layers"
    )
    reports = [
        replay(
            routing,
            plan,
            expert.costs,
            expert.bytes,
            setting,
            warm_up_steps=warm,
            other_seconds=other_seconds,
            order=order,
        )
        for setting in settings
    ]
    optimum = optimal_hit_rate(routing, plan.total_slots, warm_up_steps=warm) if plan.total_slots else 0.0
    if as_json:
        value: dict[str, Any] = {
            "trace": trace.name,
            "model": model,
            "device": profile.name,
            "codec": codec,
            "shards": shards,
            "workers": profile.workers,
            "order": order,
            "warm_up_steps": warm,
            "planned": planned,
            "optimal_hit_rate": optimum,
            "policies": [report.to_json() for report in reports],
        }
        typer.echo(json.dumps(value, indent=2))
    else:
        _print_table(reports, optimum)


def _policies(text: str | None, half_life: float | None) -> list[PolicyChoice]:
    """The policies to replay; a half-life is for the one among them that has one."""
    from zipmoe.engine.cache_policy import POLICY_WITH_HALF_LIFE, PolicyChoice, checked_pair, policy_names
    from zipmoe.errors import InvalidArgumentError

    if text is None:
        return [PolicyChoice.of(None, half_life)]
    names = policy_names() if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidArgumentError("--policy is empty", hint=f"choose some of {', '.join(policy_names())}")
    for name in names:
        checked_pair(name, None)
    if POLICY_WITH_HALF_LIFE not in names:
        checked_pair(names[0], half_life)
    chosen = PolicyChoice.of(POLICY_WITH_HALF_LIFE, half_life)
    return [PolicyChoice(name, chosen.half_life_steps) for name in names]


def _plan(
    routing: RoutingTrace,
    expert: ExpertOnDevice,
    share: float,
    slots: str | None,
    pools: str | None,
    warm_up: int,
    half_life: float,
) -> tuple[PoolPlan, bool]:
    """The plan, and whether the planner chose it."""
    from zipmoe.planning.partition import parse_pools
    from zipmoe.simulation.experiment import even_plan, planned

    if slots is not None:
        return _parse_slots(slots), False
    chosen = expert.capabilities.allowed(parse_pools(pools) if pools is not None else None)
    if len(chosen) == 1:
        return even_plan(routing, expert, share, chosen), False
    plan = planned(routing, expert, share, learn_steps=warm_up, half_life_steps=half_life, pools=chosen)
    return plan, True


def _parse_slots(text: str) -> PoolPlan:
    from zipmoe.errors import InvalidArgumentError
    from zipmoe.planning.partition import PoolPlan

    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if len(counts) not in (1, 4) or min(counts) < 0:
        raise InvalidArgumentError(
            f"--slots {text!r} is not a plan", hint="one number for pool C, or four for F,C,S,E: --slots 2,8,0,4"
        )
    return PoolPlan(compressed=counts[0]) if len(counts) == 1 else PoolPlan(*counts)


def _print_table(reports: list[SimulationReport], optimum: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from zipmoe.planning.partition import POOLS

    console = Console(soft_wrap=True)
    console.width = max(console.width, 100)  # a narrow terminal wraps lines, but no number is cut
    table = Table("policy", "ms/token", "MB/token", "hit rate", box=None, pad_edge=False)
    for pool in POOLS:
        table.add_column(pool.letter)
    for name in ("disk", "workers", "execution"):
        table.add_column(name)
    for column in table.columns[1:]:
        column.justify = "right"
    for report in reports:
        table.add_row(
            report.policy,
            f"{report.seconds_per_token * 1e3:.2f}",
            f"{report.read_bytes_per_token / 1e6:.1f}",
            f"{report.hit_rate:.3f}",
            *(f"{report.hit_rates[pool]:.3f}" for pool in POOLS),
            f"{report.disk_utilisation:.0%}",
            f"{report.worker_utilisation:.0%}",
            f"{report.execution_utilisation:.0%}",
        )
    console.print(table)
    for report in reports:
        if report.chosen_policy is not None:
            changes = "1 change" if report.policy_changes == 1 else f"{report.policy_changes} changes"
            console.print(f"auto: {report.chosen_policy} in the end, after {changes}", highlight=False)
    console.print(f"no policy that fetches on demand has a hit rate above {optimum:.3f} (Belady)", highlight=False)
