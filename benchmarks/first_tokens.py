"""Time to first token, what is read for it and how busy the disk is, peak memory within a limit that includes page
cache: of one source tree, or of several in turn (before and after a change).

    python benchmarks/first_tokens.py PACKED --tools FOLDER_OF_THE_TOOLS --memory 2.02GB --source src --source OTHER/src
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from limited_run import limited_run


def measure(folder: str, memory: str, batch: int, lengths: list[int], prompts: int, new_tokens: int) -> None:
    """One process: load, then every prompt; a JSON line for each."""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    import zipmoe
    from zipmoe.bench.prompts import topic_prompts
    from zipmoe.bench.workers.greedy_generation import generate

    context = batch * (max(lengths) + new_tokens)
    began = time.perf_counter()
    settings = zipmoe.ZipMoEConfig(memory=memory, context_tokens=context)
    model = zipmoe.load(folder, quantization_config=settings)
    engine = model.zipmoe_engine
    print(json.dumps({"load_seconds": time.perf_counter() - began, "ledger": engine.budget.ledger}), flush=True)
    for length in lengths:
        drawn = topic_prompts((7, 11, 23), prompts * batch, length, model.config.vocab_size).prompts
        for number in range(prompts):
            before = engine.statistics.counters()
            first: list[Any] = []
            line = generate(
                model,
                drawn[number * batch : (number + 1) * batch],
                new_tokens,
                lambda first=first: first.append(engine.statistics.counters()),  # type: ignore[misc]
            )
            run, seconds = first[0].since(before), line["token_seconds"]
            steps = [after - earlier for earlier, after in itertools.pairwise(seconds)]
            result = {
                "tokens": length,
                "batch": batch,
                "ttft_seconds": seconds[0],
                "tpot_seconds": statistics.median(steps) if steps else None,
                "disk_busy_seconds": run.read_seconds,
                "read_bytes": run.read_bytes,
                "hits": run.hits,
                "misses": run.misses,
            }
            print(json.dumps(result), flush=True)


def main() -> None:
    """Runs of all source trees in turn, as a table and as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", type=Path, help="folder with limit-run")
    parser.add_argument("--memory", default="2.02GB")
    parser.add_argument("--source", action="append", type=Path, help="folder that holds the package; repeatable")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        measure(
            str(options.folder), options.memory, options.batch, options.lengths, options.prompts, options.new_tokens
        )
        return
    if options.tools is None:
        parser.error("--tools is needed")
    results = []
    for round_number in range(options.rounds):
        for source in options.source or [Path("src")]:
            command = [
                "env",
                f"PYTHONPATH={source.resolve()}",
                sys.executable,
                __file__,
                str(options.folder),
                "--inner",
            ]
            command += ["--memory", options.memory, "--batch", str(options.batch), "--prompts", str(options.prompts)]
            command += ["--new-tokens", str(options.new_tokens), "--lengths", *map(str, options.lengths)]
            figures, out, errors = limited_run(options.tools, options.memory, command, evict=options.folder)
            if figures["rc"] != 0:
                raise SystemExit(f"exit status {figures['rc']}:\n{errors[-2000:]}")
            loaded, *lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            peak = figures["peak_total"]
            results.append(
                {"round": round_number, "source": str(source), "peak_bytes": peak, **loaded, "prompts": lines}
            )
            print(f"{source}: load {loaded['load_seconds']:.2f} s, peak {peak / 1e9:.3f} GB of {options.memory}")
            for line in lines:
                print(
                    f"  {line['batch']} x {line['tokens']:4d} tokens: first after {line['ttft_seconds']:.3f} s, "
                    f"disk busy {line['disk_busy_seconds']:.3f} s, {line['read_bytes'] / 1e9:.2f} GB, "
                    f"{line['hits']} hits, {line['misses']} misses, TPOT {line['tpot_seconds'] or 0:.4f} s"
                )
    if options.json is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        options.json.write_text(json.dumps({"commit": commit, "memory": options.memory, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
