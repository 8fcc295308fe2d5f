"""Rows as long as in real models: only there does a product of several rows differ from products of single ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from equality import assert_same_logits, load_packed, load_plain, shrink_pool
from family_table import CODECS, WIDE, second_codec
from tiny_models import tiny_model

from zipmoe.store.pack import pack

SHAPES = ((1, 36), (1, 1), (1, 5))
FAMILIES = (
    "aria",
    "dbrx",
    "gemma4",
    "gpt_oss",
    "inkling2",
    "jetmoe",
    "llama4",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "qwen2_moe",
    "switch_transformers",
)
"""One of each way of computing experts."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", [None, "eager"])
def test_long_rows(family: str, implementation: str | None, folder: Path) -> None:
    tiny_model(family, WIDE).save_pretrained(folder / "source")
    settings = CODECS[0] if implementation is None else second_codec(family)
    pack(folder / "source", folder / "packed", settings, jobs=2)
    plain = load_plain(family, folder / "source", experts_implementation=implementation)
    model = load_packed(family, folder / "packed", experts_implementation=implementation, mode="exact")
    assert_same_logits(family, plain, model, SHAPES)
    shrink_pool(model)
    assert_same_logits(family, plain, model, SHAPES)
    model.zipmoe_engine.close()
