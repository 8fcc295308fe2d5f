"""Commands under a memory limit that includes page cache (``limit-run``, benchmarks/README.md)."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def limited_run(
    tools: Path, memory: int | str, command: Sequence[str], evict: Path | None = None
) -> tuple[dict[str, Any], str, str]:
    """Run a command under a memory limit (bytes, or ``"4GB"``); the page cache forgets the folder ``evict`` before.

    Bytes read and written are those of the disk that ``evict`` lies on, else of the current folder's.

    Returns:
        limit-run's figures (``rc``, ``peak_total``, ``peak_cache``, ``read_bytes``, ...), stdout and stderr.

    Raises:
        SystemExit: there is no limit-run in ``tools``.
    """
    tool = tools / "limit-run"
    if not tool.is_file():
        raise SystemExit(f"no limit-run in {tools} (see --tools and benchmarks/README.md)")
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        options = ["--mem", str(memory), "--json", str(figures), "--quiet"]
        if evict is not None:
            options += ["--disk", str(evict), "--evict", str(evict)]
        done = subprocess.run([str(tool), *options, "--", *command], capture_output=True, text=True, check=False)
        return json.loads(figures.read_text()), done.stdout, done.stderr
