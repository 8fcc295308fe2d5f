from __future__ import annotations

import numpy as np
import pytest

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.partition import (
    POOLS,
    CodecCapabilities,
    ExpertBytes,
    ExpertState,
    PoolPlan,
    parse_pools,
    partition_grid,
)
from zipmoe.store.manifest import Extent, MatrixEntry, Record, Section

EXPERT = ExpertBytes.from_ratio(1000, 0.3)


def test_bytes_of_each_state() -> None:
    assert [EXPERT.held(state) for state in ExpertState] == [2000, 1300, 1000, 300, 0]
    assert [EXPERT.read(state) for state in ExpertState] == [0, 0, 300, 1000, 1300]
    packed = ExpertBytes.from_ratio(1000, 0.3, separable=False)
    assert [packed.held(state) for state in ExpertState] == [2000, 1300, 0, 1300, 0]
    assert packed.read(ExpertState.MISS) == 1300


def record(*extents: tuple[str, int]) -> Record:
    sections = tuple(Section(0, length) for _, length in extents)
    return Record(
        "zipmoe.x",
        "file",
        0,
        sum(length for _, length in extents),
        tuple(Extent(kind, 0, length, 0) for kind, length in extents),
        (MatrixEntry("gate", 10, 20, sections), MatrixEntry("down", 20, 5, sections)),
    )


def test_slots_fit_the_largest_record() -> None:
    records = [record(("E", 110), ("SM", 304)), record(("E", 150), ("SM", 300))]
    assert ExpertBytes.from_records(records) == ExpertBytes(full=600, exponent=150, sign_mantissa=304)
    assert ExpertBytes.from_records([record(("packed", 420))]) == ExpertBytes(600, 420, 0)
    with pytest.raises(InvalidArgumentError, match="unknown kind 'Q'"):
        ExpertBytes.from_records([record(("Q", 1))])
    with pytest.raises(InvalidArgumentError, match="without records"):
        ExpertBytes.from_records([])


def test_plan() -> None:
    plan = PoolPlan(2, 3, 0, 1)
    assert plan.held_bytes(EXPERT) == 2 * 2000 + 3 * 1300 + 300
    assert "".join(plan.state_of_rank(rank).letter for rank in range(8)) == "FFCCCEMM"
    assert plan.thresholds() == (2, 5, 5, 6)
    assert plan.thresholds(tolerance=2) == (4, 7, 7, 8)
    assert plan.describe() == "F 2 + C 3 + E 1"
    with pytest.raises(InvalidArgumentError, match="fewer than no slots"):
        PoolPlan(full=-1)


def test_capabilities_decide_which_pools_exist() -> None:
    assert CodecCapabilities(separable=True, fused=False).allowed() == POOLS
    assert CodecCapabilities(separable=False, fused=True).allowed() == (ExpertState.FULL, ExpertState.COMPRESSED)
    assert CodecCapabilities(separable=True, fused=False).allowed(parse_pools("ef")) == (
        ExpertState.FULL,
        ExpertState.EXPONENT,
    )
    with pytest.raises(InvalidArgumentError, match="pools S were asked for, but the codec has F, C"):
        CodecCapabilities(separable=False, fused=True).allowed(parse_pools("S"))
    for letters in ("", "FX", "FF"):
        with pytest.raises(InvalidArgumentError, match="not a set of pools"):
            parse_pools(letters)


@pytest.mark.parametrize("letters", ["F", "FC", "CE", "FCSE"])
@pytest.mark.parametrize("budget_bytes", [0, 1999, 26_000, 10_000_000])
def test_grid_is_feasible(letters: str, budget_bytes: int) -> None:
    pools = parse_pools(letters)
    grid = partition_grid(budget_bytes, EXPERT, 60, pools)
    held = grid @ np.array([EXPERT.held(pool) for pool in POOLS])
    assert held.max() <= budget_bytes
    assert grid.sum(axis=1).max() <= 60
    assert len(np.unique(grid, axis=0)) == len(grid)
    assert not grid[:, [pool for pool in POOLS if pool not in pools]].any()
    rows = {tuple(row) for row in grid.tolist()}
    assert (0, 0, 0, 0) in rows
    for pool in pools:
        alone = [0, 0, 0, 0]
        alone[pool] = min(budget_bytes // EXPERT.held(pool), 60)
        assert tuple(alone) in rows


def test_grid_in_steps_of_half_the_budget() -> None:
    # 26,000 bytes: 13 F; or 6 F and what is left (14,000) in C: 10; or 20 C.
    grid = partition_grid(26_000, EXPERT, 60, parse_pools("FC"), step=0.5)
    assert grid.tolist() == [[0, 0, 0, 0], [0, 20, 0, 0], [6, 10, 0, 0], [13, 0, 0, 0]]
    with pytest.raises(InvalidArgumentError, match="grid step"):
        partition_grid(1, EXPERT, 60, POOLS, step=0)
    with pytest.raises(InvalidArgumentError, match="negative"):
        partition_grid(-1, EXPERT, 60, POOLS)


def test_grid_has_the_paper_s_number_of_partitions() -> None:
    # 20 shares over 4 pools: C(23, 3) compositions, all different where slots are small; and the empty plan.
    assert len(partition_grid(10**9, ExpertBytes.from_ratio(1000, 0.3), 10**7, POOLS)) == 1771 + 1
