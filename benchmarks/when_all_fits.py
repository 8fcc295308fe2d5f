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
from pathlib import Path
from typing import Any

import torch
import transformers
from result_document import this_machine
from torch import nn

TOPICS = (7, 11, 23)
PROMPT_TOKENS = 64
MEMORY = "12GB"
RATE_BYTES = 1 << 30
"""Read for the rate of memory: so much that nothing of it is left in a cache when it is read again."""
PLAIN = "transformers"
LOOP = "its code alone"
"""Transformers' generation with no layers and with logits that are there already: what is left of a token when nothing
is computed.
"""


class GivenLogits(nn.Module):
    """In place of the matrix that computes logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._logits = torch.zeros((1, 1, width), dtype=torch.bfloat16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """(1, n, hidden) to (1, n, width)."""
        return self._logits.expand(1, hidden.shape[1], -1)


def load(kind: str, folder: str, new_tokens: int) -> tuple[Any, float]:
    """The model of a contender, and how many bytes of weights each token needs (0: not told)."""
    if kind == PLAIN:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), 0.0
    if kind == LOOP:
        config = transformers.AutoConfig.from_pretrained(folder)
        config.num_hidden_layers = 0
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.lm_head = GivenLogits(config.vocab_size)
        return model, 0.0
    import zipmoe
    from zipmoe.bench.active_bytes import always_active_bytes, mean_expert_bytes
    from zipmoe.store.packed_folder import PackedFolder

    settings = zipmoe.ZipMoEConfig(memory=MEMORY, context_tokens=PROMPT_TOKENS + new_tokens)
    packed = zipmoe.load(folder, quantization_config=settings)
    manifest = PackedFolder.open(folder).manifest
    experts = packed.config.num_experts_per_tok * len(manifest.expert_groups)
    return packed, always_active_bytes(packed, manifest) + experts * mean_expert_bytes(manifest)


def serve(kind: str, folder: str, new_tokens: int) -> None:
    """One process: load, warm up, then a JSON list of the seconds of each token for every number of a prompt."""
    from zipmoe.bench.prompts import topic_prompts
    from zipmoe.bench.workers.greedy_generation import generate

    model, active_bytes = load(kind, folder, new_tokens)
    prompts = topic_prompts(TOPICS, len(TOPICS), PROMPT_TOKENS, model.config.vocab_size).prompts
    for prompt in prompts:
        generate(model, [prompt], 32 if kind != PLAIN else 3)
    print(json.dumps({"active_bytes": active_bytes}), flush=True)
    for line in sys.stdin:
        seconds = generate(model, [prompts[int(line) % len(prompts)]], new_tokens)["token_seconds"]
        steps = [after - before for before, after in itertools.pairwise(seconds[2:])]
        print(json.dumps(steps), flush=True)


class Worker:
    """A contender in a process of its own; ``ask`` for the seconds of a prompt's tokens, but for the first three."""

    def __init__(self, kind: str, source: Path, folder: Path, new_tokens: int) -> None:
        command = [sys.executable, __file__, str(folder), str(folder), "--inner", kind, "--new-tokens", str(new_tokens)]
        environment = os.environ | {"PYTHONPATH": str(source.resolve())}
        if kind not in (PLAIN, LOOP):
            environment["OMP_WAIT_POLICY"] = "passive"  # as the command line does
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.active_bytes: float = self._answer()["active_bytes"]

    def ask(self, prompt: int) -> list[float]:
        """``prompt``: its number."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt}\n")
        self._process.stdin.flush()
        steps: list[float] = self._answer()
        return steps

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with {self._process.wait()}")
        return json.loads(line)


def memory_rate() -> Any:
    """A function that measures how fast all cores read memory, in bytes per second, within a third of a second."""
    from zipmoe.profiling.memory_probes import memory_probes
    from zipmoe.profiling.rounds import run_rounds
    from zipmoe.profiling.touched_memory import TouchedMemory

    memory = TouchedMemory(RATE_BYTES)
    probes = memory_probes(memory.take(RATE_BYTES), (len(os.sched_getaffinity(0)),))
    reads = [probe for probe in probes if probe.step == "read"]

    def measure() -> float:
        samples = run_rounds(reads, 0.3).samples
        return max(found.rate().median for found in samples if found is not None)

    return measure


def describe(turns: list[dict[str, Any]], names: list[str], active_bytes: float, split: float) -> str:
    """Medians of the turns in which memory was slower, or faster, than ``split`` bytes per second all the time."""
    slow = [turn for turn in turns if max(turn["memory"]) < split]
    fast = [turn for turn in turns if min(turn["memory"]) >= split]
    lines = [f"{len(turns) - len(slow) - len(fast)} of {len(turns)} turns saw both"]
    for label, some in ((f"below {split / 1e9:.0f} GB/s", slow), (f"from {split / 1e9:.0f} GB/s on", fast)):
        if not some:
            lines.append(f"memory {label}: no turn")
            continue
        rate = statistics.median(rate for turn in some for rate in turn["memory"])
        plain = [turn["tpot"][PLAIN] for turn in some]
        loop = statistics.median(turn["tpot"][LOOP] for turn in some)
        floor = active_bytes / rate + loop
        lines += [
            f"memory {label}: {len(some)} turns, median {rate / 1e9:.1f} GB/s",
            f"  {PLAIN:24} {statistics.median(plain):.4f} s per token",
            f"  {'floor':24} {floor:.4f} s per token, {floor / statistics.median(plain):.3f} of plain: "
            f"{active_bytes / rate:.4f} s of weights ({active_bytes / 1e9:.3f} GB), {loop:.4f} s of {PLAIN}, {LOOP}",
        ]
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
    if len({*names}) < len(names):
        parser.error("a source is named twice")
    measure = memory_rate()
    turns = []
    kinds = [*((name, source, options.packed) for name, source in zip(names, sources, strict=True))]
    kinds += [(kind, sources[0], options.model) for kind in (LOOP, PLAIN)]
    workers = {kind: Worker(kind, source, folder, options.new_tokens) for kind, source, folder in kinds}
    active_bytes = workers[names[0]].active_bytes
    try:
        for number in range(options.rounds):
            rates, tpot = [measure()], {}
            for name, each in workers.items():
                tpot[name] = statistics.median(each.ask(number))
                rates.append(measure())
            turns.append({"memory": rates, "tpot": tpot})
            times = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in tpot.items())
            print(f"{', '.join(f'{rate / 1e9:.0f}' for rate in rates)} GB/s: {times}", flush=True)
    finally:
        for each in workers.values():
            each.close()
    print(describe(turns, names, active_bytes, options.split * 1e9))
    if options.json is not None:
        report = {
            "machine": this_machine(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "memory": MEMORY,
            "commits": {str(source): commit_of(source) for source in sources},
            "active_bytes": active_bytes,
            "split": options.split * 1e9,
            "turns": turns,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def commit_of(source: Path) -> str:
    """That ``source`` is checked out at, and whether anything was changed since."""
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
