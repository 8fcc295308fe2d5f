"""Worker: the original checkpoint with DeepSpeed's ZeRO-Inference: weights in files (ZeRO stage 3, parameters on NVMe).

Settings: ``offload_folder``, for DeepSpeed's files. Buffers are as small as the largest parameter allows, and experts
are fetched one by one where Transformers has modules of single experts (up to version 4; with version 5 a layer's
experts are two parameters, read whole). DeepSpeed compiles its asynchronous I/O when it is first used, which needs a
compiler and the headers of libaio.
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from zipmoe.bench.workers.worker_protocol import Job, Reporter, let_openmp_wait, run_worker, storage_read_bytes

_BUFFERS = 2
"""Parameters that are read together: a linear layer has a weight and a bias."""


def settings(offload_folder: str, largest_parameter: int) -> dict[str, Any]:
    """DeepSpeed's configuration; ``largest_parameter``: weights of the largest one."""
    return {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {
                "device": "nvme",
                "nvme_path": offload_folder,
                "pin_memory": False,
                "buffer_count": _BUFFERS,
                "buffer_size": largest_parameter,
            },
            "stage3_prefetch_bucket_size": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_param_persistence_threshold": 0,
            "leaf_module": {
                "classes": [],
                "names": [],
                "name_suffixes": [],
            },  # else experts are read together
        },
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "single_submit": False, "overlap_events": True},
    }


def work(job: Job, reporter: Reporter) -> None:
    """Load and generate."""
    let_openmp_wait(passively=False)
    os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("MASTER_PORT", "29511")
    import torch
    import transformers

    from zipmoe.bench.workers.greedy_generation import generate

    deepspeed: Any = importlib.import_module("deepspeed")
    torch.set_num_threads(job.threads)
    bytes_before, began = storage_read_bytes(), time.perf_counter()
    config = transformers.AutoConfig.from_pretrained(job.model)
    model_class = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        largest = max(parameter.numel() for parameter in model_class(config).parameters())
    options = settings(job.settings["offload_folder"], largest)
    deepspeed.init_distributed(dist_backend="gloo")
    keep = importlib.import_module("transformers.integrations").HfDeepSpeedConfig(options)  # as long as it loads
    model = model_class.from_pretrained(job.model, dtype=torch.bfloat16).eval()
    engine = deepspeed.initialize(model=model, config=options)[0]
    del keep
    engine.module.eval()
    reporter.say(
        "loaded",
        seconds=time.perf_counter() - began,
        read_bytes=storage_read_bytes() - bytes_before,
        versions={
            "deepspeed": deepspeed.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    )
    for batch in job.batches:
        reporter.say("generation", **generate(engine.module, batch, job.new_tokens))


if __name__ == "__main__":
    run_worker(work)
    os._exit(0)  # its I/O threads do not end by themselves
