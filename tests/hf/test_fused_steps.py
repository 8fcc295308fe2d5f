"""Decode steps of whole models: how they are generated, counted, switched off, and kept within the budget."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import threading

import pytest
import torch
from native_steps import count_calls, gaussian, load
from transformers import DynamicCache
from transformers.models.qwen2_moe import modeling_qwen2_moe as family

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.budget import KV_CACHE
from zipmoe.engine.kv_cache import kv_cache_bytes_per_token
from zipmoe.errors import InvalidArgumentError, UnsupportedOperationError
from zipmoe.hf.budget_watch import cache_bytes
from zipmoe.hf.cache_room import capacity_for
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.store import pack_plan
from zipmoe.store.pack import pack


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


def generated(packed, model, **options):
    ids = packed.inputs["input_ids"][:1]
    mask = options.pop("attention_mask", torch.ones_like(ids))
    return model.generate(ids, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, **options)


def test_switched_off(packed_model, calls):
    packed = packed_model("qwen2_moe")
    model = load(packed.folder, fused_steps=False)
    with model.zipmoe_engine:
        generated(packed, model, do_sample=False)
        assert calls.attention == calls.feed_forward == 0
        assert not model.zipmoe_fused_steps().any()
        assert "one call each" not in model.zipmoe_mode_line()
    with pytest.raises(InvalidArgumentError, match="fused_steps is 1"):
        ZipMoEConfig(fused_steps=1)


def test_the_mode_line_says_what_is_native(packed_model):
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        line = model.zipmoe_mode_line()
        assert "; steps in one call each: 2 attentions, 2 feed-forward networks, 5 norms, 2 routers" in line
        model.model.layers[1].self_attn._zipmoe_native = None
        assert "; steps in one call each: 1 attention, 2 feed-forward" in model.zipmoe_mode_line()
        model.float()
        assert "one call each" not in model.zipmoe_mode_line()


def test_layers_are_whole_as_long_as_their_attention_is_native(packed_model):
    model = load(packed_model("mixtral").folder)
    with model.zipmoe_engine:
        assert model.zipmoe_fused_steps().layers == 2
        model.model.layers[1].self_attn._zipmoe_native = None
        assert model.zipmoe_fused_steps().layers == 1


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 2, "num_return_sequences": 2},
        {"do_sample": False, "prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_generation_is_that_of_the_familys_own_code(name, options, packed_model, calls):
    packed = packed_model(name)
    native, own = load(packed.folder), load(packed.folder, fused_steps=False)
    with native.zipmoe_engine, own.zipmoe_engine:
        outputs = []
        for model in (native, own):
            torch.manual_seed(0)
            outputs.append(generated(packed, model, **options))
            if model is native:
                assert calls.attention > 0
                counted = calls.attention
        assert calls.attention == counted
        assert torch.equal(*outputs)


def test_assisted_generation(packed_model, calls):
    packed = packed_model("qwen3_moe")
    native, helper = load(packed.folder), load(packed_model("mixtral").folder)
    own = load(packed.folder, fused_steps=False)
    with native.zipmoe_engine, helper.zipmoe_engine, own.zipmoe_engine:
        found = generated(packed, native, do_sample=False, assistant_model=helper)
        assert calls.attention > 0
        # Not those without an assistant: several tokens at once are rounded differently in any implementation.
        assert torch.equal(found, generated(packed, own, do_sample=False, assistant_model=helper))


def test_a_padded_batch_is_the_familys(packed_model, calls):
    packed = packed_model("qwen2_moe")
    model, own = load(packed.folder), load(packed.folder, fused_steps=False)
    with model.zipmoe_engine, own.zipmoe_engine:
        ids = packed.inputs["input_ids"].clone()
        mask = torch.ones_like(ids)
        ids[0, :3], mask[0, :3] = 0, 0
        settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        found = model.generate(ids, attention_mask=mask, **settings)
        assert calls.attention == 0 and calls.feed_forward > 0
        assert torch.equal(found, own.generate(ids, attention_mask=mask, **settings))
        mask[:] = 1
        model.generate(ids, attention_mask=mask, **settings)
        assert calls.attention == 2 * 7  # one layer and token after the other, for both sequences


def test_a_static_cache(packed_model, calls):
    packed = packed_model("qwen2_moe")
    model, own = load(packed.folder), load(packed.folder, fused_steps=False)
    with model.zipmoe_engine, own.zipmoe_engine:
        expected = generated(packed, own, do_sample=False, cache_implementation="static")
        assert torch.equal(generated(packed, model, do_sample=False, cache_implementation="static"), expected)
        assert calls.attention == 0


def test_eager_attention(packed_model, calls):
    packed = packed_model("qwen2_moe")
    model = load(packed.folder)
    with model.zipmoe_engine:
        model.set_attn_implementation("eager")
        output = model(input_ids=packed.inputs["input_ids"], use_cache=True)
        cache = output.cache
        step = model(input_ids=torch.tensor([[5], [6]]), cache=cache, output_attentions=True)
        assert calls.attention == 0
        assert [tuple(each.shape) for each in step.attentions] == [(2, 4, 1, 10)] * 2
        model.set_attn_implementation("sdpa")
        model(input_ids=torch.tensor([[5], [6]]), cache=cache)
        assert calls.attention == 2


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_under_either_name(packed_model, calls, name):
    packed = packed_model("qwen3_moe")
    models = load(packed.folder), load(packed.folder, fused_steps=False)
    with models[0].zipmoe_engine, models[1].zipmoe_engine:
        logits = []
        for model in models:
            cache = DynamicCache()
            model(input_ids=torch.tensor([[5, 9, 31]]), **{name: cache})
            steps = [model(input_ids=torch.tensor([[token]]), **{name: cache}).logits for token in (7, 3, 12)]
            assert cache.get_seq_length() == 6
            logits.append(torch.cat(steps))
        assert calls.attention == 6
        assert torch.allclose(*(each.float() for each in logits), rtol=0.05, atol=0.05)


def test_sliding_windows(packed_model, tmp_path, calls):
    """Within a window everything is seen; beyond it the family's masks decide, whatever the cache is."""
    folder = tmp_path / "sliding"
    shutil.copytree(packed_model("mixtral").folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 6}))
    native, own = load(folder), load(folder, fused_steps=False)
    with native.zipmoe_engine, own.zipmoe_engine:
        for make in (DynamicCache, lambda: DynamicCache(config=native.config)):
            logits = []
            for model in (native, own):
                cache = make()
                model(input_ids=torch.tensor([[5, 9, 31]]), cache=cache)
                steps = [model(input_ids=torch.tensor([[t]]), cache=cache).logits for t in range(3, 12)]
                logits.append(torch.cat(steps))
            assert torch.allclose(*(each.float() for each in logits), rtol=0.05, atol=0.05)
        assert calls.tokens == [3, 3, 4, 4]


def test_outputs_that_are_captured(packed_model, calls):
    """Transformers finds the modules whose results it returns by their classes."""
    packed = packed_model("qwen2_moe")
    models = load(packed.folder), load(packed.folder, fused_steps=False)
    with models[0].zipmoe_engine, models[1].zipmoe_engine:
        steps = []
        for model in models:
            cache = DynamicCache()
            model(input_ids=torch.tensor([[5, 9, 31]]), cache=cache)
            for token in (7, 3):
                step = model(
                    input_ids=torch.tensor([[token]]), cache=cache, output_router_logits=True, output_hidden_states=True
                )
            steps.append(step)
        assert calls.attention == 4
        for name in ("router_logits", "hidden_states"):
            found, expected = (getattr(step, name) for step in steps)
            assert len(found) == len(expected) > 0
            for one, other in zip(found, expected, strict=True):
                assert one.shape == other.shape and one.dtype == other.dtype
                assert torch.allclose(one.float(), other.float(), rtol=0.05, atol=0.05)


def test_copies_are_the_familys_own(packed_model):
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine, torch.no_grad():
        for _ in range(2):  # early routing is added to the routers by the first pass
            norm, router = model.model.norm, model.model.layers[0].mlp.gate
            for module, kind in ((norm, family.Qwen2MoeRMSNorm), (router, family.Qwen2MoeTopKRouter)):
                x = gaussian(1, 64)
                expected = kind.forward(module, x)
                for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
                    assert type(made) is kind
                    assert not [name for name in vars(made) if name.startswith("_zipmoe")]
                    found = made(x)
                    for one, other in zip(found, expected, strict=True):
                        assert torch.equal(one, other)
            model(input_ids=torch.ones((1, 5), dtype=torch.int64))
        for packed in (model.model.layers[0].self_attn, model.model.layers[0].mlp.shared_expert):
            with pytest.raises(UnsupportedOperationError, match="cannot be copied"):
                copy.deepcopy(packed)


@pytest.mark.parametrize(
    "kind, path",
    [
        (family.Qwen2MoeAttention, "self_attn"),
        (family.Qwen2MoeMLP, "mlp.shared_expert"),
        (family.Qwen2MoeRMSNorm, "input_layernorm"),
        (family.Qwen2MoeTopKRouter, "mlp.gate"),
    ],
)
def test_a_forward_that_its_class_is_given_later(packed_model, monkeypatch, kind, path):
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        cache = DynamicCache()
        model(input_ids=torch.tensor([[5, 9, 31]]), cache=cache)
        model(input_ids=torch.tensor([[5]]), cache=cache)
        module, seen = model.model.layers[0].get_submodule(path), []
        original = kind.forward

        def noted(self, *args, **kwargs):
            seen.append(self)
            return original(self, *args, **kwargs)

        model(input_ids=torch.tensor([[5]]), cache=cache)
        assert not seen
        monkeypatch.setattr(kind, "forward", noted)
        model(input_ids=torch.tensor([[5]]), cache=cache)
        assert any(each is module for each in seen)


def test_two_threads_with_one_model(packed_model):
    packed = packed_model("qwen2_moe")
    model = load(packed.folder)
    with model.zipmoe_engine:
        model.generate(packed.inputs["input_ids"][:1], max_new_tokens=3)  # the first uses are the family's
        expected = [model.generate(packed.inputs["input_ids"][i : i + 1], max_new_tokens=20) for i in (0, 1)]
        found = [[], []]

        def work(i):
            for _ in range(3):
                found[i].append(model.generate(packed.inputs["input_ids"][i : i + 1], max_new_tokens=20))

        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in (0, 1):
            assert len(found[i]) == 3
            assert all(torch.equal(each, expected[i]) for each in found[i])


def test_the_room_of_a_cache_is_reserved(packed_model):
    packed = packed_model("qwen2_moe")
    model = load(packed.folder)
    with model.zipmoe_engine:
        budget = model.zipmoe_engine.budget
        cache = DynamicCache()
        model(input_ids=torch.ones((3, 700), dtype=torch.int64), cache=cache)
        before = budget.reserved(KV_CACHE)
        assert before >= cache_bytes(cache)
        for _ in range(2):
            model(input_ids=torch.ones((3, 1), dtype=torch.int64), cache=cache)
        held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
        assert held == cache_bytes(cache) == 3 * capacity_for(702) * kv_cache_bytes_per_token(model.config)
        assert budget.reserved(KV_CACHE) >= held


def test_a_pass_of_another_length_within_a_run(packed_model, calls):
    """Prefix caching and chunks: any number of tokens, behind what single tokens left in the cache."""
    packed = packed_model("qwen2_moe")
    models = load(packed.folder), load(packed.folder, fused_steps=False)
    with models[0].zipmoe_engine, models[1].zipmoe_engine:
        logits = []
        for model in models:
            cache, parts = DynamicCache(), []
            for count in (4, 1, 1, 3, 1, 6, 1):
                ids = torch.arange(10, 10 + count)[None]
                parts.append(model(input_ids=ids, cache=cache).logits[0])
            logits.append(torch.cat(parts))
        assert calls.attention == 2 * 4
        assert torch.allclose(*(each.float() for each in logits), rtol=0.05, atol=0.05)


def test_matrices_of_several_records(packed_model, tmp_path, monkeypatch, calls):
    """Attention takes them; a feed-forward network takes one record for each of its matrices."""
    packed = packed_model("qwen2_moe")
    monkeypatch.setattr(pack_plan, "DENSE_BLOCK_BYTES", 4096)
    pack(packed.source, tmp_path / "blocks", CodecSettings("fx3", None, 1), jobs=1, min_dense_bytes=0)
    whole, blocks = load(packed.folder), load(tmp_path / "blocks")
    with whole.zipmoe_engine, blocks.zipmoe_engine:
        projection = blocks.model.layers[0].self_attn.q_proj._zipmoe_parameter
        assert len(blocks.zipmoe_engine._catalogue.dense_matrix(projection).blocks) == 2
        assert blocks.zipmoe_fused_steps().attentions == 2 and blocks.zipmoe_fused_steps().feed_forwards == 0
        logits = []
        for model in (whole, blocks):
            cache = DynamicCache()
            model(input_ids=torch.tensor([[5, 9, 31]]), cache=cache)
            logits.append(
                torch.cat([model(input_ids=torch.tensor([[token]]), cache=cache).logits for token in range(9)])
            )
        assert calls.attention == 2 * 2 * 9 and calls.feed_forward == 2 * 9
        assert torch.allclose(*(each.float() for each in logits), rtol=0.05, atol=0.05)
