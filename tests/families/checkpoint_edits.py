"""Checkpoints rewritten the way real ones differ from what ``save_pretrained`` writes here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
State = dict[str, torch.Tensor]


def read_state(folder: Path) -> State:
    """All tensors of a checkpoint, by checkpoint key."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def rewrite(source: Path, destination: Path, edit: Callable[[State], State]) -> Path:
    """Copy the checkpoint ``source`` to ``destination``, its tensors in one file and passed through ``edit``."""
    destination.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copy(file, destination)
    state = edit(read_state(source))
    save_file({k: t.contiguous() for k, t in state.items()}, destination / "model.safetensors", {"format": "pt"})
    return destination


def set_config(folder: Path, **fields: object) -> None:
    """Change fields of the checkpoint's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
