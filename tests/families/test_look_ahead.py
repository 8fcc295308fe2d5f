"""Look-ahead is either in effect or said not to be, in every family, and logits stay those of plain Transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import assert_same_logits, load_packed, load_plain
from family_table import CODECS, FAMILIES
from tiny_models import interface_families

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.hf.configuration import ZipMoEConfig

SHAPES = ((1, 1), (1, 2), (1, 1), (2, 1))
"""Few rows, as in decode steps; the first call finds the routers."""


@pytest.mark.parametrize("family", sorted(interface_families() & FAMILIES.keys()))
def test_logits(family: str, packed: Callable[[str, CodecSettings], Path], checkpoint: Callable[[str], Path]) -> None:
    settings = ZipMoEConfig(memory="8GB", mode="exact", look_ahead=True)
    model = load_packed(family, packed(family, CODECS[0]), quantization_config=settings)
    assert_same_logits(family, load_plain(family, checkpoint(family)), model, SHAPES)
    chain = model.zipmoe_look_ahead
    predicts = chain is not None and "no look-ahead" not in chain.describe()
    assert ("look-ahead to the next layer's experts in" in model.zipmoe_mode_line()) == predicts
    if not predicts:
        assert model.zipmoe_engine.statistics.counters().predicted_reads == 0
    model.zipmoe_engine.close()
