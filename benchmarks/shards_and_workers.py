"""Shards K and workers L (ZipMoE paper, sensitivity to K and L): simulated, and measured with the engine.

Simulated: the makespan of one layer all of whose experts are misses, and the time per token of the planner's choice for
each (K, L), replayed. Measured: one checkpoint packed with each K, its experts requested through the engine in the
order of a skewed random routing and decoded, with each number of decoding threads; all combinations in turn in every
round.

Run: python benchmarks/shards_and_workers.py --traces DIR [--model CHECKPOINT --work DIR]

Without --model only the simulated part is made and the measured one of an earlier run is kept; with --no-simulation it
is the other way round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from line_plot import save_lines
from replayed_models import (
    HALF_LIFE_STEPS,
    WARM_UP,
    add_replay_options,
    chosen_devices,
    chosen_traces,
    device_constants,
    packed_expert,
    task_progress,
)
from result_document import add_result_options, earlier_results, table, this_machine, write_results

from zipmoe.codecs.registry import settings_from_options
from zipmoe.engine.budget import PROCESS, MemoryBudget
from zipmoe.engine.engine import Engine
from zipmoe.engine.memory_plan import MemoryPlan
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.layer_costs import ScheduledMakespan
from zipmoe.planning.partition import ExpertState
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.experiment import planned, warm_up_steps
from zipmoe.simulation.replay import CacheSettings, replay
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder

SHARDS, WORKERS = (1, 2, 4, 8, 16), (1, 2, 4, 6, 8)
MEASURED_SHARDS, MEASURED_THREADS = (1, 2, 4, 8), (1, 2)
TOP_K = 4
POOL_SHARE = 0.25


def simulated(trace: RoutingTrace, device: DeviceProfile, codec: str, share: float) -> list[dict[str, Any]]:
    """Every (K, L): makespan of a layer of misses, and the planner's choice replayed."""
    warm_up = warm_up_steps(trace, WARM_UP)
    top_k = trace.header.top_k
    rows = []
    for workers in WORKERS:
        for shards in SHARDS:
            expert = packed_expert(trace, replace(device, workers=workers), codec, shards)
            misses = np.full(top_k, ExpertState.MISS, dtype=np.uint8)
            plan = planned(trace, expert, share, learn_steps=warm_up, half_life_steps=HALF_LIFE_STEPS)
            settings = CacheSettings("zipmoe", HALF_LIFE_STEPS)
            report = replay(trace, plan, expert.costs, expert.bytes, settings, warm_up_steps=warm_up)
            rows.append(
                {
                    "shards": shards,
                    "workers": workers,
                    "makespan_of_misses_seconds": ScheduledMakespan(expert.costs, top_k)(misses),
                    "plan": plan.describe(),
                    "seconds_per_token": report.seconds_per_token,
                    "worker_utilisation": report.worker_utilisation,
                }
            )
    return rows


def routing(experts: int, layers: int, requests: int, seed: int = 0) -> list[tuple[int, list[int]]]:
    """Layers in turn, each with TOP_K distinct experts of a skewed popularity: [(layer, ids)]."""
    random = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, experts + 1) ** 0.5
    orders = [random.permutation(experts) for _ in range(layers)]
    weights = popularity / popularity.sum()
    return [
        (number % layers, [int(e) for e in orders[number % layers][random.choice(experts, TOP_K, False, weights)]])
        for number in range(requests)
    ]


def open_engine(folder: PackedFolder, threads: int, share: float) -> Engine:
    """An engine whose pool holds a share of the experts."""
    plan = MemoryPlan.of(folder.manifest, threads, separable=True)
    slots = [max(one.floor_slots, int(one.records * share)) for one in plan.size_classes]
    fixed = {PROCESS: 500_000_000, "workspace": 0}
    rest = plan.dense_reservation_bytes + plan.scratch_reservation_bytes + plan.pool_reservation_bytes(slots)
    return Engine(folder, MemoryBudget(sum(fixed.values()) + rest, fixed), decode_threads=threads)


def one_pass(engine: Engine, requests: Sequence[tuple[int, list[int]]]) -> dict[str, Any]:
    """Seconds per layer to make every requested expert's matrices BF16, and what was read for it."""
    groups = [engine.group(group.path) for group in engine.folder.manifest.expert_groups]
    before = engine.statistics.counters()
    began = time.perf_counter()
    for layer, ids in requests:
        group = groups[layer]
        with engine.request(group, ids) as request:
            for expert in request:
                for name in group.parameters:
                    engine.matrix(group, expert, name)
    seconds = time.perf_counter() - began
    counters = engine.statistics.counters().since(before)
    return {
        "layer_seconds": seconds / len(requests),
        "hit_rate": counters.hit_rate,
        "read_bytes_per_layer": counters.read_bytes / len(requests),
    }


def measured(folders: dict[int, PackedFolder], threads: Sequence[int], rounds: int, requests: int) -> dict[str, Any]:
    """All (K, threads) in turn in every round; the first round fills the pools and is not kept."""
    manifest = next(iter(folders.values())).manifest
    groups = manifest.expert_groups
    wanted = routing(len(groups[0].records), len(groups), requests)
    results: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack, task_progress("engine", (rounds + 1) * len(folders) * len(threads)) as tasks:
        engines = {
            (shards, count): stack.enter_context(open_engine(folder, count, POOL_SHARE))
            for shards, folder in folders.items()
            for count in threads
        }
        for number in range(rounds + 1):
            for (shards, count), engine in engines.items():
                found = one_pass(engine, wanted)
                if number:
                    results.setdefault(_label(shards, count), []).append(found)
                tasks.finished(_label(shards, count))
    return results


def _label(shards: int, threads: int) -> str:
    return f"K={shards}, {threads} thread{'s' if threads > 1 else ''}"


def tables_of(results: Sequence[dict[str, Any]], measurements: dict[str, Any]) -> str:
    """Simulated and measured times."""
    text = ""
    for result in results:
        for key, name in (("makespan_of_misses_seconds", "one layer, all misses"), ("seconds_per_token", "per token")):
            by_case = {(row["shards"], row["workers"]): row[key] * 1e3 for row in result["rows"]}
            rows = [[f"L = {w}", *(f"{by_case[k, w]:.2f}" for k in SHARDS)] for w in WORKERS]
            where = f"{result['device']}, {result['codec']}, {result['model']}, memory {result['share']:.0%}"
            text += f"\n**Simulated: {where}: ms {name}.**\n\n" + table(["", *(f"K = {k}" for k in SHARDS)], rows)
    if measurements:
        rows = []
        threads = sorted({name.split(", ")[1] for name in measurements})
        for shards in dict.fromkeys(name.split(", ")[0] for name in measurements):
            cells = []
            for count in threads:
                rounds = measurements[f"{shards}, {count}"]
                median = statistics.median(one["layer_seconds"] for one in rounds)
                ratio = statistics.median(
                    own["layer_seconds"] / reference["layer_seconds"]
                    for own, reference in zip(rounds, measurements[f"K=1, {count}"], strict=True)
                )
                cells.append(f"{median * 1e3:.2f} ({ratio:.3f})")
            rows.append([shards, *cells, f"{rounds[0]['hit_rate']:.1%}"])
        text += "\n**Measured: ms for a layer of four experts (over K = 1 within a round).**\n\n"
        text += table(["", *(f"decoding: {count}" for count in threads), "hit rate"], rows)
    return text


def main() -> None:
    """Simulate, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_replay_options(parser)
    parser.set_defaults(only=["olmoe_299.jsonl.gz", "paper_qwen.npz"])
    parser.add_argument("--no-simulation", action="store_true", help="keep the simulated part of an earlier run")
    parser.add_argument("--codec", default="zstd")
    parser.add_argument("--share", type=float, default=0.25, help="memory as a share of the BF16 bytes (simulated)")
    parser.add_argument("--model", type=Path, help="checkpoint for the measured part")
    parser.add_argument("--work", type=Path, metavar="DIR", help="its packed folders are made and kept in here")
    parser.add_argument("--rounds", type=int, default=7, help="of the measured part")
    parser.add_argument("--requests", type=int, default=60, help="layers per round of the measured part")
    parser.add_argument("--plot", type=Path, help="draw simulated time over K into this file (needs matplotlib)")
    add_result_options(parser, "shards_and_workers")
    arguments = parser.parse_args()
    if (arguments.model is None) != (arguments.work is None):
        parser.error("--model and --work belong together")
    if arguments.no_simulation:
        results, constants = (earlier_results(arguments.json, key) for key in ("results", "devices"))
    else:
        devices, traces = chosen_devices(arguments), chosen_traces(arguments)
        constants = device_constants(devices)
        results = []
        with task_progress("simulation", len(traces) * len(devices)) as tasks:
            for device in devices:
                for trace in traces:
                    which = {"device": device.name, "codec": arguments.codec, "model": trace.header.model}
                    rows = simulated(trace, device, arguments.codec, arguments.share)
                    results.append({**which, "share": arguments.share, "rows": rows})
                    tasks.finished(trace.header.model)
    measurements = earlier_results(arguments.json, "measured")
    if arguments.model is not None:
        folders = {}
        for shards in MEASURED_SHARDS:
            path = arguments.work / f"{arguments.codec}-{shards}-shards"
            if not path.exists():
                pack(arguments.model, path, settings_from_options(arguments.codec, None, shards))
            folders[shards] = PackedFolder.open(path)
        measurements = measured(folders, MEASURED_THREADS, arguments.rounds, arguments.requests)
    tables = tables_of(results, measurements)
    print(tables)
    report = {
        "machine": this_machine(),
        "devices": constants,
        "results": results,
        "measured": measurements,
    }
    write_results(arguments.json, arguments.document, "Shards K and workers L", report, tables)
    if arguments.plot:
        panels = {
            f"{result['device']}, {result['model']}": {
                f"L = {workers}": [
                    (row["shards"], row["seconds_per_token"] * 1e3)
                    for row in result["rows"]
                    if row["workers"] == workers
                ]
                for workers in WORKERS
            }
            for result in results
        }
        save_lines(arguments.plot, panels, x_label="shards K", y_label="ms per token")


if __name__ == "__main__":
    main()
