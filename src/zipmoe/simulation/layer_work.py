"""How long each resource of the machine model works for a layer, whatever the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.planning.layer_costs import NOT_FULL, READS_EXPONENT, READS_PACKED, READS_SIGN_MANTISSA, LayerCosts
from zipmoe.planning.partition import ExpertState


@dataclass(frozen=True)
class LayerWork:
    """Busy seconds of the resources."""

    io_seconds: float = 0.0
    """The disk, its latency included."""
    decompress_seconds: float = 0.0
    """All decompression workers together."""
    execution_seconds: float = 0.0
    """The resource that recombines and executes."""

    def __add__(self, other: LayerWork) -> LayerWork:
        return LayerWork(
            self.io_seconds + other.io_seconds,
            self.decompress_seconds + other.decompress_seconds,
            self.execution_seconds + other.execution_seconds,
        )

    def seconds(self, workers: int) -> float:
        """All resources one after the other, the workers busy alike: what the work costs if nothing overlaps."""
        return self.io_seconds + self.decompress_seconds / workers + self.execution_seconds

    @classmethod
    def of(cls, costs: LayerCosts, states: Sequence[int], assignments: float) -> LayerWork:
        """Work of a layer whose activated experts are in these states.

        Args:
            costs: constants of the layer.
            states: codes of ``ExpertState``.
            assignments: token-expert pairs of the step.
        """
        sign_mantissa = sum(costs.read_sign_mantissa_seconds)
        exponent = sum(costs.read_shard_seconds) * costs.shards
        decompress = sum(costs.decompress_seconds) * costs.shards
        recombine = sum(costs.recombine_seconds)
        execute = costs.execute_seconds_by_state(max(1.0, assignments / len(states)))
        io = workers = execution = 0.0
        for state in states:
            execution += float(execute[state])
            if costs.shards:
                io += float(READS_EXPONENT[state]) * exponent + float(READS_SIGN_MANTISSA[state]) * sign_mantissa
                workers += float(NOT_FULL[state]) * decompress
                execution += float(NOT_FULL[state]) * recombine
            else:
                io += float(READS_PACKED[state]) * sign_mantissa
        if any(state >= ExpertState.SIGN_MANTISSA for state in states):
            io += costs.io_latency_seconds
        return cls(io, workers, execution)
