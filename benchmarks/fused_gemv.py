"""Compare y = W x on packed weights (fused FX3) with raw BF16 of our own and with torch (docs/results/fused_gemv).

The measuring is that of ``zipmoe bench --kernels`` (``zipmoe.bench.kernels``): on every instruction set of the
processor, on one core and on all, for every number of tokens that there is a native product for, more weights than any
cache holds (``--megabytes`` of BF16) in turn, interleaved, beside the rate at which the same memory can be read at all.

Run: python benchmarks/fused_gemv.py [--json docs/results/fused_gemv.json] [--markdown FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from zipmoe.bench.kernels.kernel_result import SHAPES, KernelPlan, run_kernels
from zipmoe.bench.kernels.kernel_tables import kernel_markdown
from zipmoe.bench.kernels.product_methods import default_tokens


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="Fused FX3 against raw BF16 against torch.")
    parser.add_argument("--megabytes", type=int, default=420, help="BF16 weights that go by in turn")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--shapes", nargs="*", help="ROWSxCOLUMNS, instead of Qwen1.5-MoE's")
    parser.add_argument("--tokens", type=int, nargs="*", default=list(default_tokens()), help="rows of x")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    arguments = parser.parse_args()
    shapes = SHAPES
    if arguments.shapes:
        shapes = tuple((int(rows), int(columns)) for rows, columns in (text.split("x") for text in arguments.shapes))
    plan = KernelPlan(shapes, tuple(arguments.tokens), arguments.megabytes, arguments.rounds, codecs=False)
    result = run_kernels(plan, lambda line: print(line, file=sys.stderr, flush=True))
    print(kernel_markdown(result))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result.to_json(), indent=1) + "\n")
        print(f"wrote {arguments.json}", file=sys.stderr)
    if arguments.markdown:
        arguments.markdown.write_text(kernel_markdown(result))


if __name__ == "__main__":
    main()
