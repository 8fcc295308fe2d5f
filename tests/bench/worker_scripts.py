"""Scripts that stand in for workers: whole command lines that behave well or badly in known ways."""

from __future__ import annotations

import json
import sys

LOADED = json.dumps({"kind": "loaded", "seconds": 0.5, "versions": {}})


def generation(*token_seconds: float, batch: int = 1, tokens: list[list[int]] | None = None, **counts: int) -> str:
    """A ``generation`` line."""
    steps = len(token_seconds)
    fields = {
        "kind": "generation",
        "batch": batch,
        "token_seconds": token_seconds,
        "read_bytes": [100 * (step + 1) for step in range(steps)],
        "tokens": tokens or [list(range(steps))] * batch,
        **counts,
    }
    return json.dumps(fields)


DONE = json.dumps({"kind": "done"})


def script(*lines: str, then: str = "") -> list[str]:
    """Prints these lines, then runs a statement."""
    code = "import sys\nsys.stdin.read()\n" + "".join(f"print({line!r}, flush=True)\n" for line in lines) + then
    return [sys.executable, "-S", "-c", code]
