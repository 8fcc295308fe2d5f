"""TPOT by memory, one line per contender, with the roofline below ours; needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from zipmoe.bench.comparison import Row
from zipmoe.errors import InvalidArgumentError


def check_plot(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn afterwards.

    Raises:
        InvalidArgumentError: matplotlib is not installed, or does not know the kind of file.
    """
    try:
        backend = importlib.import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError as error:
        raise InvalidArgumentError("--plot needs matplotlib", hint="pip install 'zipmoe[plot]'") from error
    kinds = backend.get_supported_filetypes()
    if path.suffix.lstrip(".") not in kinds:
        raise InvalidArgumentError(
            f"a plot cannot be written as {path.name!r}", hint=f"choose a name with .{', .'.join(sorted(kinds))}"
        )


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw batch 1: memory in GB against seconds per token, both logarithmic."""
    figure_module = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    single = [row for row in rows if row.batch == 1 and row.tpot_seconds is not None]
    for contender in dict.fromkeys(row.contender for row in single):
        own = sorted((row for row in single if row.contender == contender), key=lambda row: row.limit_bytes)
        axes.plot(
            [row.limit_bytes / 1e9 for row in own], [row.tpot_seconds for row in own], marker="o", label=contender
        )
        floors = [(row.limit_bytes / 1e9, row.roofline.floor_seconds) for row in own if row.roofline is not None]
        if floors:
            axes.plot(*zip(*floors, strict=True), linestyle="--", color="grey", label=f"floor of {contender}")
    axes.set(xscale="log", yscale="log", xlabel="memory limit, GB", ylabel="seconds per token (median)")
    axes.grid(visible=True, which="both", alpha=0.3)
    if single:
        axes.legend()
    figure.savefig(path)
