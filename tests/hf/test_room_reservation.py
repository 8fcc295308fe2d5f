"""The budget has what caches with room take, no more, and lets a declared context be reached without any more."""

from __future__ import annotations

import pytest
import torch
from native_steps import count_calls
from transformers import DynamicCache

import zipmoe
from zipmoe.engine.budget import KV_CACHE
from zipmoe.engine.fused_compute import STEP_ROWS_MAX
from zipmoe.engine.kv_cache import kv_cache_bytes_per_token
from zipmoe.errors import BudgetExceededError
from zipmoe.hf import budget_watch
from zipmoe.hf.budget_watch import cache_bytes
from zipmoe.hf.cache_room import capacity_for, has_room
from zipmoe.hf.configuration import ZipMoEConfig


@pytest.fixture
def calls(monkeypatch):
    return count_calls(monkeypatch)


def model_for(packed, context_tokens):
    settings = ZipMoEConfig(memory="8GB", mode="fast", context_tokens=context_tokens)
    return zipmoe.load(packed.folder, quantization_config=settings).eval()


def ids(rows, tokens):
    return torch.ones((rows, tokens), dtype=torch.int64)


def refuse_beyond(monkeypatch, engine, most):
    """As an engine whose pool is at its floor: the key-value cache gets ``most`` bytes and no more."""
    original, asked = engine.account, []

    def account(what, count):
        if what == KV_CACHE:
            asked.append(count)
            if count > most:
                raise BudgetExceededError("nothing is left")
        original(what, count)

    monkeypatch.setattr(engine, "account", account)
    return asked


CONTEXTS = [(1, 250, 300), (1, 1, 300), (4, 40, 75), (16, 17, 24), (3, 99, 100)]
"""Sequences, tokens of the prompt, declared tokens of each sequence."""


@pytest.mark.parametrize(("rows", "prompt", "context"), CONTEXTS)
def test_the_declared_context_is_reached_without_any_more_memory(
    packed_model, monkeypatch, calls, rows, prompt, context
):
    model = model_for(packed_model("qwen2_moe"), rows * context)
    with model.zipmoe_engine as engine:
        reserved = engine.budget.reserved(KV_CACHE)
        asked = refuse_beyond(monkeypatch, engine, reserved)
        cache = DynamicCache()
        model(input_ids=ids(rows, prompt), cache=cache)
        for _ in range(context - prompt):
            model(input_ids=ids(rows, 1), cache=cache)
            assert cache_bytes(cache) <= reserved
        assert cache.get_seq_length() == context
        assert asked == [] and engine.budget.reserved(KV_CACHE) == reserved
        assert calls.attention == 2 * (context - prompt)


@pytest.mark.parametrize(("rows", "prompt", "context"), CONTEXTS)
def test_beyond_it_every_token_that_fits_is_allowed(packed_model, monkeypatch, calls, rows, prompt, context):
    model = model_for(packed_model("qwen2_moe"), rows * context)
    with model.zipmoe_engine as engine:
        spare = 5 * rows * kv_cache_bytes_per_token(model.config)
        refuse_beyond(monkeypatch, engine, engine.budget.reserved(KV_CACHE) + spare)
        cache = DynamicCache()
        model(input_ids=ids(rows, prompt), cache=cache)
        for _ in range(context + 5 - prompt):
            model(input_ids=ids(rows, 1), cache=cache)
        assert cache_bytes(cache) <= engine.budget.reserved(KV_CACHE)
        with pytest.raises(BudgetExceededError):
            model(input_ids=ids(rows, 1), cache=cache)
        assert cache.get_seq_length() == context + 5


def test_a_second_prompt_within_the_declared_context(packed_model, monkeypatch, calls):
    """The room behind the first answer ends, and is not needed beside the prompt."""
    model = model_for(packed_model("qwen2_moe"), 300)
    with model.zipmoe_engine as engine:
        asked = refuse_beyond(monkeypatch, engine, engine.budget.reserved(KV_CACHE))
        cache = DynamicCache()
        for tokens in (200, 1, 1, 1, 90, 1, 1, 1, 1):
            model(input_ids=ids(1, tokens), cache=cache)
        assert cache.get_seq_length() == 297
        cache.crop(-100)
        model(input_ids=ids(1, 100), cache=cache)
        model(input_ids=ids(1, 1), cache=cache)
        assert asked == [] and calls.attention == 2 * 8


def with_hole(tokens):
    mask = torch.ones((2, tokens), dtype=torch.int64)
    mask[0, 0] = 0
    return mask


@pytest.mark.parametrize("rows", [2, STEP_ROWS_MAX, STEP_ROWS_MAX + 1])
@pytest.mark.parametrize("kind", ["no mask", "mask of ones", "mask", "eager"])
def test_what_is_reserved_is_what_the_cache_takes(packed_model, monkeypatch, calls, rows, kind):
    """Room where there will be room, and none where the call cannot use it."""
    monkeypatch.setattr(budget_watch, "GROWTH_TOKENS", 0)
    model = model_for(packed_model("qwen2_moe"), 64)
    with model.zipmoe_engine as engine:
        cache = DynamicCache()
        for tokens in (4, 1, 1):
            model(input_ids=ids(1, tokens), cache=cache)
        assert all(layer.self_attn._zipmoe_native.checked for layer in model.model.layers)
        if kind == "eager":
            model.set_attn_implementation("eager")
        cache, most, before, options = DynamicCache(), engine.budget.reserved(KV_CACHE), calls.attention, {}
        for tokens in (300, 1, 1, 1, 40, 1, 1):
            length = cache.get_seq_length() + tokens
            if kind.startswith("mask"):
                mask = ids(rows, length)
                mask[0, 0] = int(kind == "mask of ones")
                options = {"attention_mask": mask}
            model(input_ids=ids(rows, tokens), cache=cache, **options)
            most = max(most, cache_bytes(cache))
            assert engine.budget.reserved(KV_CACHE) == most
        native = rows <= STEP_ROWS_MAX and kind in ("no mask", "mask of ones")
        assert (calls.attention > before) == native == has_room(cache.layers[0])
        held = capacity_for(344) if native else 345
        assert cache_bytes(cache) == rows * held * kv_cache_bytes_per_token(model.config)
