"""Which of several partitions is fastest when the steps that the planner learnt from are replayed.

The planner takes experts to lie where their rank belongs. A replay also sees what it costs to get there: an expert
whose rank rises is read before it is where it should be, and pools begin empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from zipmoe.engine.cache_policy import POLICY_WITH_HALF_LIFE
from zipmoe.planning.folder_plan import FolderCosts
from zipmoe.planning.partition import PoolPlan
from zipmoe.planning.trace import RoutingTrace
from zipmoe.simulation.replay import CacheSettings, replay
from zipmoe.simulation.simulation_report import SimulationReport

MOST_REPLAYED_REQUESTS = 4000
"""Layers times steps that each partition replays at most: keeps planning within seconds."""
WARM_UP_FRACTION = 0.25


@dataclass(frozen=True)
class LearntSteps:
    """The part of a trace that is replayed: its last steps, prompts included, of which only single tokens count."""

    trace: RoutingTrace
    warm_up_steps: int
    counts: tuple[bool, ...]

    @classmethod
    def of(cls, trace: RoutingTrace) -> LearntSteps:
        """Cut a trace. A prompt that it begins with fills the pools, as in a run; else a quarter of the steps does."""
        kept = max(2, MOST_REPLAYED_REQUESTS // len(trace.header.experts))
        steps = trace.steps[-kept:]
        warm_up = 1 if steps[0].tokens > 1 else int(len(steps) * WARM_UP_FRACTION)
        counts = tuple(step.tokens == 1 for step in steps)
        return cls(RoutingTrace(trace.header, steps), warm_up, counts)

    @property
    def counted(self) -> int:
        """Steps that are counted."""
        return sum(self.counts[self.warm_up_steps :])

    def replayed(self, plan: PoolPlan, folder: FolderCosts, half_life_steps: float) -> SimulationReport:
        """What these steps cost with the pools of a plan in every layer, experts only."""
        settings = CacheSettings(POLICY_WITH_HALF_LIFE, half_life_steps)
        return replay(
            self.trace,
            plan,
            folder.costs,
            folder.expert,
            settings,
            warm_up_steps=self.warm_up_steps,
            counts=self.counts,
        )
