"""Trains the byte-level BPE tokeniser of the demo model on stories of the grammar.

    python -m demo.train_tokenizer --out demo/work/tokenizer

The same arguments give the same tokeniser. A text is encoded as ``<|story|>`` followed by its tokens, and a story ends
with ``<|end|>``, so a prompt that went through the tokeniser looks to the model like the beginning of a story.
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo.story_grammar import stories

BEGIN, END, PAD = "<|story|>", "<|end|>", "<|pad|>"
BEGIN_ID, END_ID, PAD_ID = 0, 1, 2
VOCABULARY_SIZE = 1536
TOKENIZER_SEED = 1
"""Series of stories that the tokeniser is trained on; training and validation have their own (demo/train.py)."""


def train_tokenizer(story_count: int = 20_000) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((story.text for story in islice(stories(TOKENIZER_SEED), story_count)), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("demo/work/tokenizer"), help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--stories", type=int, default=20_000, help="stories to train on (default: %(default)s)")
    arguments = parser.parse_args()
    train_tokenizer(arguments.stories).save_pretrained(arguments.out)
    print(arguments.out)


if __name__ == "__main__":
    main()
