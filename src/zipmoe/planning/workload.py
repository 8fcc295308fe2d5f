"""The workload that a plan is made for: rank models of all layers that share a partition, and the size of a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning import maximum_entropy
from zipmoe.planning.maximum_entropy import ConditionalBernoulli, NoMaximumEntropyLawError
from zipmoe.planning.rank_model import (
    DEFAULT_LEARN_FRACTION,
    RankModel,
    held_out_model,
    running_model,
    shifted,
    uniform_model,
)
from zipmoe.planning.trace import RoutingTrace

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Workload:
    """Rank models of layers with the same number of experts."""

    layers: tuple[RankModel, ...]
    assignments: float
    """Token-expert pairs of a step: tokens times top_k."""
    source: str
    """Where the models come from, for the report."""

    def __post_init__(self) -> None:
        if len({model.experts for model in self.layers}) != 1:
            raise InvalidArgumentError(
                "layers of one plan must have the same number of experts", hint="plan each kind of layer by itself"
            )
        if not self.assignments > 0:
            raise InvalidArgumentError(f"a step with {self.assignments} token-expert pairs has no experts to plan for")

    @classmethod
    def held_out(cls, trace: RoutingTrace, learn_fraction: float = DEFAULT_LEARN_FRACTION) -> Workload:
        """Ranks learnt on the first part of a trace, counted on the rest: a cache that is filled once."""
        models = tuple(
            held_out_model(trace.activations(layer), learn_fraction) for layer in range(len(trace.header.experts))
        )
        return cls(models, trace.mean_tokens() * trace.header.top_k, f"{trace.header.model}, held out")

    @classmethod
    def running(cls, trace: RoutingTrace, half_life_steps: float, warm_up_steps: int | None = None) -> Workload:
        """Ranks learnt anew before every step from decayed counts: a cache that follows popularity."""
        models = tuple(
            running_model(trace.activations(layer), half_life_steps, warm_up_steps)
            for layer in range(len(trace.header.experts))
        )
        source = f"{trace.header.model}, half-life of {half_life_steps:g} steps"
        return cls(models, trace.mean_tokens() * trace.header.top_k, source)

    @classmethod
    def uniform(cls, layers: int, experts: int, top_k: int) -> Workload:
        """No trace at all: one token per step, every expert alike."""
        return cls((uniform_model(experts, top_k),) * layers, top_k, "no trace: all experts alike")

    @property
    def experts(self) -> int:
        """N of each layer."""
        return self.layers[0].experts

    def shifted(self, amount: float) -> Workload:
        """The workload after a shift of all layers (`RankModel.shifted`)."""
        return Workload(
            tuple(model.shifted(amount) for model in self.layers),
            self.assignments,
            f"{self.source}, shifted by {amount:g}",
        )

    def probabilities(self) -> FloatArray:
        """f, [L, N]."""
        return np.array([model.probabilities for model in self.layers])

    def size_law(self) -> FloatArray:
        """P(K = k), [L, M + 1], cut off behind the largest number of distinct experts of any layer."""
        distinct = np.array([model.distinct for model in self.layers])
        largest = int(np.flatnonzero(distinct.any(axis=0))[-1])
        return distinct[:, : largest + 1]

    def maximum_entropy_law(self) -> tuple[ConditionalBernoulli, list[str]]:
        """The law of activated sets of all layers, and notes about layers whose counts had to be smoothed.

        Counts of a short trace whose steps differ in size can lie on the edge of what any law with all sets possible
        reproduces (say, two experts that every step contains at least one of). Such a layer is shifted by one
        pseudo-step, a = 1 / (steps + 1), and by twice as much while that is not enough.
        """
        sizes, f = self.size_law(), self.probabilities()
        smoothed: dict[int, float] = {}
        while True:
            try:
                law = maximum_entropy.fit(f, sizes)
            except NoMaximumEntropyLawError as error:
                if not error.layers or any(smoothed.get(layer) == 1 for layer in error.layers):
                    raise
                for layer in error.layers:
                    pseudo_step = 1 / (self.layers[layer].steps + 1)
                    smoothed[layer] = min(1.0, 2 * smoothed[layer]) if layer in smoothed else pseudo_step
                    f[layer] = shifted(self.layers[layer].probabilities, smoothed[layer])
            else:
                break
        notes = [
            f"layer {layer}: popularity smoothed by {amount:.2g}, its counts lie on the edge of the model"
            for layer, amount in sorted(smoothed.items())
        ]
        return law, notes
