"""``zipmoe bench --kernels``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from zipmoe.cli.progress import talk


def bench_kernels(
    shapes: str | None,
    tokens: str | None,
    megabytes: int,
    rounds: int | None,
    threads: int | None,
    json_file: Path | None,
    markdown_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure products and decoding; needs no model.

    Args:
        shapes: like ``1408x2048,2048x2048``.
        tokens: like ``1,2,3``.
        megabytes: BF16 weights that go by in turn.
        rounds: of everything.
        threads: for "all cores".
        json_file: everything raw.
        markdown_file: the tables.
        plot_file: weights per second.

    Raises:
        InvalidArgumentError: something of this is not to be measured.
    """
    from zipmoe.bench.comparison_plot import check_plot
    from zipmoe.bench.kernels.kernel_plot import plot_kernels
    from zipmoe.bench.kernels.kernel_result import KernelPlan, run_kernels
    from zipmoe.bench.kernels.kernel_tables import kernel_markdown, kernel_tables
    from zipmoe.cli.bench_tables import print_tables

    if plot_file is not None:
        check_plot(plot_file)
    asked = KernelPlan(megabytes=megabytes)
    plan = replace(
        asked,
        shapes=asked.shapes if shapes is None else _shapes(shapes),
        tokens=asked.tokens if tokens is None else _tokens(tokens),
        rounds=asked.rounds if rounds is None else rounds,
        threads=asked.threads if threads is None else threads,
    )
    result = run_kernels(plan, talk)
    if json_file is not None:
        json_file.write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    if markdown_file is not None:
        markdown_file.write_text(kernel_markdown(result), encoding="utf-8")
    if plot_file is not None:
        plot_kernels(result, plot_file)
    print_tables(result.heading(), kernel_tables(result))


def _shapes(text: str) -> tuple[tuple[int, int], ...]:
    from zipmoe.errors import InvalidArgumentError

    found = []
    for part in text.split(","):
        rows, _, columns = part.strip().partition("x")
        if not (rows.isdecimal() and columns.isdecimal()):
            raise InvalidArgumentError(f"--shapes {text!r} is not a list of ROWSxCOLUMNS, such as 1408x2048,2048x2048")
        found.append((int(rows), int(columns)))
    return tuple(found)


def _tokens(text: str) -> tuple[int, ...]:
    from zipmoe.errors import InvalidArgumentError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError(f"--tokens {text!r} is not a list of numbers, such as 1,2,3")
    return tuple(dict.fromkeys(map(int, parts)))
