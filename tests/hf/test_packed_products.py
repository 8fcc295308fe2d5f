"""What a plan says about packed products is what the run does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

import zipmoe
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.rows_on_demand import model_on_meta
from zipmoe.hf.packed_products import packed_products
from zipmoe.planning.packed_products import ALL_PRODUCTS, NO_PRODUCTS, PackedProducts
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder

ONLY_DENSE = PackedProducts(experts=False, dense=True)
EXPECTED = {
    "mixtral": ALL_PRODUCTS,
    "qwen2_moe": ALL_PRODUCTS,
    "deepseek_v3": ALL_PRODUCTS,
    "gpt_oss": ONLY_DENSE,
    "dbrx": ONLY_DENSE,
}
DECODED = {
    "gpt_oss": "their matrices are stored transposed",
    "dbrx": "their family computes them in its own loop",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_models_before_and_after_loading_say_the_same(packed_model, name):
    packed = packed_model(name)
    manifest = PackedFolder.open(packed.folder).manifest
    meta = model_on_meta(AutoConfig.from_pretrained(packed.folder), packed.tiny.architecture)
    assert packed_products(meta, manifest, "fast") == EXPECTED[name]
    assert packed_products(meta, manifest, "exact") == NO_PRODUCTS
    model = zipmoe.load(packed.folder, memory="8GB", mode="fast")
    with model.zipmoe_engine:
        assert packed_products(model, manifest, "fast") == EXPECTED[name]
        experts = f", experts decoded because {DECODED[name]}" if name in DECODED else ""
        assert f"; mode fast ({model.zipmoe_engine.fused.what_runs()}{experts}) with " in model.zipmoe_mode_line()
        with torch.inference_mode():
            model(input_ids=torch.tensor([[5]]))
        computed = [getattr(module, "_zipmoe_network", None) is not None for module in model.modules()]
        assert any(computed) == EXPECTED[name].experts


def test_what_makes_a_run_decode(packed_model, tmp_path: Path):
    packed = packed_model("mixtral")
    manifest = PackedFolder.open(packed.folder).manifest
    config = AutoConfig.from_pretrained(packed.folder)
    config._experts_implementation = "eager"
    assert packed_products(model_on_meta(config, packed.tiny.architecture), manifest, "fast") == ONLY_DENSE
    wide = zipmoe.load(packed.folder, memory="8GB", mode="fast", dtype=torch.float32)
    with wide.zipmoe_engine:
        assert packed_products(wide, manifest, "fast") == NO_PRODUCTS
        assert "mode fast (computed as exact: the kernels take BF16, not float32)" in wide.zipmoe_mode_line()
    eager = zipmoe.load(packed.folder, memory="8GB", mode="fast", experts_implementation="eager")
    with eager.zipmoe_engine:
        reason = "experts decoded because their outputs are combined in eager order"
        kernels = eager.zipmoe_engine.fused.what_runs()
        assert f"mode fast ({kernels}, {reason}) with eager" in eager.zipmoe_mode_line()
    pack(packed.source, tmp_path / "zstd", CodecSettings("zstd", 3, 2), jobs=1, min_dense_bytes=0)
    chunks = PackedFolder.open(tmp_path / "zstd").manifest
    meta = model_on_meta(AutoConfig.from_pretrained(packed.folder), packed.tiny.architecture)
    assert packed_products(meta, chunks, "fast") == NO_PRODUCTS
