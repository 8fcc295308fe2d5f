"""The native scheduler against its reference, the machine, and its own promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scheduler import affinity_blocks, fifo_blocks, run_layer
from schedule_checker import check_feasible
from schedule_instances import (
    BOTH,
    EXPONENT,
    FULL,
    MISS,
    SIGN_MANTISSA,
    TICK_SECONDS,
    Layer,
    Task,
    larger_layer,
    schedule,
    small_layer,
    ticks,
)

from zipmoe import _native

ORDERS = {"cache_affinity": affinity_blocks, "fifo": fifo_blocks}


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Layers of any costs, zeros among them."""
    duration = st.integers(0, 12)
    one_size = draw(st.booleans())
    common = [draw(duration) for _ in range(4)]
    execute = {expert: draw(st.integers(0, 30)) for expert in draw(st.sets(st.integers(0, 9), min_size=1, max_size=5))}
    tasks = []
    for expert in sorted(execute):
        for tensor in range(draw(st.integers(1, 3))):
            costs = common if one_size else [draw(duration) for _ in range(4)]
            tasks.append(Task(expert, tensor, draw(st.integers(0, 4)), *costs))
    return Layer(tuple(draw(st.permutations(tasks))), execute, draw(st.integers(1, 4)), draw(st.integers(1, 4)))


def check_against_reference(layer: Layer) -> None:
    for order, blocks in ORDERS.items():
        native, reference = schedule(layer, order), run_layer(layer, blocks(layer))
        assert native.task_order == reference.order
        assert native.block_of_task == reference.block_of_task
        assert native.io == reference.io
        assert native.decompressions == [(task, k) for task in reference.order for k in range(layer.shards)]
        assert [ticks(end) for end in native.execution_end] == reference.execution_end
        assert ticks(native.makespan) == reference.makespan


@given(layers())
@settings(max_examples=300, deadline=None)
def test_equals_the_reference(layer: Layer) -> None:
    check_against_reference(layer)


@pytest.mark.parametrize("batch", range(6))
def test_equals_the_reference_on_larger_layers(batch: int) -> None:
    for seed in range(10 * batch, 10 * batch + 10):
        check_against_reference(larger_layer(seed))


@given(layers())
@settings(max_examples=300, deadline=None)
def test_every_schedule_is_feasible(layer: Layer) -> None:
    for order in ORDERS:
        check_feasible(layer, schedule(layer, order))


def test_every_schedule_of_larger_layers_is_feasible() -> None:
    for seed in range(200):
        layer = larger_layer(seed)
        for order in ORDERS:
            check_feasible(layer, schedule(layer, order))


def least_makespan(layer: Layer) -> float:
    """The lower bound of docs/scheduling.md, in ticks."""
    reads = decompression = execution = chain = 0
    for task in layer.tasks:
        exponent = layer.shards * task.read_shard * task.reads_exponent
        sign_mantissa = task.read_sign_mantissa * task.reads_sign_mantissa
        reads += exponent + sign_mantissa
        own = layer.execute[task.expert]
        if task.has_work:
            decompression += layer.shards * task.decompress
            execution += task.recombine
            own += task.recombine
            own += max(task.read_shard * task.reads_exponent + task.decompress, sign_mantissa)
        chain = max(chain, own)
    return max(reads, decompression / layer.workers, execution + sum(layer.execute.values()), chain)


@given(layers())
@settings(max_examples=300, deadline=None)
def test_no_schedule_is_shorter_than_the_lower_bound(layer: Layer) -> None:
    for order in ORDERS:
        native = schedule(layer, order)
        assert native.lower_bound == pytest.approx(least_makespan(layer) * TICK_SECONDS, abs=1e-12)
        assert native.makespan >= native.lower_bound


@given(layers(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_does_not_depend_on_the_order_of_the_input(layer: Layer, generator) -> None:
    shuffled = list(layer.tasks)
    generator.shuffle(shuffled)
    other = replace(layer, tasks=tuple(shuffled))
    for order in ORDERS:
        first, again, second = schedule(layer, order), schedule(layer, order), schedule(other, order)
        assert first.io == again.io and first.makespan == again.makespan
        assert [layer.tasks[task] for task in first.task_order] == [other.tasks[task] for task in second.task_order]
        assert first.execution_end == second.execution_end


@given(layers())
@settings(max_examples=150, deadline=None)
def test_a_full_layer_only_executes(layer: Layer) -> None:
    full = replace(layer, tasks=tuple(replace(task, state=FULL) for task in layer.tasks))
    native = schedule(full)
    assert native.io == [] and native.decompressions == [] and native.task_order == []
    assert ticks(native.makespan) == sum(layer.execute.values()) == ticks(native.lower_bound)


@given(layers(), st.integers(2, 5))
@settings(max_examples=100, deadline=None)
def test_a_slower_machine_takes_longer_in_proportion(layer: Layer, factor: int) -> None:
    def slower(task: Task) -> Task:
        return Task(
            task.expert,
            task.tensor,
            task.state,
            factor * task.read_sign_mantissa,
            factor * task.read_shard,
            factor * task.decompress,
            factor * task.recombine,
        )

    other = Layer(
        tuple(slower(task) for task in layer.tasks),
        {expert: factor * duration for expert, duration in layer.execute.items()},
        layer.shards,
        layer.workers,
    )
    for order in ORDERS:
        assert schedule(other, order).io == schedule(layer, order).io
        assert ticks(schedule(other, order).makespan) == factor * ticks(schedule(layer, order).makespan)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 4),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_layer_makespan_is_that_of_the_schedule(
    states: list[int], tensors: int, shards: int, workers: int, data: st.DataObject
) -> None:
    costs = [[data.draw(st.integers(0, 12)) for _ in range(tensors)] for _ in range(4)]
    execute = [data.draw(st.integers(0, 20)) for _ in states]
    tasks = [
        Task(expert, tensor, state, *(cost[tensor] for cost in costs))
        for expert, state in enumerate(states)
        for tensor in range(tensors)
    ]
    layer = Layer(tuple(tasks), dict(enumerate(execute)), shards, workers)
    for order in ORDERS:
        makespan = _native.layer_makespan(
            np.array(states, np.uint8),
            tensors,
            *([value * TICK_SECONDS for value in cost] for cost in costs),
            np.array(execute, np.float64) * TICK_SECONDS,
            shards,
            workers,
            order,
        )
        assert makespan == schedule(layer, order).makespan


# --- examples worked out by hand


def test_type_two_tasks_fill_the_long_read() -> None:
    # Base: misses, 2 shards of 2 ticks, SM 10. The cached chunks of expert 1 are decompressed before its shards arrive;
    # the workers of the base alone would wait for 4 ticks.
    tasks = (Task(0, 0, MISS, 10, 2, 3, 1), Task(1, 0, BOTH, 10, 2, 3, 1))
    layer = Layer(tasks, {0: 5, 1: 4}, shards=2, workers=1)
    native = schedule(layer)
    assert native.task_order == [1, 0] and native.block_of_task == [0, 0]
    assert native.io == [(0, "E", 0), (0, "E", 1), (0, "SM", 0)]
    assert native.decompressions == [(1, 0), (1, 1), (0, 0), (0, 1)]
    # Decompressions end at 3, 6, 9, 12; reads at 2, 4, 14.
    # Expert 1: recombined 6-7, executed 7-11; expert 0: recombined 14-15, executed 15-20.
    assert [ticks(end) for end in native.execution_end] == [20, 11]
    assert ticks(native.makespan) == 20


def test_a_block_that_keeps_the_workers_busy_takes_no_more() -> None:
    # The workers finish 2 * 9 + 1 - (2 + 3) = 14 >= 1 ticks after the reads: the block is compute-bound from the start.
    tasks = (Task(0, 0, MISS, 3, 1, 9, 0), Task(1, 0, MISS, 3, 1, 9, 0), Task(2, 0, SIGN_MANTISSA, 3, 1, 9, 0))
    native = schedule(Layer(tasks, {0: 1, 1: 2, 2: 3}, shards=2, workers=1))
    assert native.block_of_task == [1, 0, 2]
    assert [read[:2] for read in native.io] == [
        *[(1, "E")] * 2, (1, "SM"), *[(0, "E")] * 2, (0, "SM"), *[(2, "E")] * 2
    ]  # fmt: skip


def test_a_read_that_workers_would_wait_for_goes_behind_the_base() -> None:
    # Decompression is faster than reading: one more shard read is 5 ticks of waiting for 1 of work, at any position.
    tasks = (
        Task(0, 0, MISS, 10, 5, 1, 0),
        Task(1, 0, SIGN_MANTISSA, 10, 5, 1, 0),
        Task(2, 0, SIGN_MANTISSA, 10, 5, 1, 0),
    )
    ahead = schedule(Layer(tasks, {0: 9, 1: 2, 2: 3}, shards=1, workers=1))
    assert ahead.task_order == [0, 2, 1] and ahead.block_of_task == [0, 0, 0]
    behind = schedule(Layer(tasks, {0: 1, 1: 2, 2: 3}, shards=1, workers=1))
    assert behind.task_order == [2, 1, 0]


def test_ties_are_broken_by_expert_then_tensor() -> None:
    tasks = tuple(Task(expert, tensor, EXPONENT, 4, 1, 1, 0) for expert in (7, 3) for tensor in (1, 0))
    native = schedule(Layer(tasks, {3: 5, 7: 5}, shards=1, workers=2))
    assert [(tasks[task].expert, tasks[task].tensor) for task in native.task_order] == [(3, 0), (3, 1), (7, 0), (7, 1)]


def test_a_fused_codec_has_one_read_per_missing_tensor() -> None:
    tasks = (Task(0, 0, MISS, 6, 99, 99, 99), Task(1, 0, BOTH, 6, 99, 99, 99), Task(2, 0, MISS, 7, 99, 99, 99))
    native = schedule(Layer(tasks, {0: 2, 1: 3, 2: 4}, shards=0, workers=1))
    assert native.io == [(2, "packed", 0), (0, "packed", 0)] and native.decompressions == []
    assert native.block_of_task == [1, -1, 0]
    assert [ticks(end) for end in native.execution_end] == [15, 3, 11]


# --- arguments


def call(**changes: object) -> _native.LayerSchedule:
    arguments: dict[str, object] = {
        "expert": [0, 1],
        "tensor": [0, 0],
        "state": [4, 1],
        "read_sign_mantissa_seconds": [1.0, 1.0],
        "read_shard_seconds": [1.0, 1.0],
        "decompress_seconds": [1.0, 1.0],
        "recombine_seconds": [1.0, 1.0],
        "execute_seconds": [1.0, 1.0],
        "shards": 1,
        "workers": 1,
    }
    return _native.schedule_layer(**(arguments | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": [4, 5]}, "a state is 0"),
        ({"state": [4]}, "state has 1 values, expected 2"),
        ({"execute_seconds": [1.0]}, "execute_seconds has 1 values, expected 2"),
        ({"decompress_seconds": [1.0, -1e-9]}, "between 0 and"),
        ({"decompress_seconds": [1.0, float("nan")]}, "between 0 and"),
        ({"read_shard_seconds": [1.0, float("inf")]}, "between 0 and"),
        ({"expert": [1, 1], "execute_seconds": [1.0]}, "given twice"),
        ({"tensor": [0, -1]}, "tensor's id"),
        ({"workers": 0}, "number of workers"),
        ({"shards": 65537}, "number of shards"),
        ({"shards": 0, "state": [4, 2]}, "no chunks that could be held apart"),
        ({"order": "lifo"}, "cache_affinity or fifo"),
        ({"shards": 60000, "read_shard_seconds": [9e4, 9e4]}, "add up to too much"),
    ],
)
def test_refuses_what_is_no_layer(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


def test_an_empty_layer_takes_no_time() -> None:
    native = schedule(Layer((), {}, shards=2, workers=1))
    assert native.makespan == native.lower_bound == native.io_end == 0.0
    assert native.io == [] and native.execution_end == []


def test_small_layers_have_every_kind_of_block() -> None:
    """The instances that are solved to optimality are not all of one trivial kind."""
    blocks = [max(schedule(small_layer(seed)).block_of_task, default=-1) + 1 for seed in range(200)]
    sizes = [len(small_layer(seed).tasks) for seed in range(200)]
    assert {1, 2, 3} <= set(blocks) and max(sizes) == 6
