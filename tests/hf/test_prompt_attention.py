"""Attention of whole prompts in the native core, and what of it is left to the family."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from native_steps import Attention, close, gaussian, load
from transformers import DynamicCache, StaticCache

from zipmoe import _native
from zipmoe.engine.fused_compute import FusedCompute
from zipmoe.hf.budget_watch import cache_bytes

pytestmark = pytest.mark.skipif(not _native.attends_prompts(), reason="this machine has no kernel for prompts")


@dataclass
class Prompts:
    """How many prompts were native calls."""

    all: int = 0


@pytest.fixture
def prompts(monkeypatch):
    counts = Prompts()
    original = FusedCompute.prompt_attention

    def counted(self, *args):
        counts.all += 1
        return original(self, *args)

    monkeypatch.setattr(FusedCompute, "prompt_attention", counted)
    return counts


@pytest.fixture(params=["qwen2_moe", "mixtral", "qwen3_moe"])
def pair(request, packed_model):
    """The same attention, native and the family's own."""
    folder = packed_model(request.param).folder
    native, own = load(folder), load(folder, fused_steps=False)
    with native.zipmoe_engine, own.zipmoe_engine:
        yield Attention(native), Attention(own)


@pytest.fixture
def attend(packed_model, prompts):
    """Attention that has had its first prompt."""
    model = load(packed_model("qwen3_moe").folder)
    with model.zipmoe_engine:
        attend = Attention(model)
        attend(DynamicCache(), tokens=5)
        assert attend.module._zipmoe_native.prompts.checked and prompts.all == 1
        yield attend


@pytest.mark.parametrize("rows, tokens", [(1, 2), (1, 3), (2, 31), (1, 64), (2, 65), (1, 200), (70, 2)])
def test_prompts_and_steps_behind_them(pair, prompts, rows, tokens):
    outputs, caches = [], []
    for attend in pair:
        attend(DynamicCache(), rows=rows, tokens=tokens)
        cache = DynamicCache()
        outputs.append([attend(cache, rows=rows, tokens=n) for n in (tokens, 1, 1, 1)])
        caches.append(cache.layers[0])
    assert prompts.all == 2
    for found, expected in zip(*outputs, strict=True):
        assert close(found, expected)
    assert caches[0].get_seq_length() == tokens + 3
    assert close(caches[0].keys, caches[1].keys) and close(caches[0].values, caches[1].values)


def test_each_sequence_has_positions_of_its_own(pair, prompts):
    outputs = []
    for attend in pair:
        hidden = gaussian(2, 40, attend.model.config.hidden_size)
        positions = torch.stack([torch.arange(40), torch.arange(7, 47)])
        angles = attend.model.model.rotary_emb(hidden, positions)
        attend(DynamicCache(), tokens=5)
        outputs.append(attend.of(hidden, 0, DynamicCache(), position_embeddings=angles))
    assert prompts.all == 2
    assert close(*outputs)


def test_a_prompt_caches_what_steps_cache(attend, prompts):
    """The same keys, to the bit: the prompt may be continued or repeated either way."""
    hidden = gaussian(1, 9, 64, seed=5)
    together, apart = DynamicCache(), DynamicCache()
    attend.of(hidden, 0, together)
    for token in range(9):
        attend.of(hidden[:, token : token + 1].contiguous(), token, apart)
    for name in ("keys", "values"):  # the first two of those apart are the family's: an empty cache, the comparison
        one, other = (getattr(cache.layers[0], name)[:, :, 2:] for cache in (together, apart))
        assert torch.equal(one, other)


def test_the_cache_holds_no_more_than_the_prompt(attend):
    cache = DynamicCache()
    attend(cache, rows=2, tokens=30)
    config = attend.model.config
    assert cache_bytes(cache) == 2 * 2 * 2 * 30 * config.num_key_value_heads * attend.module.head_dim
    assert cache.layers[0].is_initialized


@pytest.mark.parametrize("make", [DynamicCache, lambda config: DynamicCache()], ids=["all layers", "no layers yet"])
def test_caches_of_both_kinds(attend, prompts, make):
    cache = make(config=attend.model.config)
    attend(cache, tokens=6)
    assert prompts.all == 2 and cache.get_seq_length() == 6
    cache.reset()
    attend(cache, tokens=4)
    assert prompts.all == 3 and cache.get_seq_length() == 4


def test_another_layer_first(packed_model, prompts):
    """Layers of the cache before the module's own are made as by the family."""
    model = load(packed_model("qwen3_moe").folder)
    with model.zipmoe_engine:
        attend = Attention(model, layer=1)
        attend(DynamicCache(), tokens=4)
        cache = DynamicCache()
        attend(cache, tokens=4)
        assert prompts.all == 2
        assert [layer.is_initialized for layer in cache.layers] == [False, True]


def test_behind_cached_tokens_it_is_the_familys(attend, prompts):
    cache = DynamicCache()
    attend(cache, tokens=4)
    attend(cache, tokens=3)
    attend(cache)
    attend(cache, tokens=2)
    assert prompts.all == 2


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.zeros((1, 1, 4, 4), dtype=torch.bfloat16)},
        {"attention_mask": torch.ones((1, 1, 4, 4), dtype=torch.bool)},
        {"is_causal": False},
        {"is_causal": True},
        {"output_attentions": True},
    ],
    ids=str,
)
def test_options_go_to_the_family(attend, prompts, options):
    attend(DynamicCache(), tokens=4, **options)
    assert prompts.all == 1
    attend(DynamicCache(), tokens=4)
    assert prompts.all == 2


def test_modules_that_are_not_causal(attend, prompts):
    attend.module.is_causal = False
    attend(DynamicCache(), tokens=4)
    assert prompts.all == 1


def test_windows(attend, prompts):
    attend.module.sliding_window = 4
    attend(DynamicCache(), tokens=5)
    assert prompts.all == 1
    attend(DynamicCache(), tokens=4)
    assert prompts.all == 2


def test_other_caches(attend, prompts):
    class Noted(DynamicCache):
        pass

    attend(Noted(), tokens=4)
    attend(StaticCache(config=attend.model.config, max_cache_len=16), tokens=4)
    hidden = gaussian(1, 4, 64)
    attend.of(hidden, 0, None)
    assert prompts.all == 1


def test_hooks_of_the_parts_are_called(attend, prompts):
    seen = []
    handle = attend.module.k_proj.register_forward_hook(lambda *_: seen.append(1))
    attend(DynamicCache(), tokens=4)
    assert seen == [1] and prompts.all == 1
    handle.remove()
    attend(DynamicCache(), tokens=4)
    assert prompts.all == 2


def test_the_first_prompt_decides(packed_model, prompts):
    """Another result: the family's own code from then on. No result that tells anything: compared again."""
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        attend = Attention(model)
        native = attend.module._zipmoe_native
        nothing = torch.full((1, 4, 64), torch.nan, dtype=torch.bfloat16)
        for _ in range(2):
            assert attend.of(nothing, 0, DynamicCache()).isnan().all()
        assert prompts.all == 2 and not native.prompts.checked
        attend(DynamicCache(), tokens=90)
        assert native.prompts.checked and not native.checked
        other = Attention(model, layer=1)
        other.module._zipmoe_native.ingredients.unchanged = lambda: True
        other.module.scaling = 3 * other.module.scaling  # not noticed: what is compared differs
        cache = DynamicCache()
        other(cache, tokens=4)
        assert other.module._zipmoe_native is None
        before = prompts.all
        other(DynamicCache(), tokens=4)
        assert prompts.all == before


def test_positions_that_rotate_nothing_tell_nothing(packed_model, prompts):
    model = load(packed_model("qwen2_moe").folder)
    with model.zipmoe_engine:
        attend = Attention(model)
        shape = (1, 3, attend.module.head_dim)
        flat = torch.ones(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16)
        attend.of(gaussian(1, 3, 64), 0, DynamicCache(), position_embeddings=flat)
        assert prompts.all == 1 and not attend.module._zipmoe_native.prompts.checked


def test_only_the_first_tokens_of_the_first_prompt_are_computed_twice(packed_model, monkeypatch):
    shapes = []
    original = FusedCompute.prompt_attention

    def noted(self, layer, x, *args):
        shapes.append(tuple(x.shape[:2]))
        return original(self, layer, x, *args)

    monkeypatch.setattr(FusedCompute, "prompt_attention", noted)
    model = load(packed_model("qwen3_moe").folder)
    with model.zipmoe_engine:
        for layer, (rows, tokens) in enumerate(((1, 300), (40, 3))):
            Attention(model, layer=layer)(DynamicCache(), rows=rows, tokens=tokens)
    assert shapes == [(1, 32), (16, 2)]
