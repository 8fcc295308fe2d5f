"""Belady's optimum: the hit rate that no policy can exceed, because it knows the future. For reports only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.trace import RoutingTrace

NEVER = 1 << 62


def optimal_hits(requests: Sequence[Sequence[int]], slots: int) -> list[int]:
    """Hits of each request in a cache that evicts what is needed again last.

    As in the engine, all experts of a request are in memory at once if there are slots for them: none of them is evicted
    while the request is served, and hits are counted when it begins. Every expert that was read is kept, as by the other
    policies; a cache that may also pass one by can be better by a few percent when slots are very few.

    Args:
        requests: distinct ids of each request.
        slots: capacity in experts.
    """
    if slots < 1:
        raise InvalidArgumentError(f"a cache with {slots} slots has no optimum")
    next_uses: list[list[int]] = [[] for _ in requests]
    upcoming: dict[int, int] = {}
    for number in range(len(requests) - 1, -1, -1):
        next_uses[number] = [upcoming.get(expert, NEVER) for expert in requests[number]]
        upcoming.update((expert, number) for expert in requests[number])
    resident: dict[int, int] = {}  # id -> next use
    farthest: list[tuple[int, int]] = []  # (-next use, id), stale entries among them
    hits = []
    for wanted, uses in zip(requests, next_uses, strict=True):
        pinned = set(wanted)
        hits.append(sum(expert in resident for expert in wanted))
        for expert, use in zip(wanted, uses, strict=True):
            if expert not in resident and len(resident) >= slots and not _evict(resident, farthest, pinned):
                continue
            resident[expert] = use
            heapq.heappush(farthest, (-use, expert))
    return hits


def _evict(resident: dict[int, int], farthest: list[tuple[int, int]], pinned: set[int]) -> bool:
    kept = []
    evicted = False
    while farthest and not evicted:
        use, expert = heapq.heappop(farthest)
        if resident.get(expert) != -use:
            continue  # stale
        if expert in pinned:
            kept.append((use, expert))
            continue
        del resident[expert]
        evicted = True
    for entry in kept:
        heapq.heappush(farthest, entry)
    return evicted


def optimal_hit_rate(trace: RoutingTrace, slots: int, *, scope: str = "layer", warm_up_steps: int = 0) -> float:
    """Hit rate of the optimum with whole experts.

    Args:
        trace: what is replayed, beginning with an empty cache.
        slots: experts per layer; with scope ``model`` of all layers together.
        scope: ``layer`` or ``model``.
        warm_up_steps: first steps, not counted.
    """
    layers = range(len(trace.header.experts))
    hits = requested = 0
    if scope == "model":
        requests = [
            [layer * 1_000_000 + expert for expert in ids]
            for step in trace.steps
            for layer, ids in enumerate(step.layers)
        ]
        first = warm_up_steps * len(layers)
        counted = optimal_hits(requests, slots)[first:]
        return sum(counted) / sum(len(wanted) for wanted in requests[first:])
    for layer in layers:
        requests = [list(step.layers[layer]) for step in trace.steps]
        hits += sum(optimal_hits(requests, slots)[warm_up_steps:])
        requested += sum(len(wanted) for wanted in requests[warm_up_steps:])
    return hits / requested
