"""Worker: a packed folder with ZipMoE."""

from __future__ import annotations

import time

from zipmoe.bench.workers.worker_protocol import Job, Reporter, let_openmp_wait, run_worker, storage_read_bytes


def work(job: Job, reporter: Reporter) -> None:
    """Load within the memory of the job, generate every batch."""
    let_openmp_wait(passively=True)
    import torch
    import transformers

    import zipmoe
    from zipmoe.bench.active_bytes import always_active_bytes, mean_expert_bytes
    from zipmoe.bench.prefill_work import prefill_work
    from zipmoe.bench.workers.greedy_generation import generate

    torch.set_num_threads(job.threads)
    bytes_before, began = storage_read_bytes(), time.perf_counter()
    settings = zipmoe.ZipMoEConfig(
        memory=job.memory_bytes,
        mode=job.settings.get("mode"),
        context_tokens=job.largest_context_tokens,
        decode_threads=job.threads,
    )
    model = zipmoe.load(job.model, quantization_config=settings)
    statistics = model.zipmoe_engine.statistics
    manifest = model.zipmoe_engine.folder.manifest
    loaded_seconds, loaded_bytes = time.perf_counter() - began, storage_read_bytes() - bytes_before
    operations = prefill_work(model, manifest)
    reporter.say(
        "loaded",
        seconds=loaded_seconds,
        read_bytes=loaded_bytes,
        versions={
            "zipmoe": zipmoe.__version__,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        mode_line=model.zipmoe_mode_line(),
        prefill_work=None if operations is None else operations.to_json(),
        dense_bytes=always_active_bytes(model, manifest),
        expert_bytes=mean_expert_bytes(manifest),
    )
    for batch in job.batches:
        before = first = statistics.counters()

        def first_token() -> None:
            nonlocal first
            first = statistics.counters()

        line = generate(model, batch, job.new_tokens, first_token)
        after = statistics.counters()
        run, decode = after.since(before), after.since(first)
        reporter.say(
            "generation",
            **line,
            hits=run.hits,
            misses=run.misses + run.prefetched,  # whatever was not in memory
            decode_hits=decode.hits,
            decode_misses=decode.misses + decode.prefetched,
            decode_read_bytes=decode.read_bytes,
            prefill_read_bytes=run.read_bytes - decode.read_bytes,
            wait_seconds=run.wait_seconds,
            read_seconds=run.read_seconds,
            decode_seconds=run.decode_seconds,
        )
    model.zipmoe_engine.close()


if __name__ == "__main__":
    run_worker(work)
