"""The last layer leaves out positions in these families, and the logits that are asked for stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from equality import load_packed
from family_table import FAMILIES
from tiny_models import tiny_inputs

from zipmoe import _native
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.hf.configuration import ZipMoEConfig

LEAVE_OUT = {
    *("afmoe", "aria", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32"),
    *("dots1", "dots3_note", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite"),
    *("glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3"),
    *("jamba", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax"),
    *("minimax_m2", "minimax_m3_vl", "mistral4", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe"),
    *("qwen3_moe", "qwen3_next", "solar_open"),
}
"""The others have another structure, or code that is not known to keep positions apart."""
QUERIES_TOO = {
    *("aria", "dots1", "ernie4_5_moe", "glm4_moe", "granitemoe", "granitemoeshared", "hy_v3", "kolibri1", "lara_mini"),
    *("mellum", "mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open"),
}
"""Those whose last attention is the native core's, which attends to whole prompts."""
CALLS = ((12, 1, 2), (12, 3, 1), (9, 1, 1), (7, 2, 3))
"""Tokens, logits to keep, sequences. The first call compares, and computes all."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits(family: str, packed: Callable[[str, CodecSettings], Path]) -> None:
    folder = packed(family, CodecSettings("fx3", None, 1))
    model, whole = (
        load_packed(family, folder, quantization_config=ZipMoEConfig(memory="8GB", mode="fast", last_positions=wanted))
        for wanted in (True, False)
    )
    with model.zipmoe_engine, whole.zipmoe_engine:
        left_out = model.zipmoe_last_positions
        assert (left_out is not None) == (family in LEAVE_OUT)
        assert ("of the last layer for the positions" in model.zipmoe_mode_line()) == (family in LEAVE_OUT)
        if left_out is None:
            return
        assert left_out.with_attention == (family in QUERIES_TOO)
        assert not _native.attends_prompts() or ("and queries" in left_out.describe()) == (family in QUERIES_TOO)
        for tokens, kept, sequences in CALLS:
            inputs = tiny_inputs(family, batch=sequences, tokens=tokens, seed=tokens)
            with torch.no_grad():
                found, expected = (each(**inputs, logits_to_keep=kept).logits for each in (model, whole))
            assert torch.equal(found, expected)
            assert left_out.checked
            left_out.fill = torch.nan  # nobody looks at the other positions
