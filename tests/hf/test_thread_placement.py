"""Threads of a loaded model: kept on the CPUs that were asked for, asleep between products, named in the mode line."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import zipmoe
from zipmoe.errors import InvalidArgumentError
from zipmoe.openmp_waiting import spinning_note

CPU = min(os.sched_getaffinity(0))
SPIN = "torch's threads spin between products (import zipmoe before torch, or set OMP_WAIT_POLICY=passive)"
LOAD = """
import json, os, sys
import zipmoe, torch
torch.randn(512, 512) @ torch.randn(512, 512)  # starts torch's threads
settings = zipmoe.ZipMoEConfig(memory="8GB", cpus=json.loads(sys.argv[2]))
model = zipmoe.load(sys.argv[1], quantization_config=settings)
model.generate(torch.tensor([[5, 9]]), max_new_tokens=2, pad_token_id=0)
tasks = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
print(json.dumps([model.zipmoe_mode_line(), tasks, torch.get_num_threads()]))
"""


def load_elsewhere(folder: object, cpus: object) -> tuple[str, list[list[int]], int]:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), json.dumps(cpus)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    line, tasks, threads = json.loads(done.stdout.splitlines()[-1])
    return line, tasks, threads


def test_all_threads_stay_on_the_cpus_that_were_asked_for(mixtral):
    line, tasks, threads = load_elsewhere(mixtral.folder, str(CPU))
    assert f"; all threads on CPU {CPU}" in line
    assert len(tasks) > 3  # of the reader at least
    assert all(task == [CPU] for task in tasks), tasks
    assert threads == 1
    assert "decoding with 1 thread;" in line


def test_without_cpus_nothing_changes(mixtral):
    line, tasks, _ = load_elsewhere(mixtral.folder, None)
    assert "all threads on" not in line
    assert all(task == sorted(os.sched_getaffinity(0)) for task in tasks), tasks
    assert "spin" not in line


def test_cpus_that_are_not_there_are_refused_before_anything_is_read(mixtral):
    settings = zipmoe.ZipMoEConfig(memory="8GB", cpus=[5000])
    with pytest.raises(InvalidArgumentError, match="CPU 5000 is not among those that this process may use"):
        zipmoe.load(mixtral.folder, quantization_config=settings)
    with pytest.raises(InvalidArgumentError, match="cpus 'all' is not a list"):
        zipmoe.ZipMoEConfig(cpus="all")


@pytest.mark.parametrize(
    ("imports", "before", "after"),
    [
        ("import zipmoe, torch", None, "passive"),
        ("import torch, zipmoe", None, None),
        ("import zipmoe, torch", "active", "active"),
        ("import torch, zipmoe", "active", "active"),
        ("import zipmoe.cli.main", None, "passive"),
    ],
)
def test_importing_zipmoe_first_lets_torchs_threads_sleep(imports: str, before: str | None, after: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if before is not None:
        environment["OMP_WAIT_POLICY"] = before
    script = (
        f"{imports}\nimport json, os\nfrom zipmoe.openmp_waiting import spinning_note\n"
        "print(json.dumps([os.environ.get('OMP_WAIT_POLICY'), spinning_note()]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == [after, "" if after else SPIN]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_whoever_says_how_threads_wait_is_not_told(name: str, mixtral, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    model = zipmoe.load(mixtral.folder, memory="8GB")
    with model.zipmoe_engine:
        assert model.zipmoe_mode_line().endswith(f"; {SPIN}")
        monkeypatch.setenv(name, "1")
        assert spinning_note() == ""
        assert "spin" not in model.zipmoe_mode_line()
