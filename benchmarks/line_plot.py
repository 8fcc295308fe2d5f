"""Small multiples of lines, for those who have matplotlib (it is no dependency of ZipMoE)."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""Points (x, y) by the name of the line."""


def save_lines(path: Path, panels: Mapping[str, Lines], *, x_label: str, y_label: str) -> bool:
    """Draw one panel for each entry of ``panels``; says so and returns False where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        print(f"no plot {path}: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), squeeze=False)
    for axis, (title, lines) in zip(axes[0], panels.items(), strict=True):
        for name, points in lines.items():
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=3, label=name)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(x_label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel(y_label)
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    print(f"wrote {path}", file=sys.stderr)
    return True
