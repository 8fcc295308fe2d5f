"""Layers of steps in one call of the native core give the bits that they give part by part, in every family that has
such layers. That these are right is told by their error against FP64 (``test_decode_steps.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from equality import load_packed
from fp64_reference import inputs_and_steps
from native_layers import NativeLayers, computed_in_parts, logits_of_steps
from test_decode_steps import NATIVE
from tiny_models import tiny_inputs

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.store.pack import pack

Folder = Callable[[str], Path]
Packed = Callable[[str, CodecSettings], Path]
Given = tuple[dict[str, torch.Tensor], list[torch.Tensor]]

WITH_LAYERS = {family: counts[-2:] for family, counts in NATIVE.items() if any(counts[-2:])}
SMALLEST_PACKED_BYTES = 1 << 10
"""Of a matrix; a gate of the shared expert is smaller and stays as it is, as it does in models of usual sizes."""


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> NativeLayers:
    return NativeLayers(monkeypatch)


def inputs(family: str) -> list[Given]:
    """Three sequences, and one, which gets further."""
    alone = tiny_inputs(family, batch=1, tokens=6, seed=7)
    steps = [tiny_inputs(family, batch=1, tokens=1, seed=100 + step)["input_ids"] for step in range(12)]
    return [*(inputs_and_steps(family, seed=seed, tokens=4, steps=4) for seed in (1, 2, 3)), (alone, steps)]


def assert_same_bits(model: Any, given: list[Given], layers: NativeLayers, counts: tuple[int, int]) -> None:
    for each in given:
        logits_of_steps(model, *each)  # where modules are used for the first time
    for each in given:
        layers.forget()
        found = logits_of_steps(model, *each)
        assert layers.counts == counts
        layers.forget()
        with computed_in_parts(model):
            expected = logits_of_steps(model, *each)
        assert layers.counts == (0, 0)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("family", sorted(WITH_LAYERS))
def test_the_bits_are_those_of_the_parts(family: str, packed: Packed, layers: NativeLayers) -> None:
    model = load_packed(family, packed(family, CodecSettings("fx3", None, 1)), mode="fast")
    with model.zipmoe_engine:
        assert_same_bits(model, inputs(family), layers, WITH_LAYERS[family])


def test_with_a_gate_of_the_shared_expert(checkpoint: Folder, layers: NativeLayers, tmp_path: Path) -> None:
    settings = CodecSettings("fx3", None, 1)
    pack(checkpoint("qwen2_moe"), tmp_path / "packed", settings, jobs=1, min_dense_bytes=SMALLEST_PACKED_BYTES)
    model = load_packed("qwen2_moe", tmp_path / "packed", mode="fast")
    with model.zipmoe_engine:
        assert_same_bits(model, inputs("qwen2_moe"), layers, (2, 0))
