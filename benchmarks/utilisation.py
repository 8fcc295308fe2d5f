"""How busy disk, workers and execution are, and what their overlap saves, by simulation.

Shares of the time of the sparse layers during which each resource works, for the cache-affinity schedule and for the
FIFO one: with memory for whole BF16 experts only (F), for compressed ones only (C), and with the planner's choice,
confirmed by replay. "Serial" is what the same work would take if nothing ran beside anything else but the workers
beside each other.

Run: python benchmarks/utilisation.py --traces DIR
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

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

from zipmoe.planning.partition import ExpertState
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.experiment import even_plan, planned_and_replayed, warm_up_steps
from zipmoe.simulation.expert_shape import ExpertOnDevice
from zipmoe.simulation.replay import CacheSettings, replay

ORDERS = ("fifo", "cache_affinity")
SHARES = (0.25, 0.5)


def utilisation_of(trace: RoutingTrace, expert: ExpertOnDevice, share: float) -> list[dict[str, Any]]:
    """Busy shares under three partitions and both schedules."""
    warm_up = warm_up_steps(trace, WARM_UP)
    settings = CacheSettings("zipmoe", HALF_LIFE_STEPS)
    plans = {
        "all F": even_plan(trace, expert, share, [ExpertState.FULL]),
        "all C": even_plan(trace, expert, share, [ExpertState.COMPRESSED]),
        "planned": planned_and_replayed(trace, expert, share, learn_steps=warm_up, settings=settings),
    }
    rows = []
    for name, plan in plans.items():
        for order in ORDERS:
            report = replay(trace, plan, expert.costs, expert.bytes, settings, warm_up_steps=warm_up, order=order)
            busy = {
                "disk": report.disk_utilisation,
                "workers": report.worker_utilisation,
                "execution": report.execution_utilisation,
            }
            rows.append(
                {
                    "partition": name,
                    "plan": plan.describe(),
                    "order": order,
                    "seconds_per_token": report.seconds_per_token,
                    "busy": busy,
                    "serial_over_overlapped": sum(busy.values()),
                }
            )
    return rows


def tables_of(results: Sequence[dict[str, Any]]) -> str:
    """Busy shares with the cache-affinity schedule, and its time relative to FIFO's."""
    text = ""
    for device, codec in dict.fromkeys((result["device"], result["codec"]) for result in results):
        rows = []
        for result in results:
            if (result["device"], result["codec"]) != (device, codec):
                continue
            by_order = {(row["partition"], row["order"]): row for row in result["rows"]}
            for partition in dict.fromkeys(row["partition"] for row in result["rows"]):
                row, fifo = by_order[partition, "cache_affinity"], by_order[partition, "fifo"]
                rows.append(
                    [
                        result["model"],
                        f"{result['share']:.0%}",
                        f"{partition} ({row['plan']})",
                        f"{row['seconds_per_token'] * 1e3:.1f}",
                        *(f"{share:.0%}" for share in row["busy"].values()),
                        f"{row['serial_over_overlapped']:.2f}",
                        f"{row['seconds_per_token'] / fifo['seconds_per_token']:.3f}",
                    ]
                )
        text += f"\n**{device}, {codec}.**\n\n"
        names = ("disk", "workers", "execution", "serial / overlapped", "affinity / FIFO")
        text += table(["model", "memory", "partition", "ms per token", *names], rows)
    return text


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_replay_options(parser)
    parser.add_argument("--codecs", nargs="+", default=["zstd"])
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="memory as shares of the BF16 bytes")
    add_result_options(parser, "utilisation")
    arguments = parser.parse_args()
    traces, devices = chosen_traces(arguments), chosen_devices(arguments)
    results = []
    total = len(traces) * len(devices) * len(arguments.codecs) * len(arguments.shares)
    with task_progress("utilisation", total) as tasks:
        for device in devices:
            for codec in arguments.codecs:
                for trace in traces:
                    expert = packed_expert(trace, device, codec)
                    for share in arguments.shares:
                        which = {"device": device.name, "codec": codec, "model": trace.header.model, "share": share}
                        results.append({**which, "rows": utilisation_of(trace, expert, share)})
                        tasks.finished(f"{codec} {trace.header.model}")
    tables = tables_of(results)
    print(tables)
    report = replay_report(arguments, device_constants(devices), results)
    write_results(arguments.json, arguments.document, "Utilisation", report, tables)


if __name__ == "__main__":
    main()
