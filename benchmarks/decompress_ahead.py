"""Does it pay to decompress exponents before they are asked for?

    python benchmarks/decompress_ahead.py FOLDER --memory 6GB --pools C=8,S=10,E=10 --prompt-ids 7,71,135

The folder (of a codec whose exponents are held apart) is loaded twice in one process, with each of two numbers of
buffers for decompressed exponents (default 0 and 2; 0 decompresses when a matrix is asked for). The same prompt runs
through both in turn, several times, after one run each that fills the pools. Printed are the times per output token of
each and the ratio of each pair; tokens must agree.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import zipmoe
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots


def load(folder: Path, memory: str, slots: PoolSlots, buffers: int, context: int, threads: int | None) -> Any:
    """The model with so many buffers for decompressed exponents."""
    settings = zipmoe.ZipMoEConfig(
        memory=memory,
        context_tokens=context,
        decode_threads=threads,
        pools=PoolSettings(slots, decompress_ahead=buffers),
    )
    return zipmoe.load(folder, quantization_config=settings)


class Ticker:
    """Tells the statistics of each new token (the streamer protocol of Transformers)."""

    def __init__(self, counters: Any) -> None:
        self._counters = counters
        self._prompt_seen = False

    def put(self, _value: torch.Tensor) -> None:
        """The first call brings the prompt."""
        if self._prompt_seen:
            self._counters.token_generated()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is left to be done."""


def run(model: Any, prompt: torch.Tensor, tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Greedy tokens, and the numbers of the run."""
    counters = model.zipmoe_engine.statistics
    options = GenerationConfig(max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    counters.start_run()
    with torch.inference_mode():
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=options, streamer=Ticker(counters)
        )
    return output[0, prompt.shape[1] :].tolist(), counters.report().as_dict()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All repetitions of both."""
    prompt = torch.tensor([[int(number) for number in arguments.prompt_ids.split(",")]])
    slots = PoolSlots.parse(arguments.pools)
    context = prompt.shape[1] + arguments.tokens
    models = {
        buffers: load(arguments.folder, arguments.memory, slots, buffers, context, arguments.decode_threads)
        for buffers in arguments.buffers
    }
    expected: list[int] | None = None
    runs: dict[int, list[dict[str, Any]]] = {buffers: [] for buffers in models}
    for repetition in range(arguments.repetitions + 1):
        for buffers, model in models.items() if repetition % 2 else reversed(models.items()):
            tokens, report = run(model, prompt, arguments.tokens)
            if expected is not None and tokens != expected:
                raise SystemExit(f"with {buffers} buffers other tokens come out")
            expected = tokens
            print(f"{repetition}: {buffers} buffers {report['tpot_seconds']:.4f} s per token", flush=True)
            if repetition:  # the first one filled the pools
                runs[buffers].append(report)
    before, after = arguments.buffers
    pairs = zip(runs[before], runs[after], strict=True)
    ratios = [second["tpot_seconds"] / first["tpot_seconds"] for first, second in pairs]
    return {
        "pools": str(slots),
        "memory": arguments.memory,
        "prompt_tokens": prompt.shape[1],
        "tokens": arguments.tokens,
        "mode_lines": {buffers: model.zipmoe_mode_line() for buffers, model in models.items()},
        "ratios": ratios,
        "median_ratio": statistics.median(ratios),
        "runs": runs,
    }


def main() -> None:
    """Measure, print, and write JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--memory",
        required=True,
        help="budget of each of the two models; the second one counts the first one as part of the process",
    )
    parser.add_argument("--pools", required=True, help="experts per sparse layer, e.g. C=8,S=10,E=10")
    parser.add_argument("--prompt-ids", required=True, help="token ids with commas between them")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--buffers", type=int, nargs=2, default=[0, 2])
    parser.add_argument("--decode-threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    for buffers, runs in result["runs"].items():
        seconds = " ".join(f"{report['tpot_seconds']:.4f}" for report in runs)
        ready = sum(report["ready_bytes"] for report in runs) / max(1, sum(report["decoded_bytes"] for report in runs))
        print(f"{buffers} buffers: {seconds} s per token; {ready:.1%} of the decoded bytes were ready when asked for")
    ratios = " ".join(f"{ratio:.3f}" for ratio in result["ratios"])
    print(
        f"{arguments.buffers[1]} against {arguments.buffers[0]} buffers: {ratios}, median {result['median_ratio']:.3f}"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
