"""The memory budget: one total for everything that the process keeps, and a ledger of who has reserved what.

The order of events is always: reserve, then allocate. What remains after all reservations is the expert pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zipmoe.engine.byte_quantity import format_bytes, parse_bytes
from zipmoe.engine.kv_cache import kv_cache_bytes
from zipmoe.engine.limits import MemoryLimit, detect_limits
from zipmoe.engine.memory_usage import charged_bytes
from zipmoe.engine.model_shape import text_config, value
from zipmoe.engine.workspace import DEFAULT_STEP_TOKENS, WORKSPACE_BYTES, workspace_bytes
from zipmoe.errors import BudgetExceededError, InvalidArgumentError

__all__ = [
    "WORKSPACE_BYTES",
    "MemoryBudget",
    "MemoryLimit",
    "budget_bytes",
    "default_budget_bytes",
    "detect_limits",
    "format_bytes",
    "itemise",
    "parse_bytes",
    "plan_budget",
    "workspace_bytes",
]

PROCESS = "interpreter and libraries"
UNPACKED = "unpacked tensors"
DENSE = "packed dense matrices"
ROWS_ON_DEMAND = "embedding rows on demand"
SCRATCH = "scratch for decoded matrices"
KV_CACHE = "key-value cache"
WORKSPACE = "workspace"
EXPERT_POOL = "expert pool"

DEFAULT_RESERVE_FRACTION = 0.1
"""Share of the smallest limit that the default budget leaves to others: the system, other processes of the group, page
tables and the sockets of a server are charged to the same limit."""
SMALLEST_DEFAULT_RESERVE_BYTES = 256 << 20
LARGEST_DEFAULT_RESERVE_BYTES = 4 << 30
"""On large machines the system's own needs do not grow with memory."""

DEFAULT_CONTEXT_TOKENS = 2048
"""Key-value cache reserved at start when nobody says how long the context will be; growth beyond it takes from the
pool.
"""

PAGE_BYTES = 4096


class MemoryBudget:
    """A total number of bytes and named reservations against it."""

    def __init__(self, total_bytes: int, ledger: Mapping[str, int] | None = None) -> None:
        """``ledger``: reservations that exist already; they may exceed the total, which the engine then refuses at
        start.
        """
        if total_bytes <= 0:
            raise InvalidArgumentError("a memory budget must be positive")
        self.total_bytes = total_bytes
        self._ledger: dict[str, int] = dict(ledger or {})

    @property
    def ledger(self) -> dict[str, int]:
        """A copy of all reservations, in the order in which they were first made."""
        return dict(self._ledger)

    @property
    def reserved_bytes(self) -> int:
        """Sum of all reservations."""
        return sum(self._ledger.values())

    @property
    def free_bytes(self) -> int:
        """What is left to reserve; negative if the initial ledger exceeded the total."""
        return self.total_bytes - self.reserved_bytes

    def reserved(self, name: str) -> int:
        """Bytes reserved under ``name``, 0 if none."""
        return self._ledger.get(name, 0)

    def reserve(self, name: str, count: int) -> None:
        """Add ``count`` bytes to the reservation ``name``.

        Raises:
            BudgetExceededError: they do not fit; nothing is changed.
        """
        self.set_reservation(name, self.reserved(name) + count)

    def release(self, name: str) -> None:
        """Drop a reservation; no error if there is none."""
        self._ledger.pop(name, None)

    def set_reservation(self, name: str, count: int) -> None:
        """Make the reservation ``name`` exactly ``count`` bytes; BudgetExceededError if it grows and does not fit."""
        if count < 0:
            raise InvalidArgumentError(f"a reservation cannot be negative: {name} {count}")
        growth = count - self.reserved(name)
        if growth > 0 and growth > self.free_bytes:
            raise BudgetExceededError(
                f"{name} needs {format_bytes(growth)} more, but only {format_bytes(max(self.free_bytes, 0))} of the "
                f"{format_bytes(self.total_bytes)} budget are left ({self.itemise()})",
                hint="give more memory, or use a shorter context",
            )
        self._ledger[name] = count

    def itemise(self) -> str:
        """All reservations in one line, e.g. ``interpreter and libraries 402 MB, packed dense matrices 1.30 GB``."""
        return itemise(self._ledger)


def itemise(ledger: Mapping[str, int]) -> str:
    """Entries of a ledger in one line, without empty ones."""
    return ", ".join(f"{name} {format_bytes(count)}" for name, count in ledger.items() if count)


def default_budget_bytes(limits: list[MemoryLimit]) -> int:
    """The smallest limit less a reserve for everything else that is charged to it.

    Raises:
        InvalidArgumentError: no limit is known.
    """
    if not limits:
        raise InvalidArgumentError(
            "this system does not tell how much memory it has", hint="say how much to use: memory=4GB"
        )
    limit = min(entry.bytes for entry in limits)
    reserve = int(limit * DEFAULT_RESERVE_FRACTION)
    reserve = min(max(reserve, SMALLEST_DEFAULT_RESERVE_BYTES), LARGEST_DEFAULT_RESERVE_BYTES)
    return max(limit - reserve, limit // 2)


def budget_bytes(memory: str | int | None, limits: list[MemoryLimit] | None = None) -> int:
    """Total of the budget that a person asked for.

    Args:
        memory: see ``parse_bytes``; None for the default.
        limits: what the machine allows; detected if None.

    Raises:
        InvalidArgumentError: malformed, or more than the machine or the control group allows.
    """
    limits = detect_limits() if limits is None else limits
    if memory is None:
        return default_budget_bytes(limits)
    total = parse_bytes(memory)
    smallest = min(limits, key=lambda entry: entry.bytes, default=None)
    if smallest is not None and smallest.bytes < total < smallest.bytes + PAGE_BYTES:
        return smallest.bytes  # the kernel keeps limits in whole pages: "4 GB" becomes a little less
    if smallest is not None and total > smallest.bytes:
        raise InvalidArgumentError(
            f"a budget of {format_bytes(total)} was asked for, but {smallest.source} is {format_bytes(smallest.bytes)}",
            hint="leave the memory option out to use what the machine allows",
        )
    return total


def plan_budget(
    memory: str | int | None,
    *,
    config: Any | None = None,
    unpacked_bytes: int = 0,
    context_tokens: int | None = None,
    step_tokens: int | None = None,
    batch: int = 1,
    limits: list[MemoryLimit] | None = None,
) -> MemoryBudget:
    """The budget of one model with everything reserved that is known before the engine starts.

    To be called before the model's weights are loaded: what is charged to the process at this moment is counted as the
    interpreter and its libraries.

    Args:
        memory: what the person asked for (see ``budget_bytes``).
        config: Transformers config of the model.
        unpacked_bytes: tensors of the model that are not packed and will be resident.
        context_tokens: tokens of context per sequence to reserve key-value cache for. Default: the smaller of
            ``DEFAULT_CONTEXT_TOKENS`` and the model's own limit.
        step_tokens: tokens per sequence of the longest pass (the prompt) to reserve workspace for. Default: the
            context, at most ``DEFAULT_STEP_TOKENS``.
        batch: number of sequences.
        limits: what the machine allows; detected if None.

    Raises:
        InvalidArgumentError: malformed or impossible ``memory``.
    """
    ledger = {PROCESS: charged_bytes(), UNPACKED: unpacked_bytes}
    if config is not None:
        tokens = context_tokens if context_tokens is not None else _default_context_tokens(config)
        ledger[KV_CACHE] = kv_cache_bytes(config, tokens * batch, batch)
        step = step_tokens if step_tokens is not None else min(tokens, DEFAULT_STEP_TOKENS)
        ledger[WORKSPACE] = workspace_bytes(config, step * batch, batch)
    return MemoryBudget(budget_bytes(memory, limits), ledger)


def _default_context_tokens(config: Any) -> int:
    longest = value(text_config(config), "max_position_embeddings")
    return min(DEFAULT_CONTEXT_TOKENS, longest) if isinstance(longest, int) and longest > 0 else DEFAULT_CONTEXT_TOKENS
