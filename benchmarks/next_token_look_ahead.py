"""What does the look-ahead from the likeliest next token gain? Two steps with it and two without, in turn, one process.

Of each two the second counts: in the first one predictions are used and not made, or made and not used.

Greedy decoding of prompts of one topic (checkpoints of make-model), with one pool of whole experts. To be run under a
memory limit that includes page cache. Prints medians and quartiles per step.

Run: limit-run --mem 2.02GB --evict PACKED -- python benchmarks/next_token_look_ahead.py PACKED --memory 2.02GB
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

import zipmoe

PROMPT_TOKENS = 64
TOPICS = 64
COUNTED = {
    "read_seconds": "disk busy, ms",
    "wait_seconds": "waited for experts, ms",
    "compute_seconds": "computed, ms",
    "read_bytes": "read, MB",
    "wasted_bytes": "read in vain, MB",
    "misses": "experts missed",
    "prefetched": "experts looked ahead to",
}
SCALES = {"seconds": 1e3, "bytes": 1e-6}


class InTurn:
    """A streamer that turns the predictions on and off, and takes the time and the counters at every token."""

    def __init__(self, model: Any) -> None:
        self.steps: dict[bool, dict[str, list[float]]] = {on: defaultdict(list) for on in (False, True)}
        self._model = model
        self._predict = model.zipmoe_next_token.predict
        self._on = True
        self._tokens = 0
        self._last: tuple[float, dict[str, Any]] | None = None
        model.zipmoe_next_token.predict = lambda logits: self._predict(logits) if self._on else None

    def put(self, _: torch.Tensor) -> None:
        """A token was chosen: the step after it used what was predicted from its logits.

        An interval begins after a prediction and ends after the next one, so that it counts only where both or neither
        were made: a step with predictions pays for one, too.
        """
        now, counters = time.perf_counter(), self._model.zipmoe_engine._native.counters()
        if self._last is not None and self._tokens > 2 and self._was_on is self._on:
            self._add(now - self._last[0], self._last[1], counters)
        self._last = now, counters
        self._was_on = self._on
        self._tokens += 1
        self._on = self._tokens // 2 % 2 == 0

    def _add(self, seconds: float, before: dict[str, Any], after: dict[str, Any]) -> None:
        step = self.steps[self._was_on]
        step["step, ms"].append(seconds * 1e3)
        step["disk idle, ms"].append((seconds - after["read_seconds"] + before["read_seconds"]) * 1e3)
        for name, label in COUNTED.items():
            step[label].append((after[name] - before[name]) * SCALES.get(name.split("_")[-1], 1))

    def end(self) -> None:
        """A text has ended."""
        self._last, self._tokens = None, 0


def quartiles(values: Sequence[float]) -> list[float]:
    """Rounded."""
    return [round(value, 2) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    """Generate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="packed model")
    parser.add_argument("--memory", default="2.02GB", help="budget")
    parser.add_argument("--prompts", type=int, default=8, help="the first one warms up and is not counted")
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of each")
    options = parser.parse_args()
    settings = zipmoe.ZipMoEConfig(memory=options.memory, context_tokens=160, look_ahead=True)
    model = zipmoe.load(options.folder, quantization_config=settings)
    in_turn = InTurn(model)
    rows = model.config.vocab_size // TOPICS
    for number in range(options.prompts):
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(rows, (1, PROMPT_TOKENS), generator=generator) * TOPICS + 7 * number % TOPICS
        with torch.inference_mode():
            arguments = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
            model.generate(ids, attention_mask=torch.ones_like(ids), streamer=in_turn, **arguments)
        if number == 0:
            for step in in_turn.steps.values():
                step.clear()
    found = {
        label: {"without": quartiles(without), "with": quartiles(in_turn.steps[True][label])}
        for label, without in in_turn.steps[False].items()
    }
    print(json.dumps({"mode": model.zipmoe_mode_line(), "quartiles": found}, indent=1))


if __name__ == "__main__":
    main()
