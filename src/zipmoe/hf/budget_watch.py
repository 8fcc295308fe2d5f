"""Keeps the memory budget while a model runs: what a forward pass will need is reserved before it starts.

The key-value cache grows with the context and the workspace with the prompt; both have a reservation from the start.
Beyond it they take from the expert pool, and when nothing is left the pass fails with BudgetExceededError before it
allocates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zipmoe.engine.budget import KV_CACHE, WORKSPACE, workspace_bytes
from zipmoe.engine.engine import Engine
from zipmoe.engine.kv_cache import kv_cache_bytes_per_token, recurrent_state_bytes
from zipmoe.engine.memory_usage import return_free_memory
from zipmoe.engine.workspace import attention_bytes
from zipmoe.errors import BudgetExceededError
from zipmoe.hf.cache_room import CacheRoom, has_room
from zipmoe.hf.call_shape import call_shape
from zipmoe.hf.room_reservation import MissingRoom, RoomReservation, spare_bytes

GROWTH_TOKENS = 256
"""The cache's reservation grows by this many tokens where they fit, so that not every token resizes the pool."""


def watch_budget(model: nn.Module, engine: Engine) -> None:
    """Reserve with ``engine`` for every forward pass of ``model``, the model that a person calls, as it is now."""
    watch = _BudgetWatch(getattr(model, "config", None), engine, RoomReservation(model))
    model.register_forward_pre_hook(watch.before_forward, with_kwargs=True)


class _BudgetWatch:
    def __init__(self, config: Any, engine: Engine, rooms: RoomReservation) -> None:
        self._config = config
        self._engine = engine
        self._rooms = rooms
        self._token_bytes = kv_cache_bytes_per_token(config)
        self._state_bytes = recurrent_state_bytes(config)
        self._workspaces: dict[tuple[Any, ...], int] = {}
        self._rooms_before: list[CacheRoom] = []
        self._initial = {name: engine.budget.reserved(name) for name in (KV_CACHE, WORKSPACE)}

    def before_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sequences, length = call_shape(args, kwargs)
        kept = kwargs.get("logits_to_keep")
        logit_rows = sequences * (kept if isinstance(kept, int) and kept else length)
        workspace = self._workspace_bytes(sequences * length, logit_rows)
        self._reserve_workspace(workspace + self._attention_bytes(sequences, length, kwargs))
        if kwargs.get("use_cache") is not False:
            caches = [value for value in kwargs.values() if _is_cache(value)]
            layers = _cache_layers(caches)
            rooms = _rooms(layers) if length == 1 else []
            if rooms and rooms == self._rooms_before:
                return  # a token is written to rooms of the pass before: their memory is what was reserved for that
            self._rooms_before = []
            held = sum(cache_bytes(cache) for cache in caches)
            static = [layer for layer in layers if hasattr(layer, "max_cache_len")]
            if static and not any(layer.is_initialized for layer in static):
                held = 0  # counters at most
            tokens = _growth_tokens(static, len(layers)) if static else length
            grown = sequences * (tokens * self._token_bytes + (self._state_bytes if held == 0 else 0))
            missing = self._rooms.missing(caches, sequences, kwargs.get("attention_mask")) if length == 1 else None
            growing = [layer for layer in layers if not (length == 1 and has_room(layer))]
            if missing is not None:
                others = held - missing.held_bytes
                if len(growing) > len(missing.layers):
                    others += max(0, grown - missing.token_bytes)
                self._reserve_room(missing, others, sequences)
            else:
                # New tensors take the place of what the layers hold, room behind it included.
                grown = max(0, grown - spare_bytes(growing)) if growing or not layers else 0
                self._reserve_cache(held, grown)
            self._rooms_before = rooms

    def _workspace_bytes(self, step_tokens: int, logit_rows: int) -> int:
        """``workspace_bytes``, remembered: every token asks the same, and configurations answer slowly."""
        key = (step_tokens, logit_rows, getattr(self._config, "dtype", None))
        if key not in self._workspaces:
            self._workspaces = {key: workspace_bytes(self._config, step_tokens, logit_rows)}
        return self._workspaces[key]

    def _attention_bytes(self, sequences: int, length: int, kwargs: dict[str, Any]) -> int:
        mask = kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return attention_bytes(self._config, sequences, length, length, masked=False)
        keys = max(length, mask.shape[1])
        masked = length > 1 and not bool(mask.all())
        return attention_bytes(self._config, sequences, length, keys, masked=masked)

    def _reserve_workspace(self, bytes_of_pass: int) -> None:
        needed = max(self._initial[WORKSPACE], bytes_of_pass)
        reserved = self._engine.budget.reserved(WORKSPACE)
        if needed < reserved:
            return_free_memory()  # the pool is about to take it
        if needed != reserved:
            self._engine.account(WORKSPACE, needed)

    def _reserve_room(self, missing: MissingRoom, others: int, sequences: int) -> None:
        """Reserve for the room that a pass makes, and tell the cache how much it is: within the context that was
        declared at the start no more than is reserved for that, beyond it what is wanted, or what is left.

        Args:
            missing: layers that get new buffers.
            others: bytes of all else that will be cached.
            sequences: that the declared context is for.
        """
        declared = (self._initial[KV_CACHE] // sequences - self._state_bytes) // self._token_bytes
        capacity = min(missing.wanted, declared) if missing.fewest <= declared else missing.wanted
        try:
            self._grow(others + capacity * missing.token_bytes)
        except BudgetExceededError:
            left = self._engine.budget.reserved(KV_CACHE) - others
            capacity = max(missing.fewest, left // missing.token_bytes)
            self._grow(others + capacity * missing.token_bytes)
        missing.promise(capacity)

    def _grow(self, needed: int) -> None:
        reserved = self._engine.budget.reserved(KV_CACHE)
        if needed <= reserved:
            return
        try:
            self._engine.account(KV_CACHE, max(needed, reserved + GROWTH_TOKENS * self._token_bytes))
        except BudgetExceededError:
            self._engine.account(KV_CACHE, needed)

    def _reserve_cache(self, held: int, grown: int) -> None:
        needed = held + grown
        initial, reserved = self._initial[KV_CACHE], self._engine.budget.reserved(KV_CACHE)
        if needed > reserved:
            self._grow(needed)
        elif held == 0 and needed <= initial < reserved:  # a new sequence: the cache of the last one is gone
            self._engine.account(KV_CACHE, initial)


def _rooms(layers: list[Any]) -> list[CacheRoom]:
    """Of these cache layers, if another token has room behind all of them; else none."""
    return [layer._zipmoe_room for layer in layers] if all(map(has_room, layers)) else []


def _cache_layers(caches: list[Any]) -> list[Any]:
    """The layers of Transformers' cache objects, both parts of an encoder-decoder cache included."""
    parts = ("self_attention_cache", "cross_attention_cache")
    holders = [*caches, *(getattr(cache, part, None) for cache in caches for part in parts)]
    return [layer for holder in holders for layer in getattr(holder, "layers", ())]


def _growth_tokens(static: list[Any], layers: int) -> int:
    """Tokens of each sequence for which a cache with ``static`` ones among its layers allocates memory in a pass: all
    that it will ever hold in the first one, then none.
    """
    to_come: int = sum(layer.max_cache_len for layer in static if not layer.is_initialized)
    return -(-to_come // layers)


def cache_bytes(cache: Any) -> int:
    """Bytes of memory that the tensors of a Transformers cache object keep, room behind them included."""
    total = 0
    pending, seen = [cache], set()
    memories: set[int] = set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            memory = item.untyped_storage()
            if memory.data_ptr() not in memories:
                memories.add(memory.data_ptr())
                total += memory.nbytes()
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
        elif type(item).__module__.startswith("transformers.") and not isinstance(item, nn.Module):
            pending.extend(value for name, value in vars(item).items() if "config" not in name)
    return total


def _is_cache(value: Any) -> bool:
    """Whether an argument is a cache object; the name of the argument has changed between versions of Transformers."""
    return any(
        base.__name__.endswith("Cache") and base.__module__.startswith("transformers.") for base in type(value).__mro__
    )
