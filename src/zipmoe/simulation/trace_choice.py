"""Opening any trace: recorded by a run, or published by others."""

from __future__ import annotations

from pathlib import Path

from zipmoe.planning.published_traces import PER_PROMPT_COUNTS, PER_TOKEN_IDS, read_prompt_counts, read_token_ids
from zipmoe.planning.trace import RoutingTrace, TraceError, read_trace
from zipmoe.simulation.step_drawing import draw_steps


def open_trace(path: Path, *, prompts: int | None = None, seed: int = 0) -> RoutingTrace:
    """Read a trace for replay.

    Args:
        path: a file written by ``--record-trace``, or a published one under its own name. Of those that hold counts per
            prompt (``.npz``), steps are drawn (``step_drawing``).
        prompts: of counts per prompt, use only so many; None: all.
        seed: of the drawing.

    Raises:
        TraceError: the file is missing, damaged, or of an unknown kind.
    """
    if not path.is_file():
        raise TraceError(f"there is no trace {str(path)!r}", hint="record one with --record-trace")
    for published in PER_PROMPT_COUNTS:
        if path.name == published.file:
            return draw_steps(read_prompt_counts(path.parent, published), seed, prompts)
    for published in PER_TOKEN_IDS:
        if path.name == published.file:
            return read_token_ids(path.parent, published)
    if path.suffix == ".npz":
        raise TraceError(
            f"{str(path)!r} is not one of the published files of counts",
            hint=f"known: {', '.join(published.file for published in PER_PROMPT_COUNTS)}",
        )
    return read_trace(path)
