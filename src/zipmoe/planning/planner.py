"""Cache-pool planning: the partition of a layer's memory with the smallest expected time (ZipMoE paper, appendix C).

The planner enumerates partitions on a grid and costs each by its expected makespan (`expected_cost`). Nothing in it
knows which pool is good for which codec: capabilities say which states exist, the constants of the machine say what
each costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.expected_cost import ExpectedCost
from zipmoe.planning.layer_costs import LayerCosts, Makespan, MakespanBound, ScheduledMakespan
from zipmoe.planning.partition import (
    DEFAULT_STEP,
    POOLS,
    CodecCapabilities,
    ExpertBytes,
    ExpertState,
    PoolPlan,
    partition_grid,
)
from zipmoe.planning.plan_report import Candidate, LayerForecast, PlanReport
from zipmoe.planning.rank_model import RankModel
from zipmoe.planning.workload import Workload

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

DEFAULT_RUNNER_UPS = 5
DEFAULT_WORTHWHILE_GAIN = 1e-3
"""Memory that saves less than this share of the layers' time is left to the page cache, the KV cache and workspace."""

ROUNDING = 1e-9
"""Times this close to each other are equal."""


def plan_pools(
    workload: Workload,
    costs: LayerCosts,
    expert: ExpertBytes,
    budget_bytes: int,
    *,
    capabilities: CodecCapabilities,
    pools: Sequence[ExpertState] | None = None,
    step: float = DEFAULT_STEP,
    makespan: Makespan | None = None,
    separate: bool = False,
    worthwhile_gain: float = DEFAULT_WORTHWHILE_GAIN,
    runner_ups: int = DEFAULT_RUNNER_UPS,
    other_seconds: float = 0.0,
    asked: Sequence[PoolPlan] = (),
) -> PlanReport:
    """Find the best partition of each layer's pool memory.

    Of partitions whose expected times differ by less than ``worthwhile_gain``, the one that holds the fewest bytes is
    chosen, and memory is then given back (experts dropped or moved to a pool of fewer bytes) while all that this costs
    stays within the same limit.

    Args:
        workload: popularity of ranks per layer, and tokens per step.
        costs: constants of the layers' work on this machine.
        expert: bytes of an expert in each state.
        budget_bytes: memory for all pools of ONE layer.
        capabilities: of the codec; they decide which pools exist and whether reconstruction does.
        pools: restrict the pools; None: all that the codec has.
        step: grid, as a share of the budget.
        makespan: cost of the states of a layer's activated experts in seconds; None: the native scheduler.
        separate: give each layer its own best partition instead of one for all.
        worthwhile_gain: see above.
        runner_ups: how many of the next best partitions to report.
        other_seconds: time of a step outside the sparse layers' experts, added to the forecast.
        asked: partitions to tell the price of, whether they fit the budget or not.

    Raises:
        InvalidArgumentError: impossible budget, step or pools.
    """
    allowed = capabilities.allowed(pools)
    if capabilities.whole != (costs.shards == 0):
        raise InvalidArgumentError("costs and capabilities speak of different codecs", hint="LayerCosts.from_profile")
    if not 0 <= worthwhile_gain < 1:
        raise InvalidArgumentError(f"a worthwhile gain of {worthwhile_gain} is not a share of the time")
    grid = partition_grid(budget_bytes, expert, workload.experts, allowed, step)
    law, notes = workload.maximum_entropy_law()
    expected = ExpectedCost(
        law,
        allowed,
        ScheduledMakespan(costs, workload.assignments) if makespan is None else makespan,
        MakespanBound(costs, workload.assignments),
        len(grid),
    )
    grid_seconds = expected.seconds(grid)  # [L, plans]
    search = _Search(expected, grid, expert, allowed, worthwhile_gain)
    shared_rows = search.best_rows(grid_seconds.sum(axis=0, keepdims=True))
    separate_seconds = grid_seconds.min(axis=1).sum()
    shared_seconds = grid_seconds.sum(axis=0).min()
    if separate:
        rows = search.best_rows(grid_seconds)
        plans = [search.trimmed(grid[row], [layer], grid_seconds) for layer, row in enumerate(rows)]
    else:
        everything = list(range(len(workload.layers)))
        plans = [search.trimmed(grid[shared_rows[0]], everything, grid_seconds)] * len(workload.layers)
    layers = tuple(
        _forecast(model, plan, expert, float(expected.seconds(np.array([plan.slots]), [number])[0, 0]))
        for number, (model, plan) in enumerate(zip(workload.layers, plans, strict=True))
    )

    def priced(rows: IntArray, totals: FloatArray) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(PoolPlan(*(int(n) for n in row)), search.held_bytes(row), float(total), other_seconds)
            for row, total in zip(rows, totals, strict=True)
        )

    candidates = priced(grid, grid_seconds.sum(axis=0))
    asked_slots = np.array([plan.slots for plan in asked], dtype=np.int64).reshape(-1, len(POOLS))
    ordered = sorted(candidates, key=lambda c: (c.step_seconds, c.held_bytes, c.plan.slots))
    winner = PoolPlan(*(int(n) for n in grid[shared_rows[0]]))
    if not expected.exact:
        notes.append("hit patterns are too many to enumerate: activated sets were drawn, the same for every partition")
    if not expected.scheduled:
        notes.append(
            "hit patterns are too many to schedule: "
            "makespans are max(total I/O, decompression / L, recombination and execution, chain)"
        )
    return PlanReport(
        layers=layers,
        shared=not separate,
        step_seconds=sum(layer.seconds for layer in layers) + other_seconds,
        other_seconds=other_seconds,
        runner_ups=tuple([c for c in ordered if c.plan != winner][:runner_ups]),
        pure=_pure(candidates, allowed),
        candidates=candidates,
        asked=priced(asked_slots, expected.seconds(asked_slots).sum(axis=0)) if asked else (),
        separate_gain=max(0.0, float(1 - separate_seconds / shared_seconds)) if shared_seconds > 0 else 0.0,
        budget_bytes=budget_bytes,
        expert=expert,
        experts=workload.experts,
        pools=allowed,
        cost="bound" if not expected.scheduled else "scheduler" if makespan is None else "given",
        hit_law="exact" if expected.exact else "sampled",
        workload=workload.source,
        notes=tuple(notes),
    )


class _Search:
    """Choosing among partitions whose costs are known, and giving memory back."""

    def __init__(
        self,
        expected: ExpectedCost,
        grid: IntArray,
        expert: ExpertBytes,
        pools: Sequence[ExpertState],
        worthwhile_gain: float,
    ) -> None:
        self._expected = expected
        self._pools = pools
        self._slot_bytes = np.array([expert.held(pool) for pool in POOLS])
        self._grid_bytes = grid @ self._slot_bytes
        self._limit = 1 + max(worthwhile_gain, ROUNDING)

    def held_bytes(self, slots: IntArray) -> int:
        return int(slots @ self._slot_bytes)

    def best_rows(self, seconds: FloatArray) -> list[int]:
        """Per row of ``seconds`` [rows, plans]: of the plans within the limit of the best, the smallest and fastest."""
        rows = []
        for values in seconds:
            good = np.flatnonzero(values <= values.min() * self._limit)
            order = np.lexsort((values[good], self._grid_bytes[good]))
            rows.append(int(good[order[0]]))
        return rows

    def trimmed(self, slots: IntArray, layers: list[int], grid_seconds: FloatArray) -> PoolPlan:
        """Give memory back as long as all that this costs together stays within the limit of the best.

        Two kinds of moves: a pool loses its least popular experts, or passes them on to a pool that holds them in
        fewer bytes. Each is tried for all numbers of experts and the largest one within the limit taken.
        """
        allowed = grid_seconds[layers].sum(axis=0).min() * self._limit
        moves: list[tuple[ExpertState, ExpertState | None]] = [(pool, None) for pool in reversed(self._pools)]
        moves += [
            (source, target)
            for source in self._pools
            for target in reversed(self._pools)
            if source < target and self._slot_bytes[target] < self._slot_bytes[source]
        ]
        while True:
            # First one expert of every move, in one evaluation: most moves are already too dear then.
            tried = [move for move in moves if slots[move[0]]]
            if not tried:
                break
            single = np.concatenate([_moved(slots, move, np.array([1])) for move in tried])
            cheap = np.flatnonzero(self._expected.seconds(single, layers).sum(axis=0) <= allowed)
            if not len(cheap):
                break
            move = tried[int(cheap[0])]
            smaller = _moved(slots, move, np.arange(1, slots[move[0]] + 1))
            good = np.flatnonzero(self._expected.seconds(smaller, layers).sum(axis=0) <= allowed)
            slots = smaller[good[-1] if len(good) else 0]  # the single expert is known to be cheap
        return PoolPlan(*(int(n) for n in slots))


def _moved(slots: IntArray, move: tuple[ExpertState, ExpertState | None], experts: IntArray) -> IntArray:
    """Partitions in which so many experts have left a pool for another one, or for none: [len(experts), 4]."""
    source, target = move
    plans = np.repeat(slots[None, :], len(experts), axis=0)
    plans[:, source] -= experts
    if target is not None:
        plans[:, target] += experts
    return plans


def _forecast(model: RankModel, plan: PoolPlan, expert: ExpertBytes, seconds: float) -> LayerForecast:
    f = model.probabilities
    ends = np.concatenate([[0], np.cumsum(plan.slots), [len(f)]])
    activated = {state: float(f[ends[state] : ends[state + 1]].sum()) for state in ExpertState}
    return LayerForecast(
        plan,
        seconds,
        {state: activated[state] / float(f.sum()) for state in ExpertState},
        sum(activated[state] * expert.read(state) for state in ExpertState),
    )


def _pure(candidates: Sequence[Candidate], pools: Sequence[ExpertState]) -> dict[str, Candidate]:
    """The best candidate that uses only one pool, for each pool, and the one without any."""
    pure = {}
    for pool in pools:
        alone = [c for c in candidates if c.plan.total_slots == c.plan.slots[pool]]
        pure[pool.letter] = max(alone, key=lambda c: c.held_bytes)
    pure["none"] = next(c for c in candidates if c.plan.total_slots == 0)
    return pure
