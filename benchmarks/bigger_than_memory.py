"""The main job on a model of real shape: pack 8.1 GB, run it with 4 GB and 2.2 GB, refuse 1 GB, compare the tokens.

    python benchmarks/bigger_than_memory.py --tools FOLDER_OF_THE_TOOLS --work FOLDER_WITH_25_GB

Every step runs under ``limit-run`` (a memory limit that includes page cache). The script prints one line per promise
with what was measured and whether it holds, writes docs/results/bigger_than_memory.json, and exits with 1 if one is
broken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from limited_run import limited_run

RESULTS = Path(__file__).parent.parent / "docs" / "results" / "bigger_than_memory.json"
TOPIC, TOPICS, VOCABULARY, PROMPT_TOKENS, NEW_TOKENS = 7, 64, 151936, 64, 32
PACK_LIMIT = "1000MB"


class Report:
    """Collects promises and what became of them."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def promise(self, text: str, measured: str, holds: bool) -> None:
        """Print and keep one line."""
        self.lines.append({"promise": text, "measured": measured, "holds": holds})
        print(f"{'ok    ' if holds else 'BROKEN'} {text}: {measured}", flush=True)


class Bench:
    """One work folder with the model, its packed forms and the outputs."""

    def __init__(self, tools: Path, work: Path) -> None:
        self.tools = tools
        self.work = work
        self.model = work / "qwen-moe-6-layers"
        self.report = Report()

    def limited(self, memory: str, *command: str, evict: Path | None = None) -> tuple[dict[str, Any], str, str]:
        """Run ``command`` under a memory limit; returns limit-run's figures, stdout and stderr."""
        return limited_run(self.tools, memory, command, evict)

    def zipmoe(self, memory: str, *arguments: str, evict: Path | None = None) -> tuple[dict[str, Any], str, str]:
        """Run the command line of this installation under a memory limit."""
        return self.limited(memory, sys.executable, "-m", "zipmoe", *arguments, evict=evict)

    def make_model(self) -> None:
        """Random weights of the real shape, once."""
        if not (self.model / "config.json").exists():
            print("making the model ...", flush=True)
            subprocess.run(
                [sys.executable, str(self.tools / "make-model"), "--layers", "6", "--out", str(self.model)],
                check=True,
                stdout=subprocess.DEVNULL,
            )

    def pack(self, name: str, limit_ratio: float, *options: str) -> Path:
        """Pack under 1 GB of memory, page cache and interpreter included."""
        destination = self.work / f"packed-{name}"
        shutil.rmtree(destination, ignore_errors=True)
        began = time.monotonic()
        figures, _, err = self.zipmoe(PACK_LIMIT, "pack", str(self.model), str(destination), *options)
        seconds = time.monotonic() - began
        if figures["rc"] != 0:
            raise SystemExit(f"pack {name} failed:\n{err}")
        source = sum(f.stat().st_size for f in self.model.glob("*.safetensors"))
        packed = sum(f.stat().st_size for f in destination.glob("*.safetensors"))
        rate, ratio = source / seconds / 1e6, packed / source
        self.report.promise(f"{name}: packs at 100 MB/s or more", f"{rate:.0f} MB/s ({seconds:.1f} s)", rate >= 100)
        peak = f"peak {figures['peak_total'] / 1e9:.3f} GB, interpreter and page cache included"
        peak += f", {figures['oom_kills']} OOM kills"
        self.report.promise(f"{name}: packs within {PACK_LIMIT}", peak, figures["oom_kills"] == 0)
        self.report.promise(f"{name}: ratio at most {limit_ratio}", f"{ratio:.4f}", ratio <= limit_ratio)
        return destination

    def clean(self) -> None:
        """Delete what this script has made; anything else in the work folder is somebody else's."""
        for folder in (self.model, *self.work.glob("packed-*")):
            shutil.rmtree(folder)
        (self.work / "plain.json").unlink(missing_ok=True)

    def verify(self, folder: Path) -> None:
        """Every decoded tensor against the source."""
        figures, out, err = self.zipmoe(PACK_LIMIT, "verify", str(folder), "--against", str(self.model))
        said = (out or err).strip().replace(f"{self.work}/", "")
        self.report.promise("every tensor equals the source bit for bit", said, figures["rc"] == 0)

    def plain_tokens(self) -> list[int]:
        """Greedy tokens of plain Transformers with 20 GB."""
        out = self.work / "plain.json"
        if not out.exists():
            print("running plain Transformers with 20 GB ...", flush=True)
            script = str(self.tools / "baseline_transformers.py")
            options = ["--topics", str(TOPIC), "--new", str(NEW_TOKENS), "--out", str(out)]
            figures, _, err = self.limited("20GB", sys.executable, script, str(self.model), *options)
            if figures["rc"] != 0:
                raise SystemExit(f"plain Transformers failed:\n{err}")
        return list(json.loads(out.read_text())["runs"][0]["tokens"])

    def run(self, folder: Path, memory: str, expected: list[int]) -> None:
        """Generate under a limit equal to the budget."""
        figures, out, err = self._run(folder, memory)
        if figures["rc"] != 0:
            self.report.promise(f"{memory}: runs", err.strip().splitlines()[0], False)
            return
        result = json.loads(out)
        limit = figures["mem_limit"]
        self.report.promise(
            f"{memory}: the {NEW_TOKENS} greedy tokens of plain Transformers",
            f"{sum(a == b for a, b in zip(result['tokens'], expected, strict=True))} of {NEW_TOKENS} equal",
            result["tokens"] == expected,
        )
        self.report.promise(
            f"{memory}: peak within the budget, no OOM kill",
            f"peak {figures['peak_total'] / 1e9:.3f} GB with page cache, {figures['oom_kills']} OOM kills",
            figures["peak_total"] <= limit and figures["oom_kills"] == 0,
        )
        statistics = result["statistics"]
        print(
            f"       {result['mode']}\n"
            f"       TTFT {statistics['ttft_seconds']:.2f} s, TPOT {statistics['tpot_seconds']:.3f} s, "
            f"hit rate {statistics['hit_rate']:.1%}, {statistics['read_bytes_per_token'] / 1e6:.0f} MB read per token",
            flush=True,
        )
        self.report.lines[-1]["statistics"] = statistics

    def refuse(self, folder: Path, memory: str) -> None:
        """A budget below the floor."""
        figures, _, err = self._run(folder, memory)
        line = err.strip().splitlines()[0]
        self.report.promise(f"{memory}: refused, naming the floor", line, figures["rc"] == 2 and "floor of" in line)

    def _run(self, folder: Path, memory: str) -> tuple[dict[str, Any], str, str]:
        ids = np.random.default_rng(TOPIC).integers(0, VOCABULARY // TOPICS, PROMPT_TOKENS) * TOPICS + TOPIC
        options = ["--prompt-ids", ",".join(map(str, ids.tolist())), "--max-new-tokens", str(NEW_TOKENS)]
        options += ["--pools", "none", "--exact", "--ignore-eos", "--json"]
        return self.zipmoe(memory, "run", str(folder), "--memory", memory, *options, evict=folder)


def main() -> int:
    """Run everything; 0 if all promises hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", type=Path, required=True, help="folder of the tools (benchmarks/README.md)")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model (25 GB are needed)")
    parser.add_argument("--keep", action="store_true", help="do not delete the model and its packed forms at the end")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.tools.resolve(), options.work.resolve())
    bench.make_model()
    huffman = bench.pack("zstd huf", 0.667, "--codec", "zstd", "--level", "huf")
    shutil.rmtree(huffman)
    folder = bench.pack("fx3", 0.705)
    bench.verify(folder)
    expected = bench.plain_tokens()
    for memory in ("4GB", "2.2GB"):
        bench.run(folder, memory, expected)
    bench.refuse(folder, "1GB")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "machine": os.uname().machine, "kernel": os.uname().release}
    RESULTS.write_text(json.dumps({"machine": machine, "promises": bench.report.lines}, indent=1) + "\n")
    if not options.keep:
        bench.clean()
    return 0 if all(line["holds"] for line in bench.report.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
