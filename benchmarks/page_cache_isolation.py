"""Does the page cache help? Direct against buffered reads within one memory limit (ZipMoE paper, table 2).

The same folder, prompt and budget, once with direct reads and once with buffered ones, under ``limit-run``: its limit
includes page cache, so that what the cache takes cannot come from outside of the budget. The engine drops buffered
pages once it has read them; if the page cache served expert reads all the same, buffered runs would read fewer bytes
from the device than the engine asks for. Runs alternate; each starts with none of the folder cached.

Run: python benchmarks/page_cache_isolation.py --tools DIR FOLDER [FOLDER ...]

Measurements can be made in parts (--only-shares, one folder at a time): results of other parts are kept in the JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from limited_run import limited_run
from replayed_models import task_progress
from result_document import add_result_options, earlier_results, table, this_machine, write_results

from zipmoe.store.packed_folder import PackedFolder

MODES = ("auto", "buffered")
NAMES = {"auto": "direct", "buffered": "buffered"}
SHARES = (0.25, 0.5, 0.75)
TOPIC, TOPICS, PROMPT_TOKENS, NEW_TOKENS = 7, 64, 64, 32


def prompt_ids(vocabulary: int) -> list[int]:
    """Tokens of one topic of the random-weight models, which route them as skewed as real text is."""
    drawn = np.random.default_rng(TOPIC).integers(0, vocabulary // TOPICS, PROMPT_TOKENS)
    return [int(number) for number in drawn * TOPICS + TOPIC]


def one_run(tools: Path, folder: Path, limit_bytes: int, mode: str, new_tokens: int) -> dict[str, Any]:
    """Generate within the limit.

    Returns:
        Time to first token and per token, tokens, peaks and bytes read from the device by this process tree.

    Raises:
        SystemExit: the run failed, or it did not read the way it was told to.
    """
    config = json.loads((folder / "config.json").read_text())
    ids = ",".join(map(str, prompt_ids(config["vocab_size"])))
    command = [sys.executable, "-m", "zipmoe", "run", str(folder), "--memory", str(limit_bytes), "--io", mode]
    command += ["--prompt-ids", ids, "--max-new-tokens", str(new_tokens), "--ignore-eos", "--json"]
    figures, out, err = limited_run(tools, limit_bytes, command, folder)
    if figures["rc"] != 0:
        raise SystemExit(f"{folder.name}, {limit_bytes / 1e9:.2f} GB, {NAMES[mode]} reads:\n{err}")
    result = json.loads(out)
    if f"{NAMES[mode]} reads" not in result["mode"]:
        raise SystemExit(f"asked for {NAMES[mode]} reads, but: {result['mode']}")
    measured = result["statistics"]
    return {
        "tpot_seconds": measured["tpot_seconds"],
        "ttft_seconds": measured["ttft_seconds"],
        "hit_rate": measured["hit_rate"],
        "asked_bytes": measured["read_bytes"],
        "asked_bytes_per_token": measured["read_bytes_per_token"],
        "device_read_bytes": figures["read_bytes"],
        "peak_bytes": figures["peak_total"],
        "peak_cache_bytes": figures["peak_cache"],
        "oom_kills": figures["oom_kills"],
        "cpu_wait_seconds": figures["cpu_wait_s"],
        "tokens": result["tokens"],
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the times, maxima of the peaks, and whether all runs gave the same tokens."""
    times = ("tpot_seconds", "ttft_seconds", "device_read_bytes", "asked_bytes", "asked_bytes_per_token", "hit_rate")
    peaks = ("peak_bytes", "peak_cache_bytes", "oom_kills")
    return {
        **{key: statistics.median(run[key] for run in runs) for key in times},
        **{key: max(run[key] for run in runs) for key in peaks},
    }


def tables_of(cases: dict[str, Any]) -> str:
    """One row for each folder, budget and mode; buffered over direct within a round."""
    rows = []
    for case in cases.values():
        ratio = statistics.median(
            buffered["tpot_seconds"] / direct["tpot_seconds"]
            for direct, buffered in zip(case["runs"]["auto"], case["runs"]["buffered"], strict=True)
        )
        for mode in MODES:
            found = summary(case["runs"][mode])
            rows.append(
                [
                    case["codec"],
                    f"{case['share']:.0%} ({case['limit_bytes'] / 1e9:.2f} GB)",
                    NAMES[mode],
                    f"{found['tpot_seconds'] * 1e3:.0f}",
                    f"{ratio:.2f}" if mode == "buffered" else "1",
                    f"{found['ttft_seconds']:.2f}",
                    f"{found['hit_rate']:.1%}",
                    f"{found['peak_bytes'] / 1e9:.2f}",
                    f"{found['peak_cache_bytes'] / 1e9:.2f}",
                    f"{found['asked_bytes_per_token'] / 1e6:.0f}",
                    f"{found['device_read_bytes'] / 1e9:.2f}",
                ]
            )
    header = [
        "codec",
        "limit",
        "reads",
        "ms per token",
        "ratio",
        "TTFT s",
        "hit rate",
        "peak GB",
        "of it page cache GB",
    ]
    return "\n" + table([*header, "MB asked per token", "GB from the device in all"], rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="packed folders of one model, one per codec")
    parser.add_argument("--tools", type=Path, required=True, metavar="DIR", help="folder that holds limit-run")
    parser.add_argument("--only-shares", type=float, nargs="+", default=SHARES, help="limits, of the BF16 bytes")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode, alternating")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    add_result_options(parser, "page_cache_isolation")
    arguments = parser.parse_args()
    cases = earlier_results(arguments.json, "cases")
    total = len(arguments.folders) * len(arguments.only_shares) * arguments.rounds * len(MODES)
    with task_progress("page cache", total) as tasks:
        for folder in arguments.folders:
            manifest = PackedFolder.open(folder).manifest
            for share in arguments.only_shares:
                limit = int(manifest.source_bytes * share)
                runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
                for _ in range(arguments.rounds):
                    for mode in MODES:
                        runs[mode].append(one_run(arguments.tools, folder, limit, mode, arguments.new_tokens))
                        tasks.finished(f"{manifest.codec.name} {share:.0%} {NAMES[mode]}")
                tokens = {tuple(run.pop("tokens")) for of_mode in runs.values() for run in of_mode}
                if len(tokens) != 1:
                    raise SystemExit(f"{folder.name} at {share:.0%}: direct and buffered runs gave different tokens")
                codec = manifest.codec.name
                case = {
                    "codec": codec,
                    "share": share,
                    "limit_bytes": limit,
                    "new_tokens": arguments.new_tokens,
                    "runs": runs,
                }
                cases[f"{codec} {share:g}"] = case
    cases = dict(sorted(cases.items()))
    tables = tables_of(cases)
    print(tables)
    report = {"machine": this_machine(), "cases": cases}
    write_results(arguments.json, arguments.document, "Page-cache isolation (table 2)", report, tables)


if __name__ == "__main__":
    main()
