"""Writes the demo model the way it is published: BF16 safetensors, configuration, tokeniser, training record."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

from transformers import GenerationConfig, OlmoeForCausalLM, PreTrainedTokenizerBase

RECORD_FILE = "training.json"


def published_config(config: dict[str, object]) -> dict[str, object]:
    """The configuration without private keys, which say how this process ran the model and not what the model is."""
    return {key: value for key, value in config.items() if not key.startswith("_")}


def save_checkpoint(
    model: OlmoeForCausalLM, tokenizer: PreTrainedTokenizerBase, record: dict[str, object], folder: Path
) -> None:
    """Write a BF16 copy of ``model`` to ``folder``, which is replaced only when everything is on the disk."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    rounded = copy.deepcopy(model).bfloat16()
    rounded.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        max_new_tokens=256,
    )
    rounded.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    config_file = partial / "config.json"
    config = published_config(json.loads(config_file.read_text()))
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (partial / RECORD_FILE).write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
