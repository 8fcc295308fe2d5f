"""Worker: the original checkpoint with plain Transformers, all weights in memory."""

from __future__ import annotations

import time
from typing import Any

from zipmoe.bench.workers.worker_protocol import Job, Reporter, let_openmp_wait, run_worker, storage_read_bytes


def work(job: Job, reporter: Reporter) -> None:
    """Load and generate."""
    let_openmp_wait(passively=False)
    measure(job, reporter, {}, {})


def measure(job: Job, reporter: Reporter, loading: dict[str, Any], versions: dict[str, str]) -> None:
    """Load with these further arguments of ``from_pretrained``, generate every batch."""
    import torch
    import transformers

    from zipmoe.bench.workers.greedy_generation import generate

    torch.set_num_threads(job.threads)
    bytes_before, began = storage_read_bytes(), time.perf_counter()
    config = transformers.AutoConfig.from_pretrained(job.model)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(job.model, dtype=torch.bfloat16, **loading).eval()
    places = getattr(model, "hf_device_map", None) or {}
    reporter.say(
        "loaded",
        seconds=time.perf_counter() - began,
        read_bytes=storage_read_bytes() - bytes_before,
        versions={"torch": str(torch.__version__), "transformers": transformers.__version__, **versions},
        modules_by_place={
            str(place): sum(other == place for other in places.values()) for place in dict.fromkeys(places.values())
        },
    )
    for batch in job.batches:
        reporter.say("generation", **generate(model, batch, job.new_tokens))


if __name__ == "__main__":
    run_worker(work)
