"""The published demo model: its files, and that it tells stories that a reader can read to the end."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo.checkpoint import RECORD_FILE
from demo.sample import PUBLISHED_MODEL, continue_story
from demo.story_batches import story_batches
from demo.story_grammar import vocabulary, words_of
from demo.story_words import BOY_NAMES, GIRL_NAMES
from demo.train import STORIES_PER_BATCH, VALIDATION_SEED, losses
from demo.train_tokenizer import train_tokenizer

NAMES = frozenset(GIRL_NAMES + BOY_NAMES)
SIZE_LIMIT_BYTES = 16_000_000
PROMPTS = (
    "Once upon a time",
    "Once upon a time, there was a brave fox named Tom.",
    "Long ago,",
    "In a small house near the river lived",
    "Once upon a time, there was a clever girl named Ruby. Ruby had a red kite, a gift from her grandmother.",
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(PUBLISHED_MODEL)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(PUBLISHED_MODEL).eval()


def names_in(text: str) -> set[str]:
    return NAMES & set(re.findall(r"\w+", text))


def test_the_weights_fit_the_size_limit() -> None:
    weights = list(PUBLISHED_MODEL.glob("*.safetensors"))
    assert [path.name for path in weights] == ["model.safetensors"]
    assert weights[0].stat().st_size <= SIZE_LIMIT_BYTES


def test_every_tensor_is_bf16_and_most_bytes_are_experts() -> None:
    expert_elements = elements = 0
    with safe_open(PUBLISHED_MODEL / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            assert file.get_slice(name).get_dtype() == "BF16", name
            count = file.get_tensor(name).numel()
            elements += count
            expert_elements += count if ".mlp.experts." in name else 0
    assert elements == json.loads((PUBLISHED_MODEL / RECORD_FILE).read_text())["parameters"]
    assert expert_elements / elements > 0.8


def test_the_configuration_is_plain() -> None:
    config = json.loads((PUBLISHED_MODEL / "config.json").read_text())
    assert config["architectures"] == ["OlmoeForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert not [key for key in config if key.startswith("_")]


def test_it_loads_as_it_is_stored(model: PreTrainedModel) -> None:
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_the_tokenizer_is_the_one_that_the_script_trains(tokenizer: PreTrainedTokenizerBase) -> None:
    assert json.loads(tokenizer.backend_tokenizer.to_str()) == json.loads(train_tokenizer().backend_tokenizer.to_str())


def test_the_tokenizer_gives_back_the_text(tokenizer: PreTrainedTokenizerBase) -> None:
    text = 'Once upon a time, Zoe said: "Ça va?"'
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_the_recorded_validation_loss_is_true(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    recorded = json.loads((PUBLISHED_MODEL / RECORD_FILE).read_text())["validation"]
    with torch.inference_mode():
        measured = [
            losses(model, batch)[0].item()
            for batch in islice(story_batches(VALIDATION_SEED, tokenizer, STORIES_PER_BATCH), 4)
        ]
    assert sum(measured) / len(measured) == pytest.approx(recorded["loss_nats_per_token"], abs=0.03)
    assert recorded["loss_nats_per_token"] < recorded["entropy_nats_per_token"] + 0.06


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_story_is_readable_and_ends(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str
) -> None:
    text, ended = continue_story(model, tokenizer, prompt, sampled=False)
    assert ended
    assert text.startswith(prompt)
    assert 40 < len(text.split()) < 180
    assert set(words_of(text)) <= vocabulary()
    # Two characters; where the prompt names none, greedy decoding may give both the same name (demo/README.md).
    assert len(names_in(text)) in ((2,) if names_in(prompt) else (1, 2)), text
    assert text.count('"') % 2 == 0
    assert re.search(r'[.!?]"?$', text)


def test_sampled_stories_are_readable_and_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    inputs = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
    sampled = model.generate(**inputs, num_return_sequences=32)
    ended = [tokenizer.eos_token_id in tokens for tokens in sampled.tolist()]
    texts = tokenizer.batch_decode(sampled, skip_special_tokens=True)
    assert len(set(texts)) == 32
    # Sampling takes a wrong turn now and then; the published model does so in less than one story in eight.
    assert sum(ended) >= 28
    assert sum(set(words_of(text)) <= vocabulary() for text in texts) >= 28
    assert sum(len(names_in(text)) == 2 for text in texts) >= 28
