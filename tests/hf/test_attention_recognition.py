"""Which attention is computed by the native core: parts, code and results, and what looks alike."""

from __future__ import annotations

import functools
import inspect
import types

import pytest
import torch
from native_steps import Attention, close, count_calls, gaussian, load
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from zipmoe import _native
from zipmoe.hf.fused_attention import FusedAttention, fuse_attention


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    """Pairs of neighbours instead of halves."""

    def rotated(x):
        x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return qwen3.apply_rotary_pos_emb(x, x, cos, sin)[0]

    return rotated(q), rotated(k)


def backwards(q, k, cos, sin, unsqueeze_dim=1):
    return qwen3.apply_rotary_pos_emb(q, k, cos, -sin)


def not_at_all(q, k, cos, sin, unsqueeze_dim=1):
    return q, k


def only_queries(q, k, cos, sin, unsqueeze_dim=1):
    return qwen3.apply_rotary_pos_emb(q, k, cos, sin)[0], k


def doubled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    return q * 2, k


def partial(q, k, cos, sin, unsqueeze_dim=1):
    """Only the first half of the dimensions."""
    first = qwen3.apply_rotary_pos_emb(q[..., :8], k[..., :8], cos, sin)
    return tuple(torch.cat([one, whole[..., 8:]], dim=-1) for one, whole in zip(first, (q, k), strict=True))


def attention_with(rotation):
    """A class whose code is that of Qwen3, with another function under the name of its rotation."""
    original = qwen3.Qwen3MoeAttention
    function = inspect.unwrap(original.forward)
    names = {**function.__globals__, "apply_rotary_pos_emb": rotation}
    forward = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    return type("Other", (original,), {"forward": forward})


@pytest.mark.parametrize("rotation", [interleaved, backwards, not_at_all, only_queries, doubled])
def test_other_rotations_differ_at_the_first_use(packed_model, calls, rotation):
    model = load(packed_model("qwen3_moe").folder, fused_steps=False)
    with model.zipmoe_engine:
        attend, cache = Attention(model), DynamicCache()
        attend.module.__class__ = attention_with(rotation)
        assert fuse_attention(attend.module)
        attend(cache)  # the family's: the cache is empty
        attend(cache)
        assert attend.module._zipmoe_native is None
        attend(cache)
        assert calls.attention == 1


@pytest.mark.skipif(not _native.attends_prompts(), reason="this machine has no kernel for prompts")
@pytest.mark.parametrize("rotation", [interleaved, backwards, not_at_all, only_queries, doubled])
def test_other_rotations_differ_at_the_first_prompt(packed_model, rotation):
    model = load(packed_model("qwen3_moe").folder, fused_steps=False)
    with model.zipmoe_engine:
        attend, cache = Attention(model), DynamicCache()
        attend.module.__class__ = attention_with(rotation)
        assert fuse_attention(attend.module)
        attend(cache, tokens=5)
        assert attend.module._zipmoe_native is None


def test_a_rotation_of_some_dimensions(packed_model, calls):
    models = [load(packed_model("qwen3_moe").folder, fused_steps=False) for _ in range(2)]
    with models[0].zipmoe_engine, models[1].zipmoe_engine:
        outputs = []
        for model in models:
            attend, cache = Attention(model), DynamicCache()
            attend.module.__class__ = attention_with(partial)
            if model is models[0]:
                assert fuse_attention(attend.module)
            outputs.append([])
            for begin, count in ((0, 5), (5, 1), (6, 1), (7, 1)):
                positions = model.model.rotary_emb(gaussian(1, count, 64), torch.arange(begin, begin + count)[None])
                # Those of heads of 8 dimensions: every other angle, twice.
                angles = tuple(angle[..., [0, 2, 4, 6, 0, 2, 4, 6]].contiguous() for angle in positions)
                hidden = gaussian(1, count, 64, seed=begin)
                outputs[-1].append(attend.of(hidden, begin, cache, position_embeddings=angles))
        assert models[0].model.layers[0].self_attn._zipmoe_native.checked
        assert calls.attention == 3
        for found, expected in zip(*outputs, strict=True):
            assert close(found, expected)


class Clamped(qwen3.Qwen3MoeAttention):
    """Only large values show it."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        hidden_states = hidden_states.clamp(-1e4, 1e4)
        return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)


class Tempered(qwen3.Qwen3MoeAttention):
    """Only far positions show it."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        self.scaling = self.head_dim**-0.5 * (1 + torch.log1p(kwargs["position_ids"].max() // 8192).item())
        return super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)


class NormedLater(qwen3.Qwen3MoeAttention):
    """With weights that are nearly equal, only nearly the same."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, cache=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *position_embeddings)
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        output, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling)
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights


class Wrapped(qwen3.Qwen3MoeAttention):
    """Code that cannot be read: another function is called."""

    forward = functools.partialmethod(qwen3.Qwen3MoeAttention.forward)


@pytest.mark.parametrize("other", [Clamped, Tempered, NormedLater, Wrapped])
def test_code_that_mentions_something_else(packed_model, other):
    model = load(packed_model("qwen3_moe").folder, fused_steps=False)
    with model.zipmoe_engine:
        module = model.model.layers[0].self_attn
        original = type(module)
        module.__class__ = other
        assert not fuse_attention(module)
        module.__class__ = original
        assert fuse_attention(module)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "softcap", 50.0),
        lambda module: setattr(module, "rotary_fn", torch.nn.Identity()),
        lambda module: setattr(module, "sinks", torch.nn.Parameter(torch.zeros(4), requires_grad=False)),
        lambda module: module.register_buffer("inv_freq", torch.zeros(4)),
        lambda module: setattr(module, "head_dim", 8),
        lambda module: setattr(module, "head_dim", 0),
        lambda module: setattr(module, "scaling", torch.tensor(0.25)),
        lambda module: setattr(module, "q_norm", torch.nn.LayerNorm(16, bias=False, dtype=torch.bfloat16)),
        lambda module: setattr(module, "k_norm", qwen3.Qwen3MoeRMSNorm(32).bfloat16()),
        lambda module: setattr(module, "o_proj", torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)),
    ],
)
def test_parts_that_are_not_known(packed_model, change):
    model = load(packed_model("qwen3_moe").folder, fused_steps=False)
    with model.zipmoe_engine:
        module = model.model.layers[0].self_attn
        change(module)
        assert not fuse_attention(module)


def test_only_what_is_attention_of_the_known_shape(packed_model):
    kinds = {
        "qwen2_moe": 2,
        "mixtral": 2,
        "qwen3_moe": 2,
        "ernie4_5_moe": 2,
        "deepseek_v3": 0,
        "gpt_oss": 0,
        "jamba": 0,
    }
    for name, count in kinds.items():
        model = load(packed_model(name).folder)
        with model.zipmoe_engine:
            assert sum(isinstance(module, FusedAttention) for module in model.modules()) == count, name
