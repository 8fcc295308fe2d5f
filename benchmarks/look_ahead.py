"""Does it pay to read ahead what the next layer will probably ask for? The same prompt, with and without, in turn.

Every run is a process of its own under a memory limit that includes page cache, with one pool of whole experts. What is
compared is the time per token after the first, as ratios of runs that followed each other.

Run: python benchmarks/look_ahead.py PACKED --tools DIR --memory 2.02GB 4.05GB
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from limited_run import limited_run
from result_document import add_result_options, earlier_results, table, this_machine, write_results

PROMPT_TOKENS = 64
TOPICS = 64
"""Ids that are equal modulo this belong together in the checkpoints of make-model."""
SETTINGS = {"off": "--no-look-ahead", "on": "--look-ahead"}


def prompt_ids(prompt: int, vocabulary: int) -> str:
    """Token ids of one topic, spread over the vocabulary."""
    rows = vocabulary // TOPICS
    ids = ((37 * prompt + 101 * place * place) % rows * TOPICS + 7 * prompt for place in range(PROMPT_TOKENS))
    return ",".join(map(str, ids))


def run(options: argparse.Namespace, memory: str, setting: str, prompt: int) -> dict[str, Any]:
    """One generation; its statistics, tokens and mode line."""
    vocabulary = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    command = [sys.executable, "-m", "zipmoe", "run", str(options.folder), "--memory", memory, "--pools", "none"]
    command += ["--prompt-ids", prompt_ids(prompt, vocabulary), "--max-new-tokens", str(options.tokens)]
    command += ["--ignore-eos", "--json", SETTINGS[setting]]
    figures, out, err = limited_run(options.tools, memory, command, evict=options.folder)
    if figures["rc"] != 0:
        raise SystemExit(f"a run with {memory} failed:\n{err}")
    return {**json.loads(out), "memory": memory, "setting": setting, "prompt": prompt, "peak": figures["peak_total"]}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs; which setting comes first changes from one pair to the next."""
    runs: list[dict[str, Any]] = []
    for number in range(options.rounds):
        for place, memory in enumerate(options.memory):
            order = list(SETTINGS) if (number + place) % 2 == 0 else list(reversed(SETTINGS))
            pair = [run(options, memory, setting, number) for setting in order]
            if pair[0]["tokens"] != pair[1]["tokens"]:
                raise SystemExit("look-ahead changed the tokens")
            runs += pair
            seconds = {each["setting"]: each["statistics"]["tpot_seconds"] for each in pair}
            print(f"{memory}: on / off {seconds['on'] / seconds['off']:.3f}", file=sys.stderr)
    return runs


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians of each memory size, and of the ratios of its pairs."""
    rows = []
    for memory in dict.fromkeys(each["memory"] for each in runs):
        at = [each for each in runs if each["memory"] == memory]
        by_setting = {s: {e["prompt"]: e["statistics"] for e in at if e["setting"] == s} for s in SETTINGS}
        ratios = [by_setting["on"][p]["tpot_seconds"] / by_setting["off"][p]["tpot_seconds"] for p in by_setting["on"]]
        row: dict[str, Any] = {"memory": memory, "ratio": statistics.median(ratios), "ratios": ratios}
        for setting, runs_of in by_setting.items():
            row[setting] = {
                name: statistics.median(each[name] for each in runs_of.values())
                for name in ("tpot_seconds", "ttft_seconds", "read_bytes_per_token", "hits", "misses", "prefetched")
            }
            row[setting]["wasted_bytes"] = statistics.median(each["wasted_bytes"] for each in runs_of.values())
        rows.append(row)
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The summary for people."""
    header = ("memory", "TPOT s, off", "TPOT s, on", "on / off", "read per token, off", "on", "hits, misses, off")
    lines = []
    for row in rows:
        on, off = row["on"], row["off"]
        low, high = min(row["ratios"]), max(row["ratios"])
        lines.append(
            (
                row["memory"],
                f"{off['tpot_seconds']:.4f}",
                f"{on['tpot_seconds']:.4f}",
                f"{row['ratio']:.3f} ({low:.2f} to {high:.2f})",
                f"{off['read_bytes_per_token'] / 1e6:.0f} MB",
                f"{on['read_bytes_per_token'] / 1e6:.0f} MB",
                f"{off['hits']:.0f}, {off['misses']:.0f}",
                f"{on['hits']:.0f}, {on['misses']:.0f}, {on['prefetched']:.0f}",
                f"{on['wasted_bytes'] / 1e9:.2f} GB",
            )
        )
    return table((*header, "hits, misses, looked ahead to, on", "read in vain, whole run"), lines)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="packed model")
    parser.add_argument("--tools", type=Path, required=True, help="folder with limit-run")
    parser.add_argument("--memory", nargs="+", default=["2.02GB", "4.05GB"], help="limits and budgets")
    parser.add_argument("--rounds", type=int, default=5, help="pairs per memory size, each with a prompt of its own")
    parser.add_argument("--tokens", type=int, default=33, help="new tokens")
    add_result_options(parser, "look_ahead")
    options = parser.parse_args()
    runs = measure(options)
    rows = summary(runs)
    report = {"machine": this_machine(), "mode": runs[-1]["mode"], "summary": rows, "runs": runs}
    report["recall"] = earlier_results(options.json, "recall")  # of look_ahead_recall.py, put there by hand
    text = tables(rows)
    print(text)
    write_results(options.json, options.document, "Look-ahead to the next layer's experts", report, text)


if __name__ == "__main__":
    main()
