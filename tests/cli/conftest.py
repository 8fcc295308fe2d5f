"""A tiny packed model with a tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

WORDS = ("once", "upon", "a", "time", "there", "was", "cat", "dog", "who", "liked", "to", "sleep", "in", "the", "sun")


@pytest.fixture(scope="session")
def talking_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose tokenizer knows a few words."""
    from tiny_checkpoint import VOCABULARY, save_tiny_checkpoint
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("talking"), eos_token_id=0, bos_token_id=0, pad_token_id=0)
    vocabulary = {"<eos>": 0, "<unk>": 1, **{w: i + 2 for i, w in enumerate(WORDS)}}
    vocabulary |= {f"word{i}": i for i in range(len(vocabulary), VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>")
    fast.chat_template = "{% for m in messages %}there was {{ m['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def talking_packed(talking_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``talking_source`` packed with FX3, dense matrices included."""
    from zipmoe.codecs.codec_settings import CodecSettings
    from zipmoe.store.pack import pack

    folder = tmp_path_factory.mktemp("talking_packed") / "model"
    pack(talking_source, folder, CodecSettings("fx3", None, 1), jobs=1, min_dense_bytes=0)
    return folder
