"""Which families route early, and that their logits stay those of plain Transformers while experts are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from equality import assert_same_logits, load_packed, load_plain, shrink_pool
from family_table import CODECS, FAMILIES
from tiny_models import interface_families, logits, tiny_inputs

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.hf.early_routing import EarlyRouter

SHARED_EXPERT_FIRST = {
    "ernie4_5_moe",
    "hunyuan_v1_moe",
    "laguna",
    "minimax_m3_vl",
    "muse_spark",
    "qwen2_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "qwen4_exp",
}
"""They compute the shared expert before they route."""
ROWS = ((1, 6), (1, 1), (2, 1), (2, 7))


@pytest.mark.parametrize("family", sorted(interface_families() & FAMILIES.keys()))
def test_who_routes_early(
    family: str, packed: Callable[[str, CodecSettings], Path], checkpoint: Callable[[str], Path]
) -> None:
    model = load_packed(family, packed(family, CODECS[0]), mode="exact")
    logits(model, **tiny_inputs(family, batch=1, tokens=2))
    found = any(isinstance(module, EarlyRouter) for module in model.modules())
    assert found == (family in SHARED_EXPERT_FIRST)
    if found:
        shrink_pool(model)
        assert_same_logits(family, load_plain(family, checkpoint(family)), model, ROWS)
    model.zipmoe_engine.close()
