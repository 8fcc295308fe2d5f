"""Causal attention of a prompt between its matrices: the native kernel beside what Transformers does, in turns.

    OMP_WAIT_POLICY=passive python benchmarks/prompt_attention.py --tokens 128 512 2048

Rotary positions, entries of the cache, attention. Prints the machine, then the median milliseconds of both and their
ratio, and the errors of the attention alone against FP64, relative to its length; ``--json FILE`` writes them, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers
from result_document import this_machine
from transformers import DynamicCache
from transformers.models.qwen2_moe.modeling_qwen2_moe import apply_rotary_pos_emb

from zipmoe import _native


def words(tensor: torch.Tensor):
    """BF16 patterns, where they lie."""
    return tensor.view(torch.uint16).numpy()


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 512, 1024])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--key-value-heads", type=int, default=16)
    parser.add_argument("--dimensions", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--instruction-set", default="", help="default: the best of this machine")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    measured_on = {
        "machine": this_machine(),
        "instruction_set": options.instruction_set or _native.best_instruction_set(),
        "threads": options.threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(measured_on), flush=True)
    results = []
    torch.set_num_threads(options.threads)
    threads = _native.ComputeThreads(options.threads)
    scale = options.dimensions**-0.5
    for tokens in options.tokens:
        generator = torch.Generator().manual_seed(tokens)
        shapes = [(1, tokens, heads, options.dimensions) for heads in (options.heads, *[options.key_value_heads] * 2)]
        queries, keys, values = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
        cached = [torch.empty_like(keys.transpose(1, 2).contiguous()) for _ in range(2)]
        out = torch.empty_like(queries)
        by_head = [part.transpose(1, 2) for part in (queries, keys, values)]
        half = options.dimensions // 2
        angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(half) / half)
        cosines, sines = (part.repeat(1, 2).bfloat16() for part in (angles.cos(), angles.sin()))
        shares = options.heads != options.key_value_heads

        def native(rotate=True, arrays=(queries, keys, values), cached=cached, out=out, cosines=cosines, sines=sines):
            rotation = {"cosines": words(cosines), "sines": words(sines)} if rotate else {}
            _native.attend_prompt(
                *map(words, arrays),
                scale,
                *map(words, cached),
                words(out),
                threads,
                instruction_set=options.instruction_set,
                **rotation,
            )
            return out

        def of_torch(rotate=True, arrays=by_head, shares=shares, cosines=cosines[None], sines=sines[None]):
            attention = torch.nn.functional.scaled_dot_product_attention
            q, k, v = arrays
            if rotate:
                q, k = apply_rotary_pos_emb(q, k, cosines, sines)
                k, v = DynamicCache().update(k, v, 0)
            mixed = attention(q, k, v, scale=scale, is_causal=True, enable_gqa=shares)
            return mixed.transpose(1, 2).contiguous()

        seconds: dict[str, list[float]] = {"native": [], "torch": []}
        for _ in range(options.rounds):
            for name, function in (("native", native), ("torch", of_torch)):
                begin = time.perf_counter()
                function()
                seconds[name].append(time.perf_counter() - begin)
        wide = [part.double() for part in by_head]
        exact = torch.nn.functional.scaled_dot_product_attention(*wide, scale=scale, is_causal=True, enable_gqa=shares)
        exact = exact.transpose(1, 2)
        errors = [((one(rotate=False).double() - exact).norm() / exact.norm()).item() for one in (native, of_torch)]
        medians = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
        print(
            f"{tokens} tokens: native {medians['native']:.2f} ms, torch {medians['torch']:.2f} ms, "
            f"{medians['torch'] / medians['native']:.1f} times; errors {errors[0]:.5f} and {errors[1]:.5f}"
        )
        results.append(
            {
                "tokens": tokens,
                "milliseconds": medians,
                "errors": {"native": errors[0], "torch": errors[1]},
                "heads": options.heads,
                "key_value_heads": options.key_value_heads,
                "dimensions": options.dimensions,
                "rounds": options.rounds,
            }
        )
    if options.json is not None:
        options.json.write_text(json.dumps({**measured_on, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
