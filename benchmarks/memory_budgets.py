"""Time per token and hit rates over memory budgets, per cache policy (ZipMoE paper, tables 5 and 6), by simulation.

Real routing traces are replayed through the native pools, policies and scheduler. Memory is a share of the experts'
BF16 bytes; the first half of a trace fills the pools and is all that the planner sees, the second half is counted. The
policies get the whole budget as one pool, F (BF16) or C (compressed); "zipmoe + planning" is the planner's choice after
its candidates were replayed on the first half.

Run: python benchmarks/memory_budgets.py --traces DIR

It can be run in parts (--device, --only, --codecs, --shares): results of other parts are kept in the JSON.
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
from result_document import add_result_options, earlier_results, table, write_results

from zipmoe.planning.partition import ExpertState, PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.experiment import even_plan, planned_and_replayed, warm_up_steps
from zipmoe.simulation.expert_shape import ExpertOnDevice
from zipmoe.simulation.replay import CacheSettings, replay

POLICIES = ("fifo", "marking", "lru", "lfuda", "zipmoe")
CODECS = ("zstd", "fx3")
SHARES = tuple(n / 10 for n in range(1, 11))
SHOWN_SHARES = (0.2, 0.5, 0.8)
PLANNING = "zipmoe + planning"


def budget_of(trace: RoutingTrace, expert: ExpertOnDevice, share: float) -> dict[str, Any]:
    """All policies with the whole budget in one pool, and the plan.

    Returns:
        Per pool its slots and results by policy, and the same for the plan: seconds per token, hit rates by pool.
    """
    warm_up = warm_up_steps(trace, WARM_UP)

    def replayed(plan: PoolPlan, policy: str) -> dict[str, Any]:
        report = replay(
            trace,
            plan,
            expert.costs,
            expert.bytes,
            CacheSettings(policy, HALF_LIFE_STEPS),
            warm_up_steps=warm_up,
        ).to_json()
        kept = ("seconds_per_token", "read_bytes_per_token", "hit_rate", "hit_rates")
        return {key: report[key] for key in kept}

    pools = (ExpertState.FULL, ExpertState.COMPRESSED)
    single = {pool.letter: even_plan(trace, expert, share, [pool]) for pool in pools}
    settings = CacheSettings("zipmoe", HALF_LIFE_STEPS)
    plan = planned_and_replayed(trace, expert, share, learn_steps=warm_up, settings=settings)
    return {
        "pools": {
            letter: {
                "slots": one.total_slots,
                "policies": {policy: replayed(one, policy) for policy in POLICIES},
            }
            for letter, one in single.items()
        },
        "planned": {"plan": plan.describe(), **replayed(plan, "zipmoe")},
    }


def tables_of(results: Sequence[dict[str, Any]], shown: Sequence[float]) -> str:
    """Milliseconds per token (hit rate in percent) of each policy, one table for each device, codec and pool (F
    with the first codec only: what is in F is the same with all).
    """
    text = ""
    kinds = dict.fromkeys((result["device"], result["codec"]) for result in results)
    for device, codec in kinds:
        for pool in ("F", "C") if codec == CODECS[0] else ("C",):
            rows = []
            for result in results:
                if (result["device"], result["codec"]) != (device, codec) or result["share"] not in shown:
                    continue
                single = result["pools"][pool]
                cells = [_cell(single["policies"][policy]) for policy in POLICIES]
                planned = result["planned"]
                rows.append(
                    [
                        result["model"],
                        f"{result['share']:.0%}",
                        single["slots"],
                        *cells,
                        f"{_cell(planned)}: {planned['plan']}",
                    ]
                )
            header = ["model", "memory", "slots", "FIFO", "marking", "LRU", "LFUDA", "zipmoe", PLANNING]
            text += f"\n**{device}, {codec}, policies with everything in {pool}.** ms per token (hit rate, %).\n\n"
            text += table(header, rows)
    return text


def _cell(result: dict[str, Any]) -> str:
    return f"{result['seconds_per_token'] * 1e3:.1f} ({result['hit_rate'] * 100:.0f})"


def plot(path: Path, results: Sequence[dict[str, Any]]) -> None:
    """Time per token over memory on the first device with the first codec, a panel per model."""
    first = (results[0]["device"], results[0]["codec"])
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for result in results:
        if (result["device"], result["codec"]) != first:
            continue
        panel = panels.setdefault(result["model"], {})
        lines = {f"{policy}, F": result["pools"]["F"]["policies"][policy] for policy in ("fifo", "lru", "zipmoe")}
        for name, value in {**lines, PLANNING: result["planned"]}.items():
            panel.setdefault(name, []).append((result["share"] * 100, value["seconds_per_token"] * 1e3))
    save_lines(path, panels, x_label="memory, % of BF16", y_label="ms per token")


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_replay_options(parser)
    parser.add_argument("--codecs", nargs="+", default=CODECS)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="memory as shares of the BF16 bytes")
    parser.add_argument("--plot", type=Path, help="draw time over memory into this file (needs matplotlib)")
    add_result_options(parser, "memory_budgets")
    arguments = parser.parse_args()
    traces, devices = chosen_traces(arguments), chosen_devices(arguments)
    by_case = earlier_results(arguments.json, "results")
    constants = earlier_results(arguments.json, "devices") | device_constants(devices)
    with task_progress("budgets", len(traces) * len(devices) * len(arguments.codecs) * len(arguments.shares)) as tasks:
        for device in devices:
            for codec in arguments.codecs:
                for trace in traces:
                    expert = packed_expert(trace, device, codec)
                    for share in arguments.shares:
                        which = {"device": device.name, "codec": codec, "model": trace.header.model, "share": share}
                        key = ", ".join(str(part) for part in which.values())
                        by_case[key] = {**which, **budget_of(trace, expert, share)}
                        tasks.finished(f"{trace.header.model} {share:.0%}")
    results = list(by_case.values())
    shown = [share for share in arguments.shares if share in SHOWN_SHARES] or arguments.shares
    tables = tables_of(results, shown)
    print(tables)
    report = replay_report(arguments, constants, by_case)
    write_results(arguments.json, arguments.document, "Memory budgets (tables 5 and 6)", report, tables)
    if arguments.plot:
        plot(arguments.plot, results)


if __name__ == "__main__":
    main()
