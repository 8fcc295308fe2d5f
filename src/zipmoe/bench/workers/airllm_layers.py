"""Worker: the original checkpoint with AirLLM, which loads layer after layer for every token.

Settings: ``offload_folder``, for the checkpoint that AirLLM splits into one file per layer; that is part of loading.
AirLLM 4 needs modules of single experts, which Transformers has up to version 4: its interpreter must have that.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time

from zipmoe.bench.workers.worker_protocol import Job, Reporter, let_openmp_wait, run_worker, storage_read_bytes


def work(job: Job, reporter: Reporter) -> None:
    """Split, and generate."""
    let_openmp_wait(passively=False)
    import torch
    import transformers

    from zipmoe.bench.workers.greedy_generation import generate

    torch.set_num_threads(job.threads)
    bytes_before, began = storage_read_bytes(), time.perf_counter()
    layered = importlib.import_module("airllm").AutoModel.from_pretrained(
        job.model, device="cpu", layer_shards_saving_path=job.settings["offload_folder"]
    )
    reporter.say(
        "loaded",
        seconds=time.perf_counter() - began,
        read_bytes=storage_read_bytes() - bytes_before,
        versions={
            "airllm": importlib.metadata.version("airllm"),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    )
    for batch in job.batches:
        reporter.say("generation", **generate(layered.model, batch, job.new_tokens))


if __name__ == "__main__":
    run_worker(work)
    os._exit(0)  # its thread that loads ahead would keep the process
