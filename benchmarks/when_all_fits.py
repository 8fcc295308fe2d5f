"""Time per token when everything fits, beside the rate of memory: of plain Transformers and of one source tree or
several, all of them loaded at once and asked in turn, so that every turn finds the machine in one state.

    python benchmarks/when_all_fits.py PACKED MODEL --source src --source OTHER/src --rounds 16 --json FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

TOPICS = (7, 11, 23)
PROMPT_TOKENS = 64
PLAIN = "transformers"


def serve(kind: str, folder: str, new_tokens: int) -> None:
    """One process: load, warm up, then a JSON list of the seconds of each token for every number of a prompt."""
    if kind == PLAIN:
        import torch
        import transformers

        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    else:
        os.environ["OMP_WAIT_POLICY"] = "passive"  # as the command line does
        import zipmoe

        context = PROMPT_TOKENS + new_tokens
        settings = zipmoe.ZipMoEConfig(memory="12GB", context_tokens=context)
        model = zipmoe.load(folder, quantization_config=settings)
    from zipmoe.bench.prompts import topic_prompts
    from zipmoe.bench.workers.greedy_generation import generate

    prompts = topic_prompts(TOPICS, len(TOPICS), PROMPT_TOKENS, model.config.vocab_size).prompts
    for prompt in prompts:
        generate(model, [prompt], 32 if kind != PLAIN else 3)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds = generate(model, [prompts[int(line) % len(prompts)]], new_tokens)["token_seconds"]
        steps = [after - before for before, after in itertools.pairwise(seconds[2:])]
        print(json.dumps(steps), flush=True)


@contextmanager
def worker(kind: str, source: Path, folder: Path, new_tokens: int) -> Iterator[Any]:
    """``ask(number of a prompt)`` for the seconds of its tokens, but for the first three."""
    command = [sys.executable, __file__, str(folder), str(folder), "--inner", kind, "--new-tokens", str(new_tokens)]
    environment = os.environ | {"PYTHONPATH": str(source.resolve())}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{kind} could not be started")

        def ask(prompt: int) -> list[float]:
            process.stdin.write(f"{prompt}\n")
            process.stdin.flush()
            steps: list[float] = json.loads(process.stdout.readline())
            return steps

        yield ask
    finally:
        process.stdin.close()
        process.wait()


def memory_rate() -> Any:
    """A function that measures how fast all cores read memory, in bytes per second, within a third of a second."""
    from zipmoe.profiling.memory_probes import MEMORY_BYTES, memory_probes
    from zipmoe.profiling.rounds import run_rounds
    from zipmoe.profiling.touched_memory import TouchedMemory

    memory = TouchedMemory(MEMORY_BYTES)
    probes = memory_probes(memory.take(MEMORY_BYTES), (len(os.sched_getaffinity(0)),))
    reads = [probe for probe in probes if probe.step == "read"]

    def measure() -> float:
        samples = run_rounds(reads, 0.3).samples
        return max(found.rate().median for found in samples if found is not None)

    return measure


def describe(turns: list[dict[str, Any]], names: list[str], split: float) -> str:
    """Medians of the turns in which memory was slower, or faster, than ``split`` bytes per second all the time."""
    slow = [turn for turn in turns if max(turn["memory"]) < split]
    fast = [turn for turn in turns if min(turn["memory"]) >= split]
    lines = [f"{len(turns) - len(slow) - len(fast)} of {len(turns)} turns saw both"]
    for label, some in ((f"below {split / 1e9:.0f} GB/s", slow), (f"from {split / 1e9:.0f} GB/s on", fast)):
        if not some:
            lines.append(f"memory {label}: no turn")
            continue
        rate = statistics.median(rate for turn in some for rate in turn["memory"])
        lines.append(f"memory {label}: {len(some)} turns, median {rate / 1e9:.1f} GB/s")
        plain = [turn["tpot"][PLAIN] for turn in some]
        lines.append(f"  {PLAIN:24} {statistics.median(plain):.4f} s per token")
        for name in names:
            seconds = [turn["tpot"][name] for turn in some]
            ratios = [ours / theirs for ours, theirs in zip(seconds, plain, strict=True)]
            lines.append(
                f"  {name:24} {statistics.median(seconds):.4f} s per token, {statistics.median(ratios):.3f} of plain "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )
    return "\n".join(lines)


def main() -> None:
    """All contenders in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packed", type=Path)
    parser.add_argument("model", type=Path, help="the original checkpoint")
    parser.add_argument("--source", action="append", type=Path, help="folder that holds the package; repeatable")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=23)
    parser.add_argument("--split", type=float, default=62, help="GB/s that divide the states (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        serve(options.inner, str(options.packed), options.new_tokens)
        return
    sources = options.source or [Path("src")]
    names = [str(source) for source in sources]
    measure = memory_rate()
    turns = []
    with ExitStack() as stack:
        ask = {
            name: stack.enter_context(worker(name, source, options.packed, options.new_tokens))
            for name, source in zip(names, sources, strict=True)
        }
        ask[PLAIN] = stack.enter_context(worker(PLAIN, sources[0], options.model, options.new_tokens))
        for number in range(options.rounds):
            rates, tpot = [measure()], {}
            for name, each in ask.items():
                tpot[name] = statistics.median(each(number))
                rates.append(measure())
            turns.append({"memory": rates, "tpot": tpot})
            times = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in tpot.items())
            print(f"{', '.join(f'{rate / 1e9:.0f}' for rate in rates)} GB/s: {times}", flush=True)
    print(describe(turns, names, options.split * 1e9))
    if options.json is not None:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        options.json.write_text(json.dumps({"commit": commit, "split": options.split * 1e9, "turns": turns}, indent=1))


if __name__ == "__main__":
    main()
