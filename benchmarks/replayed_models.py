"""The published routing traces and the simulated machines that several experiments replay."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from zipmoe.cli.progress import FractionBar, fraction_progress
from zipmoe.planning.device import DeviceProfile, host_fingerprint
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.device_choice import THIS_MACHINE, load_device, this_machine_profile_path
from zipmoe.simulation.expert_shape import ExpertOnDevice, ExpertShape
from zipmoe.simulation.trace_choice import open_trace

TRACES = ("olmoe_299.jsonl.gz", "kimi_linear_300.jsonl.gz", "paper_qwen.npz", "paper_deepseek.npz", "paper_switch.npz")
WARM_UP = 0.5
"""Share of a trace that fills the pools and is all that the planner sees."""
HALF_LIFE_STEPS = 16.0


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    """``--traces``, ``--only``, ``--prompts`` and ``--device``."""
    parser.add_argument("--traces", type=Path, default=Path(__file__).parents[2] / "shared" / "traces", metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="replay only these traces of the folder")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of the traces that hold counts per prompt")
    parser.add_argument(
        "--device",
        action="append",
        help="jetson-orin, this, or a device profile; may be repeated "
        "[default: jetson-orin, and this machine where its profile is kept]",
    )


def chosen_traces(arguments: argparse.Namespace) -> list[RoutingTrace]:
    """The traces that are there.

    Raises:
        SystemExit: there is none.
    """
    names = arguments.only or TRACES
    files = [arguments.traces / name for name in names if (arguments.traces / name).is_file()]
    if not files:
        raise SystemExit(f"no routing trace in {arguments.traces} (see --traces)")
    return [open_trace(path, prompts=arguments.prompts) for path in files]


def chosen_devices(arguments: argparse.Namespace) -> list[DeviceProfile]:
    """The machines to simulate; a profile of this one is called so whatever its name."""
    names = arguments.device or ["jetson-orin", *([THIS_MACHINE] if this_machine_profile_path() else [])]
    here = host_fingerprint()
    devices = [load_device(name) for name in names]
    return [replace(device, name="this machine") if device.host == here else device for device in devices]


def packed_expert(trace: RoutingTrace, device: DeviceProfile, codec: str, shards: int = 4) -> ExpertOnDevice:
    """An expert of the trace's model on a machine."""
    return ExpertOnDevice.of(ExpertShape.of_model(trace.header.model), device, codec, shards)


def device_constants(devices: list[DeviceProfile]) -> dict[str, Any]:
    """The machines as JSON: a simulation is as good as its constants."""
    constants = {}
    with tempfile.TemporaryDirectory() as folder:
        for device in devices:
            path = Path(folder) / "device.json"
            device.save(path)
            value = json.loads(path.read_text())
            value["execute_seconds_by_tokens"] = value["execute_seconds_by_tokens"][:1]
            constants[device.name] = value
    return constants


def replay_report(arguments: argparse.Namespace, constants: dict[str, Any], results: Any) -> dict[str, Any]:
    """The JSON of a simulated experiment: what it was told, the machines (``device_constants``) and what came out."""
    return {"warm_up": WARM_UP, "prompts": arguments.prompts, "devices": constants, "results": results}


class Tasks:
    """Counts finished parts of a known number of parts."""

    def __init__(self, bar: FractionBar, total: int) -> None:
        self._bar, self._total, self._done = bar, total, 0

    def finished(self, name: str) -> None:
        """One more part is done."""
        self._done += 1
        self._bar.update(name, self._done / self._total)


@contextmanager
def task_progress(name: str, total: int) -> Iterator[Tasks]:
    """A progress bar over parts, on standard error if that is a terminal."""
    with fraction_progress(name) as bar:
        yield Tasks(bar, total)
