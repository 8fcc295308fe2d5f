"""The main job on the embedded demo model: pack it, check it, run it below its size, compare with plain Transformers.

Run by ``make demo``. Everything that is printed is measured in this run.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import zipmoe  # before torch, whose threads then sleep between products

# isort: split
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import logging as transformers_logging

from zipmoe.cli.main import main as zipmoe_command
from zipmoe.cli.token_stream import TokenStream
from zipmoe.engine.budget import DENSE, EXPERT_POOL
from zipmoe.errors import BudgetTooSmallError

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path("demo/model")
PACKED = Path("demo/work/packed")
PROMPT = "Once upon a time, there was a brave fox named Tom."
POOL_ABOVE_FLOOR_BYTES = 3_000_000


def main() -> int:
    """Run all steps; the exit code is 0 only if every one of them held."""
    os.chdir(ROOT)  # so that all paths are short
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    _title("1. Pack: every weight bit is kept, the folder stays a Hugging Face folder")
    shutil.rmtree(PACKED, ignore_errors=True)
    PACKED.parent.mkdir(exist_ok=True)
    for arguments in (
        ["pack", str(MODEL), str(PACKED)],
        ["inspect", str(PACKED)],
        ["verify", str(PACKED), "--against", str(MODEL)],
    ):
        _show(arguments)
        if code := zipmoe_command(arguments):
            return code

    _title("2. A budget below the floor is refused, item by item")
    floor = _floor()

    _title("3. Run with less memory for weights than the model has weights")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = zipmoe.load(PACKED, memory=floor + POOL_ABOVE_FLOOR_BYTES, mode="exact")
    print(model.zipmoe_mode_line())
    inputs = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    statistics = model.zipmoe_engine.statistics
    print(f"\n  {PROMPT}", end="", flush=True)
    statistics.start_run()
    with torch.inference_mode():
        model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=200,
            do_sample=False,
            streamer=TokenStream(tokenizer, statistics, sys.stdout),
        )
    print(f"\n{statistics.report().line()}")
    weights = sum(f.stat().st_size for f in MODEL.glob("*.safetensors"))
    ledger = model.zipmoe_engine.budget.ledger
    resident = ledger[DENSE] + ledger[EXPERT_POOL]
    print(
        f"weights of the model {weights / 1e6:.1f} MB, memory held for weights {resident / 1e6:.1f} MB "
        "(the rest of the budget is Python, PyTorch and workspace)"
    )

    _title("4. The same logits as plain Transformers, bit for bit")
    equal = _compare(model, tokenizer)
    model.zipmoe_engine.close()
    return 0 if equal and resident < weights else 1


def _title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def _show(arguments: list[str]) -> None:
    print(f"$ zipmoe {' '.join(arguments)}", flush=True)


def _floor() -> int:
    try:
        zipmoe.load(PACKED, memory="1MB")
    except BudgetTooSmallError as error:
        print(f"error: {error}\nhint: {error.hint}")
        return error.floor_bytes
    raise AssertionError("a budget of 1 MB was accepted")


def _compare(model: Any, tokenizer: Any) -> bool:
    plain = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    text = "Once upon a time, there was a little rabbit named Ben. Ben liked to play in the garden with his friend."
    inputs = tokenizer(text, return_tensors="pt")["input_ids"]
    equal = True
    for order in ("grouped_mm", "eager"):
        plain.set_experts_implementation(order)
        model.set_experts_implementation(order)
        with torch.inference_mode():
            expected = plain(inputs).logits
            found = model(inputs).logits
        same = torch.equal(expected, found)
        equal &= same
        count = expected.numel()
        print(f"{order:>10}: torch.equal over {count} logits of {inputs.shape[1]} tokens: {same}")
    return equal


if __name__ == "__main__":
    sys.exit(main())
