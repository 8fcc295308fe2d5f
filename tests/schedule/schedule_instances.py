"""Layers for the tests of the scheduler: durations are whole ticks of one microsecond, so that everything is exact."""

from __future__ import annotations

import random
from dataclasses import dataclass

from zipmoe import _native

FULL, BOTH, SIGN_MANTISSA, EXPONENT, MISS = range(5)
TICK_SECONDS = 1e-6


@dataclass(frozen=True)
class Task:
    """One tensor of one expert; durations in ticks, per shard where there are shards."""

    expert: int
    tensor: int
    state: int
    read_sign_mantissa: int
    read_shard: int
    decompress: int
    recombine: int

    @property
    def reads_exponent(self) -> bool:
        return self.state in (SIGN_MANTISSA, MISS)

    @property
    def reads_sign_mantissa(self) -> bool:
        return self.state in (EXPONENT, MISS)

    @property
    def has_work(self) -> bool:
        return self.state != FULL


@dataclass(frozen=True)
class Layer:
    """Tasks of a layer, ticks of execution per expert id, K and L."""

    tasks: tuple[Task, ...]
    execute: dict[int, int]
    shards: int
    workers: int

    @property
    def experts(self) -> list[int]:
        return sorted(self.execute)


def schedule(layer: Layer, order: str = "cache_affinity") -> _native.LayerSchedule:
    """The native schedule of a layer."""
    tasks = layer.tasks
    return _native.schedule_layer(
        [task.expert for task in tasks],
        [task.tensor for task in tasks],
        [task.state for task in tasks],
        [task.read_sign_mantissa * TICK_SECONDS for task in tasks],
        [task.read_shard * TICK_SECONDS for task in tasks],
        [task.decompress * TICK_SECONDS for task in tasks],
        [task.recombine * TICK_SECONDS for task in tasks],
        [layer.execute[expert] * TICK_SECONDS for expert in layer.experts],
        layer.shards,
        layer.workers,
        order,
    )


def ticks(seconds: float) -> int:
    """Seconds that are a whole number of ticks, as ticks."""
    count = round(seconds / TICK_SECONDS)
    assert abs(seconds / TICK_SECONDS - count) < 1e-4, seconds
    return count


def random_layer(generator: random.Random, *, most_tasks: int, most_shards: int, most_workers: int) -> Layer:
    """A layer of random shape and states.

    Costs are those of tensors of one size, of a few sizes, or of no common size; now the disk, now the workers, now the
    execution is the slowest part. Most experts are in one state, some hold their tensors in different ones.
    """
    shards = generator.randint(1, most_shards)
    workers = generator.randint(1, most_workers)
    tensors = generator.randint(1, 3)
    experts = sorted(generator.sample(range(100), generator.randint(1, max(1, most_tasks // tensors))))
    states = generator.choice([(0, 1, 2, 3, 4), (1, 2, 4), (2, 4), (1, 4), (3, 4, 2), (4,), (0, 1, 4)])
    longest_execution = generator.choice([3, 10, 30])

    def costs() -> tuple[int, int, int, int]:
        read = generator.randint(2, 20)
        shard = max(1, round(read * generator.choice([0.2, 0.35, 0.5, 0.8]) / shards))
        return read, shard, generator.randint(1, 20), generator.randint(0, 3)

    kind = generator.choice(["one size", "one size", "by tensor", "all different"])
    common, of_tensor = costs(), [costs() for _ in range(tensors)]
    tasks = []
    for expert in experts:
        state, mixed = generator.choice(states), generator.random() < 0.2
        for tensor in range(tensors):
            if mixed:
                state = generator.choice(states)
            chosen = {"one size": common, "by tensor": of_tensor[tensor]}.get(kind) or costs()
            tasks.append(Task(expert, tensor, state, *chosen))
    generator.shuffle(tasks)
    execute = {expert: generator.randint(0, longest_execution) for expert in experts}
    return Layer(tuple(tasks), execute, shards, workers)


def small_layer(seed: int) -> Layer:
    """A layer small enough to be solved to optimality: at most 6 tasks, K <= 2, L <= 3."""
    return random_layer(random.Random(seed), most_tasks=6, most_shards=2, most_workers=3)


def larger_layer(seed: int) -> Layer:
    """A layer beyond the reach of a solver: up to 45 tasks, K <= 6, L <= 6."""
    return random_layer(random.Random(seed), most_tasks=45, most_shards=6, most_workers=6)
