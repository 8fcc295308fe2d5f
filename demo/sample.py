"""Lets a checkpoint tell stories, with nothing but Transformers.

python -m demo.sample --prompt "Once upon a time" --count 3
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

PUBLISHED_MODEL = Path(__file__).parent / "model"


def continue_story(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, sampled: bool
) -> tuple[str, bool]:
    """The prompt and its continuation, and whether the story came to its end within the model's default length."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(**inputs, do_sample=True) if sampled else model.generate(**inputs, do_sample=False)
    ended = bool(tokens[0, -1] == tokenizer.eos_token_id)
    return str(tokenizer.decode(tokens[0], skip_special_tokens=True)), ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PUBLISHED_MODEL, help="checkpoint folder (default: demo/model)")
    parser.add_argument("--prompt", default="Once upon a time", help="beginning of the story (default: %(default)s)")
    parser.add_argument("--count", type=int, default=3, help="stories to sample (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: %(default)s)")
    parser.add_argument("--greedy", action="store_true", help="tell the one most likely story instead")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    for _ in range(1 if arguments.greedy else arguments.count):
        text, ended = continue_story(model, tokenizer, arguments.prompt, sampled=not arguments.greedy)
        print(text if ended else f"{text} [cut off]", end="\n\n")


if __name__ == "__main__":
    main()
