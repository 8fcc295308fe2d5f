"""Which tensors go into which file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def split_into_shards(items: Iterable[T], bytes_of: Callable[[T], int], shard_bytes: int) -> list[list[T]]:
    """Split ``items``, in order, into shards of at most ``shard_bytes`` and one item at least.

    No items give one empty shard.
    """
    shards: list[list[T]] = [[]]
    total = 0
    for item in items:
        if shards[-1] and total + bytes_of(item) > shard_bytes:
            shards.append([])
            total = 0
        shards[-1].append(item)
        total += bytes_of(item)
    return shards
