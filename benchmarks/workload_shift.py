"""What a plan loses when the workload moves away from it (ZipMoE paper, table 4 and appendix E.2), by simulation.

f~ = (1 - a) f + a mean(f): with probability a, a layer's set of experts is a uniformly drawn one. The plan made for the
unshifted workload is compared with the one made for the shifted workload, both under the shifted workload: in the
planner's own model (expected), and replayed through the native pools, policy and scheduler (second half of a trace;
the plans come from the first halves).

Run: python benchmarks/workload_shift.py --traces DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from line_plot import save_lines
from replayed_models import (
    HALF_LIFE_STEPS,
    WARM_UP,
    add_replay_options,
    chosen_devices,
    chosen_traces,
    device_constants,
    packed_expert,
    replay_report,
    task_progress,
)
from result_document import add_result_options, table, write_results

from zipmoe.planning.partition import PoolPlan
from zipmoe.planning.planner import plan_pools
from zipmoe.planning.trace import RoutingTrace
from zipmoe.planning.workload import Workload
from zipmoe.simulation.experiment import layer_budget_bytes, warm_up_steps
from zipmoe.simulation.expert_shape import ExpertOnDevice
from zipmoe.simulation.replay import CacheSettings, replay
from zipmoe.simulation.workload_shift import expected_step_seconds, shifted_trace

AMOUNTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARES = (0.25, 0.5)
SEED = 0


def learnt_workload(trace: RoutingTrace) -> Workload:
    """The rank model of the first half of a trace, as the run-time dispatch ranks."""
    learn = warm_up_steps(trace, WARM_UP)
    seen = RoutingTrace(trace.header, trace.steps[:learn])
    return Workload.running(seen, HALF_LIFE_STEPS, int(min(learn // 2, HALF_LIFE_STEPS)))


def shift_of(
    trace: RoutingTrace, expert: ExpertOnDevice, share: float, amounts: Sequence[float]
) -> list[dict[str, Any]]:
    """The plan for the unshifted workload against the plan for the shifted one, for each amount.

    Returns:
        One row per amount: both plans, their expected and their replayed seconds per token under the shifted workload.
    """
    budget = layer_budget_bytes(trace, expert, share)
    warm_up = warm_up_steps(trace, WARM_UP)
    workload = learnt_workload(trace)

    def plan_for(wanted: Workload) -> PoolPlan:
        report = plan_pools(
            wanted, expert.costs, expert.bytes, budget, capabilities=expert.capabilities, worthwhile_gain=0.0
        )
        return report.plan

    def replayed(moved: RoutingTrace, plan: PoolPlan) -> float:
        settings = CacheSettings("zipmoe", HALF_LIFE_STEPS)
        return replay(moved, plan, expert.costs, expert.bytes, settings, warm_up_steps=warm_up).seconds_per_token

    unshifted = plan_for(workload)
    rows = []
    for amount in amounts:
        shifted = workload.shifted(amount)
        informed = unshifted if amount == 0 else plan_for(shifted)
        moved = shifted_trace(trace, amount, SEED)
        row: dict[str, Any] = {"amount": amount}
        for name, plan in (("unshifted", unshifted), ("informed", informed)):
            row[name] = {
                "plan": plan.describe(),
                "expected_seconds": expected_step_seconds(shifted, expert, plan),
                "replayed_seconds": replayed(moved, plan),
            }
        for kind in ("expected", "replayed"):
            key = f"{kind}_seconds"
            row[f"{kind}_ratio"] = row["unshifted"][key] / row["informed"][key]
        rows.append(row)
    return rows


def tables_of(results: Sequence[dict[str, Any]], amounts: Sequence[float]) -> str:
    """Time of the unshifted plan over that of the informed one, and how much slower the shift itself makes a token."""
    text = ""
    for device, codec in dict.fromkeys((result["device"], result["codec"]) for result in results):
        rows = []
        for result in results:
            if (result["device"], result["codec"]) != (device, codec):
                continue
            first = result["rows"][0]["unshifted"]["replayed_seconds"]
            for kind in ("expected", "replayed"):
                ratios = [f"{row[f'{kind}_ratio']:.3f}" for row in result["rows"]]
                rows.append([result["model"], f"{result['share']:.0%}", kind, *ratios])
            slower = [f"{row['unshifted']['replayed_seconds'] / first:.2f}" for row in result["rows"]]
            rows.append(["", "", "token, a = 0 is 1", *slower])
        text += f"\n**{device}, {codec}.** Unshifted plan over informed plan, under the shifted workload.\n\n"
        text += table(["model", "memory", "", *(f"a = {amount:g}" for amount in amounts)], rows)
    return text


def plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Replayed ratio over a, a panel for each device."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        panel = panels.setdefault(f"{result['device']}, {result['codec']}", {})
        name = f"{result['model']} {result['share']:.0%}"
        panel[name] = [(row["amount"], row["replayed_ratio"]) for row in result["rows"]]
    save_lines(path, panels, x_label="shift a", y_label="unshifted plan / informed plan")


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_replay_options(parser)
    parser.add_argument("--codec", default="zstd")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="memory as shares of the BF16 bytes")
    parser.add_argument("--amounts", type=float, nargs="+", default=AMOUNTS, help="shifts a, the first one must be 0")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file (needs matplotlib)")
    add_result_options(parser, "workload_shift")
    arguments = parser.parse_args()
    if arguments.amounts[0] != 0:
        parser.error("--amounts must begin with 0, to which the others are compared")
    traces, devices = chosen_traces(arguments), chosen_devices(arguments)
    results = []
    with task_progress("shifts", len(traces) * len(devices) * len(arguments.shares)) as tasks:
        for device in devices:
            for trace in traces:
                expert = packed_expert(trace, device, arguments.codec)
                for share in arguments.shares:
                    which = {"device": device.name, "codec": arguments.codec, "model": trace.header.model}
                    rows = shift_of(trace, expert, share, arguments.amounts)
                    results.append({**which, "share": share, "rows": rows})
                    tasks.finished(f"{trace.header.model} {share:.0%}")
    tables = tables_of(results, arguments.amounts)
    print(tables)
    report = replay_report(arguments, device_constants(devices), results)
    write_results(arguments.json, arguments.document, "Workload shift (table 4)", report, tables)
    if arguments.plot:
        plot(arguments.plot, results)


if __name__ == "__main__":
    main()
