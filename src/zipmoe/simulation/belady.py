"""Belady's optimum: hit rates that no policy can exceed, because they take knowing the future. For reports only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.trace import RoutingTrace

NEVER = 1 << 62
"""Next use of what is not used again."""


def optimal_hits(
    requests: Sequence[Sequence[int]], slots: int, *, may_pass: bool = True, warm_up_requests: int = 0
) -> list[int]:
    """Hits of each request in the best cache, which is empty at first. Hits are counted when a request begins.

    Args:
        requests: distinct ids of each request.
        slots: capacity in experts.
        may_pass: whether an expert may be dropped right after its use. If not, all that was requested is kept until the
            next request, as LRU and its like do (and as most published replays do).
        warm_up_requests: hits of these first requests do not matter (0 is returned for them): the cache then begins
            with the best of all that they requested.

    Returns:
        One number per request.
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
    for number, (wanted, uses) in enumerate(zip(requests, next_uses, strict=True)):
        counted = number >= warm_up_requests
        hits.append(sum(expert in resident for expert in wanted) if counted else 0)
        for expert, use in zip(wanted, uses, strict=True):
            resident[expert] = use
            heapq.heappush(farthest, (-use, expert))
        if number >= warm_up_requests - 1:
            _shrink(resident, farthest, slots, set() if may_pass else set(wanted))
    return hits


def _shrink(resident: dict[int, int], farthest: list[tuple[int, int]], slots: int, pinned: set[int]) -> None:
    kept = []
    while len(resident) > slots and farthest:
        use, expert = heapq.heappop(farthest)
        if resident.get(expert) != -use:
            continue  # stale
        if expert in pinned:
            kept.append((use, expert))
        else:
            del resident[expert]
    for entry in kept:  # a request larger than the cache: only so many of it can stay
        if len(resident) > slots:
            del resident[entry[1]]
        else:
            heapq.heappush(farthest, entry)


def optimal_hit_rate(trace: RoutingTrace, slots: int, *, scope: str = "layer", warm_up_steps: int = 0) -> float:
    """The highest hit rate that is possible on a trace with whole experts fetched on demand.

    Args:
        trace: what is replayed.
        slots: experts per layer; with scope ``model`` of all layers together.
        scope: ``layer`` or ``model``.
        warm_up_steps: first steps, which fill the cache and are not counted.
    """
    layers = len(trace.header.experts)
    if scope == "model":
        streams = [[[id_ * layers + n for id_ in ids] for step in trace.steps for n, ids in enumerate(step.layers)]]
        warm_up = warm_up_steps * layers
    else:
        streams = [[list(step.layers[layer]) for step in trace.steps] for layer in range(layers)]
        warm_up = warm_up_steps
    hits = sum(sum(optimal_hits(requests, slots, warm_up_requests=warm_up)) for requests in streams)
    return hits / sum(len(wanted) for requests in streams for wanted in requests[warm_up:])
