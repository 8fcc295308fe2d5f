"""Worker: the original checkpoint with Transformers and Accelerate, what does not fit offloaded to disk.

Settings: ``offload_folder``, and ``cpu_bytes`` for weights that stay in memory (the rest of the limit is page cache for
the offloaded ones, the layer at work, and the interpreter).
"""

from __future__ import annotations

from zipmoe.bench.workers.plain_transformers import measure
from zipmoe.bench.workers.worker_protocol import Job, Reporter, let_openmp_wait, run_worker


def work(job: Job, reporter: Reporter) -> None:
    """Load and generate."""
    let_openmp_wait(passively=False)
    import accelerate

    loading = {
        "device_map": "auto",
        "offload_folder": job.settings["offload_folder"],
        "max_memory": {"cpu": job.settings["cpu_bytes"]},
    }
    measure(job, reporter, loading, {"accelerate": accelerate.__version__})


if __name__ == "__main__":
    run_worker(work)
