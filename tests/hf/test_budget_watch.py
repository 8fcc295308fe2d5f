"""Reservations follow what forward passes need, before they allocate."""

from __future__ import annotations

import pytest
import torch
from fake_engine import FakeEngine
from transformers import DynamicCache, StaticCache

from zipmoe.engine.budget import KV_CACHE, WORKSPACE, MemoryBudget, workspace_bytes
from zipmoe.engine.kv_cache import kv_cache_bytes_per_token
from zipmoe.errors import BudgetExceededError
from zipmoe.hf.budget_watch import GROWTH_TOKENS, cache_bytes, watch_budget
from zipmoe.hf.cache_room import CacheRoom


class Echo(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, input_ids=None, cache=None, use_cache=None, attention_mask=None):
        return input_ids


@pytest.fixture
def watched(mixtral):
    model = mixtral.load()
    engine = FakeEngine(model._zipmoe_folder)
    token = kv_cache_bytes_per_token(model.config)
    engine.budget = MemoryBudget(1 << 40, {KV_CACHE: 10 * token, WORKSPACE: 1 << 30})
    echo = Echo(model.config)
    watch_budget(echo, engine)
    return echo, engine, token


def tokens(count):
    return torch.zeros(1, count, dtype=torch.int64)


def cache_of(config, count):
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, count, config.head_dim)
        cache.update(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16), layer)
    return cache


def test_the_estimate_is_what_a_cache_really_takes(watched):
    echo, _, token = watched
    assert cache_bytes(cache_of(echo.config, 7)) == 7 * token


def test_within_the_reservation_nothing_changes(watched):
    echo, engine, token = watched
    echo(tokens(10))
    echo(input_ids=tokens(3), cache=cache_of(echo.config, 7))
    assert engine.budget.reserved(KV_CACHE) == 10 * token


def test_growth_is_reserved_in_steps_and_given_back(watched):
    echo, engine, token = watched
    echo(input_ids=tokens(1), cache=cache_of(echo.config, 10))
    assert engine.budget.reserved(KV_CACHE) == (10 + GROWTH_TOKENS) * token
    echo(input_ids=tokens(1), cache=cache_of(echo.config, 11))
    assert engine.budget.reserved(KV_CACHE) == (10 + GROWTH_TOKENS) * token
    echo(tokens(2))
    assert engine.budget.reserved(KV_CACHE) == 10 * token


def test_the_last_tokens_that_fit_are_allowed(watched):
    echo, engine, token = watched
    engine.budget.set_reservation("pool", engine.budget.free_bytes - 2 * token)
    echo(tokens(12))
    assert engine.budget.reserved(KV_CACHE) == 12 * token
    with pytest.raises(BudgetExceededError, match="key-value cache"):
        echo(tokens(13))


def test_passes_without_a_cache_reserve_none(watched):
    echo, engine, token = watched
    echo(tokens(1000), use_cache=False)
    assert engine.budget.reserved(KV_CACHE) == 10 * token


def test_long_prompts_reserve_workspace(mixtral):
    model = mixtral.load()
    engine = FakeEngine(model._zipmoe_folder)
    engine.budget = MemoryBudget(1 << 40, {KV_CACHE: 1 << 30, WORKSPACE: 1})
    echo = Echo(model.config)
    watch_budget(echo, engine)
    echo(tokens(4000))
    long = engine.budget.reserved(WORKSPACE)
    echo(tokens(1))
    assert 1 < engine.budget.reserved(WORKSPACE) < long


def test_a_static_cache_is_reserved_whole_before_its_first_pass(watched):
    echo, engine, token = watched
    cache = StaticCache(config=echo.config, max_cache_len=5000)
    echo(input_ids=torch.zeros(2, 3, dtype=torch.int64), cache=cache)
    assert engine.budget.reserved(KV_CACHE) == 2 * 5000 * token


@pytest.fixture
def workspace_of(mixtral):
    """Workspace reserved for a pass, beyond what it takes without a matrix of scores."""
    model = mixtral.load()

    def reserved(attention, queries, mask):
        engine = FakeEngine(model._zipmoe_folder)
        engine.budget = MemoryBudget(1 << 40, {KV_CACHE: 1 << 30, WORKSPACE: 1})
        echo = Echo(model.config)
        model.config._attn_implementation = attention
        watch_budget(echo, engine)
        echo(input_ids=torch.zeros(len(mask), queries, dtype=torch.int64), attention_mask=mask)
        tokens = len(mask) * queries
        return engine.budget.reserved(WORKSPACE) - workspace_bytes(model.config, tokens, tokens)

    return reserved


def test_scores_of_eager_attention_are_reserved(workspace_of, mixtral):
    mask = torch.ones(2, 3000, dtype=torch.int64)
    entries = 2 * 2000 * 3000
    heads = mixtral.load().config.num_attention_heads
    assert workspace_of("eager", 2000, mask) >= 12 * heads * entries  # measured: what it takes in BF16
    assert workspace_of("sdpa", 2000, mask) == 0
    mask[0, 0] = 0
    assert entries <= workspace_of("sdpa", 2000, mask) <= 4 * entries


def test_room_behind_cached_tokens_counts(watched):
    echo, _, token = watched
    cache = cache_of(echo.config, 7)
    for layer in cache.layers:
        room = CacheRoom.behind(layer)
        room.give(layer, 7)
    assert cache_bytes(cache) == room.capacity * token
    assert room.capacity > 7
