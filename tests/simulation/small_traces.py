"""Traces of a few steps, and an expert whose costs are round numbers."""

from __future__ import annotations

from collections.abc import Sequence

from zipmoe.planning.layer_costs import LayerCosts
from zipmoe.planning.partition import ExpertBytes
from zipmoe.planning.trace import RoutingTrace, TraceHeader, TraceStep

EXPERT = ExpertBytes(full=200, exponent=40, sign_mantissa=100)
COSTS = LayerCosts(
    read_sign_mantissa_seconds=(1.0,),
    read_shard_seconds=(0.25,),
    decompress_seconds=(0.5,),
    recombine_seconds=(0.0,),
    execute_seconds_by_tokens=(0.125, 0.125),
    shards=2,
    workers=1,
)
"""A miss takes 1.625 s (0.5 for the shards, 1 for the SM-chunk, 0.125 to execute), S 1.375, E and C 1.125."""
FUSED = ExpertBytes(full=200, exponent=140, sign_mantissa=0)
FUSED_COSTS = LayerCosts((1.5,), (0.0,), (0.0,), (0.0,), (0.125, 0.125), shards=0, workers=1)


def trace_of(steps: Sequence[Sequence[Sequence[int]]], experts: int, top_k: int, tokens: int = 1) -> RoutingTrace:
    """``steps[step][layer]`` are the ids of a layer."""
    return RoutingTrace(
        TraceHeader("small", (experts,) * len(steps[0]), top_k),
        tuple(TraceStep(n, tokens, tuple(tuple(ids) for ids in layers)) for n, layers in enumerate(steps)),
    )
