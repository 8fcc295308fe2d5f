"""The cache-affinity scheduler in plain Python, written from docs/scheduling.md: the oracle of the native one.

Nothing here is clever: every candidate position of every task is tried by simulating its block from the start.
All times are whole ticks.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedule_instances import Layer, Task


@dataclass(frozen=True)
class Shard:
    """A shard in priority order: when it is ready, how long a worker needs."""

    ready: int
    decompress: int


@dataclass(frozen=True)
class Reference:
    """What the reference says about a layer."""

    order: list[int]
    block_of_task: list[int]
    io: list[tuple[int, str, int]]
    execution_end: list[int]
    makespan: int


def run_workers(shards: list[Shard], workers: int) -> tuple[list[int], list[int], list[int]]:
    """Decompress shards in list order of priority; returns end per shard, and finish and busy time per worker."""
    finish, busy, last = [0] * workers, [0] * workers, list(range(-workers, 0))
    end = [0] * len(shards)
    waiting = list(range(len(shards)))
    taken = 0
    while waiting:
        worker = min(range(workers), key=lambda w: (finish[w], last[w]))
        ready = [shard for shard in waiting if shards[shard].ready <= finish[worker]]
        chosen = ready[0] if ready else min(waiting, key=lambda shard: (shards[shard].ready, shard))
        start = max(finish[worker], shards[chosen].ready)
        end[chosen] = finish[worker] = start + shards[chosen].decompress
        busy[worker] += shards[chosen].decompress
        last[worker] = taken
        taken += 1
        waiting.remove(chosen)
    return end, finish, busy


def _reads(layer: Layer, block: list[int]) -> list[tuple[int, str, int]]:
    tasks = layer.tasks
    exponent = [(task, "E", shard) for task in block if tasks[task].reads_exponent for shard in range(layer.shards)]
    return exponent + [(task, "SM", 0) for task in block if tasks[task].reads_sign_mantissa]


def _read_ticks(layer: Layer, read: tuple[int, str, int]) -> int:
    task = layer.tasks[read[0]]
    return task.read_shard if read[1] == "E" else task.read_sign_mantissa


def simulate_block(layer: Layer, block: list[int]) -> tuple[list[int], list[int], int]:
    """Run a block alone on an idle machine: sorted idle times, sorted finish times, end of the reads."""
    now, read_end = 0, {}
    for read in _reads(layer, block):
        now += _read_ticks(layer, read)
        read_end[read] = now
    shards = [
        Shard(read_end.get((task, "E", shard), 0), layer.tasks[task].decompress)
        for task in block
        for shard in range(layer.shards)
    ]
    _, finish, busy = run_workers(shards, layer.workers)
    idle = [max(now, end) - work for end, work in zip(finish, busy, strict=True)]
    return sorted(idle), sorted(finish), now


def affinity_blocks(layer: Layer) -> list[list[int]]:
    """Blocks of task positions, as the specification builds them."""

    def sort_key(task: int) -> tuple[int, int, int]:
        entry = layer.tasks[task]
        return -layer.execute[entry.expert], entry.expert, entry.tensor

    working = [task for task, entry in enumerate(layer.tasks) if entry.has_work]
    type_one = sorted((task for task in working if layer.tasks[task].reads_sign_mantissa), key=sort_key)
    type_two = sorted((task for task in working if not layer.tasks[task].reads_sign_mantissa), key=sort_key)
    blocks = []
    for base in type_one:
        block = [base]
        while type_two and not _compute_bound(layer, block, base):
            task = type_two.pop(0)
            block.insert(_position(layer, block, base, task, sort_key(base) < sort_key(task)), task)
        blocks.append(block)
    if type_two:
        blocks.append(type_two)
    return blocks


def _compute_bound(layer: Layer, block: list[int], base: int) -> bool:
    _, finish, io_end = simulate_block(layer, block)
    interval = layer.tasks[base].read_shard
    return any(finish[n - 1] - io_end >= n * interval for n in range(1, min(layer.workers, layer.shards) + 1))


def _position(layer: Layer, block: list[int], base: int, task: int, base_first: bool) -> int:
    before = simulate_block(layer, block)[0]
    for position in range(len(block) + 1):
        after = simulate_block(layer, [*block[:position], task, *block[position:]])[0]
        if all(new <= old for new, old in zip(after, before, strict=True)):
            return position
    type_two = [position for position, other in enumerate(block) if other != base]
    if type_two:
        return type_two[-1] + 1
    return 1 if base_first else 0


def fifo_blocks(layer: Layer) -> list[list[int]]:
    """Every task on its own, in ascending order of expert and tensor."""

    def sort_key(task: int) -> tuple[int, int]:
        return layer.tasks[task].expert, layer.tasks[task].tensor

    return [[task] for task in sorted((t for t, e in enumerate(layer.tasks) if e.has_work), key=sort_key)]


def run_layer(layer: Layer, blocks: list[list[int]]) -> Reference:
    """Run blocks on the machine model."""
    tasks = layer.tasks
    order = [task for block in blocks for task in block]
    io = [read for block in blocks for read in _reads(layer, block)]
    now, read_end = 0, {}
    for read in io:
        now += _read_ticks(layer, read)
        read_end[read] = now
    numbered = [(task, shard) for task in order for shard in range(layer.shards)]
    shards = [Shard(read_end.get((task, "E", shard), 0), tasks[task].decompress) for task, shard in numbered]
    ready = {task: read_end.get((task, "SM", 0), 0) for task in order}
    for (task, _), end in zip(numbered, run_workers(shards, layer.workers)[0], strict=True):
        ready[task] = max(ready[task], end)
    execution_end = _execute(layer, ready)
    block_of_task = [-1] * len(tasks)
    for number, block in enumerate(blocks):
        for task in block:
            block_of_task[task] = number
    ends = [execution_end[expert] for expert in layer.experts]
    return Reference(order, block_of_task, io, ends, max(ends))


def _execute(layer: Layer, ready: dict[int, int]) -> dict[int, int]:
    """Serve recombinations and executions in the order in which they become available; returns end per expert.

    At the same time an execution comes before a recombination, then the lower expert, then the lower tensor.
    """
    waiting: list[tuple[int, int, int, int]] = []  # available at, kind (0: execution), expert, task
    left = dict.fromkeys(layer.execute, 0)
    for task, at in ready.items():
        waiting.append((at, 1, layer.tasks[task].expert, task))
        left[layer.tasks[task].expert] += 1
    waiting += [(0, 0, expert, -1) for expert, count in left.items() if count == 0]
    now, ends = 0, {}

    def service_order(job: tuple[int, int, int, int]) -> tuple[int, ...]:
        at, kind, expert, task = job
        became_available = completed.get(expert, -1) if kind == 0 else 0
        return at, kind, became_available, expert, _tensor(layer.tasks, task)

    completed: dict[int, int] = {}
    while waiting:
        job = min(waiting, key=service_order)
        waiting.remove(job)
        at, kind, expert, task = job
        now = max(now, at) + (layer.execute[expert] if kind == 0 else layer.tasks[task].recombine)
        if kind == 0:
            ends[expert] = now
            continue
        left[expert] -= 1
        if left[expert] == 0:
            completed[expert] = len(completed)
            waiting.append((now, 0, expert, -1))
    return ends


def _tensor(tasks: tuple[Task, ...], task: int) -> int:
    return tasks[task].tensor if task >= 0 else -1
