"""Weights per second of every product on the first shape, one panel per number of cores; needs matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path

from zipmoe.bench.kernels.kernel_result import KernelResult


def plot_kernels(result: KernelResult, path: Path) -> None:
    """Draw groups of bars (numbers of tokens), a bar per method, in GB/s of BF16 that pass; the rate of memory dashed.

    The bars of packed weights may rise above that line: they read fewer bytes than the BF16 that they stand for.
    """
    figure_module = importlib.import_module("matplotlib.figure")
    shape = result.plan.shapes[0]
    rates = [each for each in result.products if (each.rows, each.columns) == shape]
    threads = sorted({each.threads for each in rates})
    figure = figure_module.Figure(figsize=(5.5 * len(threads), 4.5), layout="constrained")
    panels = figure.subplots(1, len(threads), squeeze=False, sharey=True)[0]
    for axes, count in zip(panels, threads, strict=True):
        groups = [each for each in rates if each.threads == count]
        methods = list(dict.fromkeys(times.method for group in groups for times in group.times))
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            places = [
                (index + number * width - 0.4, 2e-9 * shape[0] * shape[1] / times.median_seconds)
                for index, group in enumerate(groups)
                if (times := group.of(method.form, method.instruction_set)) is not None
            ]
            axes.bar([x for x, _ in places], [y for _, y in places], width, align="edge", label=method.label)
        memory = result.memory_bytes_per_second(count) / 1e9
        axes.axhline(memory, linestyle="--", color="grey", label="memory")
        axes.set_xticks(range(len(groups)), [str(group.tokens) for group in groups])
        axes.set(title=f"{shape[0]} x {shape[1]}, {count} {'core' if count == 1 else 'cores'}", xlabel="tokens")
        axes.grid(visible=True, axis="y", alpha=0.3)
    panels[0].set_ylabel("GB/s of BF16 weights")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(path)
