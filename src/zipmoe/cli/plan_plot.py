"""The picture of ``zipmoe plan --plot``: time per token of every partition that the planner considered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import ExpertState

if TYPE_CHECKING:
    from zipmoe.planning.partition import PoolPlan
    from zipmoe.simulation.budget_plan import BudgetPlan

SUFFIXES = (".png", ".svg")
_MARKED_RUNNER_UPS = 5


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn before anything is planned.

    Raises:
        InvalidArgumentError: another kind of file, no such folder, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES or not path.absolute().parent.is_dir():
        raise InvalidArgumentError(
            f"--plot {str(path)!r} cannot be drawn", hint="name a .png or .svg file in an existing folder"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InvalidArgumentError("--plot needs matplotlib", hint="pip install 'zipmoe[plot]'") from error


def draw_plan(plan: BudgetPlan, path: Path, title: str) -> None:
    """Draw all partitions by the share of their memory that holds BF16, coloured by the share that holds C.

    Points are the rank model's expectation for the whole grid; marks are what was forecast in the end (by replay, if
    there is a trace), with a line to the expectation of the same partition.
    """
    from matplotlib.figure import Figure

    report = plan.report
    expected = {candidate.plan: candidate.step_seconds * 1e3 for candidate in report.candidates}

    def share(pools: PoolPlan, pool: ExpertState) -> float:
        held = pools.held_bytes(report.expert)
        return 100 * pools.slots[pool] * report.expert.held(pool) / held if held else 0.0

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    points = axes.scatter(
        [share(pools, ExpertState.FULL) for pools in expected],
        list(expected.values()),
        c=[share(pools, ExpertState.COMPRESSED) for pools in expected],
        cmap="viridis",
        vmin=0,
        vmax=100,
        s=14,
        linewidths=0,
        zorder=1,
    )
    figure.colorbar(points, ax=axes, label="share of the memory in C (compressed), %")

    def mark(pools: PoolPlan, seconds: float, style: str, size: float, colour: str, label: str, order: int) -> None:
        x, y = share(pools, ExpertState.FULL), seconds * 1e3
        axes.plot(x, y, style, markersize=size, color=colour, markeredgecolor="black", label=label, zorder=order)
        if pools in expected:
            axes.plot([x, x], [y, expected[pools]], color="black", linewidth=0.6, zorder=2)

    for name, forecast in plan.pure.items():
        label = f"{'no cache' if name == 'none' else f'all {name}'}: {forecast.step_seconds * 1e3:.1f} ms"
        style = {"F": "s", "C": "D", "S": "^", "E": "v", "none": "X"}[name]
        mark(forecast.plan, forecast.step_seconds, style, 8, "tab:orange", label, 3)
    pure = {forecast.plan for forecast in plan.pure.values()}
    runner_ups = [forecast for forecast in plan.runner_ups if forecast.plan not in pure][:_MARKED_RUNNER_UPS]
    for number, forecast in enumerate(runner_ups):
        label = "runner-ups (lines: to what the rank model expects)" if number == 0 else "_"
        mark(forecast.plan, forecast.step_seconds, "o", 7, "white", label, 4)
    chosen = plan.chosen
    label = f"chosen: {chosen.plan.describe()}, {chosen.step_seconds * 1e3:.1f} ms"
    mark(chosen.plan, chosen.step_seconds, "*", 17, "tab:red", label, 5)
    axes.set_xlabel("share of the memory in F (BF16), %")
    axes.set_ylabel("expected time per token, ms")
    axes.margins(y=0.1)
    axes.set_title(f"{title}: {plan.rest.seconds * 1e3:.1f} ms per token beside the experts")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=3, fontsize="small", frameon=False)
    figure.savefig(path, dpi=150)
