"""Workers that run under interpreters without ZipMoE: the launcher, and AirLLM's worker with a stand-in for AirLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from zipmoe.bench.measurement import WorkerOutput, read_output
from zipmoe.bench.workers import without_zipmoe
from zipmoe.bench.workers.deepspeed_offload import settings
from zipmoe.bench.workers.worker_protocol import Job

LAUNCHER = Path(without_zipmoe.__file__)
AIRLLM = """
import sys
from types import SimpleNamespace
from transformers import Qwen2MoeForCausalLM
import torch

assert not hasattr(sys.modules["zipmoe"], "__version__"), "ZipMoE itself was imported"


class AutoModel:
    @staticmethod
    def from_pretrained(path, device, layer_shards_saving_path):
        assert device == "cpu"
        print("talk of a library")
        open(layer_shards_saving_path + "/layer", "w").close()
        return SimpleNamespace(model=Qwen2MoeForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval())
"""


def _run(job: Job, folder: Path) -> tuple[int, WorkerOutput]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, str(LAUNCHER), "airllm_layers"]
    done = subprocess.run(
        command, input=job.to_json(), capture_output=True, text=True, env=environment, cwd=folder, check=False
    )
    return done.returncode, read_output(done.stdout)


def _job(model: Path, folder: Path) -> Job:
    offload: dict[str, Any] = {"offload_folder": str(folder)}
    return Job(str(model), (((1, 2, 3),),), 3, 1, 10**9, offload)


def test_airllm_under_an_interpreter_without_zipmoe(tiny_source: Path, tmp_path: Path) -> None:
    (tmp_path / "airllm.py").write_text(AIRLLM)
    information = tmp_path / "airllm-4.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: airllm\nVersion: 4.0\n")
    code, output = _run(_job(tiny_source, tmp_path), tmp_path)
    assert (code, output.done, output.failure) == (0, True, None)
    assert output.loaded is not None
    assert output.loaded["versions"]["airllm"] == "4.0"
    (found,) = output.generations
    assert (found.batch, len(found.tokens[0])) == (1, 3)
    assert (tmp_path / "layer").exists()


def test_a_missing_engine_is_said(tiny_source: Path, tmp_path: Path) -> None:
    code, output = _run(_job(tiny_source, tmp_path), tmp_path)
    assert code == 1
    assert output.failure == "ModuleNotFoundError: No module named 'airllm'"


def test_deepspeed_keeps_parameters_in_files_and_its_buffers_small() -> None:
    zero = json.loads(json.dumps(settings("folder", 1000)))["zero_optimization"]
    assert zero["stage"] == 3
    assert (zero["offload_param"]["device"], zero["offload_param"]["nvme_path"]) == ("nvme", "folder")
    assert zero["offload_param"]["buffer_size"] == 1000
    assert zero["stage3_max_live_parameters"] == 0
    assert zero["leaf_module"]["classes"] == []
