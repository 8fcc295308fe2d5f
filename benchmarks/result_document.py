"""Results of a benchmark: a JSON file, and a document whose tables are generated while its findings are a person's."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import zipmoe

RESULTS = Path(__file__).parent.parent / "docs" / "results"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def add_result_options(parser: Any, name: str) -> None:
    """``--json`` and ``--document``, by default below docs/results."""
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="write the raw results here")
    parser.add_argument(
        "--document", type=Path, default=RESULTS / f"{name}.md", help="renew the tables in this document"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def write_results(json_path: Path, document: Path, title: str, report: dict[str, Any], tables: str) -> None:
    """Write the JSON and put ``tables`` between the marks of the document; everything around them is kept."""
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    text = document.read_text(encoding="utf-8") if document.is_file() else f"# {title}\n\n{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{document} lacks the marks {BEGIN} and {END}: nothing was written to it")
    document.write_text(f"{before}{BEGIN}\n{tables}{END}{after}", encoding="utf-8")
    print(f"wrote {json_path} and {document}", file=sys.stderr)


def earlier_results(json_path: Path, key: str) -> Any:
    """What an earlier run kept under ``key``, for measurements that are made in parts; an empty object if nothing."""
    if not json_path.is_file():
        return {}
    return json.loads(json_path.read_text(encoding="utf-8")).get(key, {})


def this_machine() -> dict[str, Any]:
    """What measured numbers depend on."""
    names = (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "processor": next(names, platform.processor()).split(":")[-1].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)),
        "kernel": os.uname().release,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "zipmoe": zipmoe.__version__,
    }
