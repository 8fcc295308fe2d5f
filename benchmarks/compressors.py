"""Compressors compared (ZipMoE paper, table 7): size, decompression rate, and what both mean for the time of a token.

Sizes and rates are those of the device: measured by ``zipmoe profile`` on this machine, or a preset's. Times per token
are simulated: the planner's choice, confirmed by replay on the first half of each trace, replayed on the second half.

Run: python benchmarks/compressors.py --traces DIR
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

from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.experiment import planned_and_replayed, warm_up_steps
from zipmoe.simulation.expert_shape import ExpertOnDevice
from zipmoe.simulation.replay import CacheSettings, replay

CODECS = ("fx3", "zstd", "zstd huf", "lz4hc", "lz4")
SHARES = (0.25, 0.5)


def ratio_of(device: DeviceProfile, codec: str) -> float:
    """Packed bytes over BF16 bytes: one byte per weight for sign and mantissa, rho for the exponent, of two."""
    return (1 + device.exponent_ratio[codec]) / 2


def bfloat16_rate(device: DeviceProfile, codec: str) -> float | None:
    """BF16 bytes per second that all decompression workers produce; None: computed from the packed form."""
    if codec in device.decompress_bytes_per_second:
        return 2 * device.decompress_bytes_per_second[codec] * device.workers
    return device.decode_bytes_per_second.get(codec)


def token_of(trace: RoutingTrace, expert: ExpertOnDevice, share: float) -> dict[str, Any]:
    """The confirmed plan for a share of memory, and its replayed second half."""
    warm_up = warm_up_steps(trace, WARM_UP)
    settings = CacheSettings("zipmoe", HALF_LIFE_STEPS)
    plan = planned_and_replayed(trace, expert, share, learn_steps=warm_up, settings=settings)
    report = replay(trace, plan, expert.costs, expert.bytes, settings, warm_up_steps=warm_up)
    return {
        "plan": plan.describe(),
        "seconds_per_token": report.seconds_per_token,
        "read_bytes_per_token": report.read_bytes_per_token,
        "disk_utilisation": report.disk_utilisation,
        "worker_utilisation": report.worker_utilisation,
    }


def tables_of(results: Sequence[dict[str, Any]]) -> str:
    """Sizes, rates and times of each device."""
    text = ""
    for device in dict.fromkeys(result["device"] for result in results):
        own = [result for result in results if result["device"] == device]
        by_case = {(result["codec"], result["model"], result["share"]): result for result in own}
        codecs = list(dict.fromkeys(result["codec"] for result in own))
        constants = []
        for codec in codecs:
            first = next(result for result in own if result["codec"] == codec)
            rate = first["bfloat16_bytes_per_second"]
            constants.append([codec, f"{first['ratio']:.4f}", f"{rate / 1e9:.1f}" if rate else "none needed"])
        text += f"\n**{device}.**\n\n"
        text += table(["codec", "packed / BF16", "BF16 GB/s decoded by all workers"], constants)
        rows = []
        for model, share in dict.fromkeys((result["model"], result["share"]) for result in own):
            found = [by_case[codec, model, share] for codec in codecs]
            cells = [f"{result['seconds_per_token'] * 1e3:.1f} ({result['plan']})" for result in found]
            rows.append([model, f"{share:.0%}", *cells])
        text += "\nms per token (plan):\n\n" + table(["model", "memory", *codecs], rows)
    return text


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_replay_options(parser)
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="memory as shares of the BF16 bytes")
    add_result_options(parser, "compressors")
    arguments = parser.parse_args()
    traces, devices = chosen_traces(arguments), chosen_devices(arguments)
    known = [(device, codec) for device in devices for codec in CODECS if codec in device.exponent_ratio]
    results = []
    with task_progress("compressors", len(traces) * len(known) * len(arguments.shares)) as tasks:
        for device, codec in known:
            for trace in traces:
                expert = packed_expert(trace, device, codec)
                for share in arguments.shares:
                    results.append(
                        {
                            "device": device.name,
                            "codec": codec,
                            "ratio": ratio_of(device, codec),
                            "bfloat16_bytes_per_second": bfloat16_rate(device, codec),
                            "model": trace.header.model,
                            "share": share,
                            **token_of(trace, expert, share),
                        }
                    )
                    tasks.finished(f"{codec} {trace.header.model}")
    tables = tables_of(results)
    print(tables)
    report = replay_report(arguments, device_constants(devices), results)
    write_results(arguments.json, arguments.document, "Compressors (table 7)", report, tables)


if __name__ == "__main__":
    main()
