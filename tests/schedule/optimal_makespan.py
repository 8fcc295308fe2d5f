"""The shortest makespan of a small layer, proved by OR-tools' constraint solver CP-SAT.

The model states the machine and nothing of any algorithm: reads never overlap, at most L decompressions run at a time,
recombinations and executions never overlap; a shard is decompressed after its read, a tensor recombined after its
shards and its SM read, an expert executed after its recombinations. Beyond that it only names what is alike, and bounds
that hold for every schedule.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from ortools.sat.python import cp_model
from schedule_instances import Layer, Task

Costs = tuple[int, ...]


class _Model:
    def __init__(self, layer: Layer, lower: int, upper: int) -> None:
        self.layer = layer
        self.upper = upper
        self.cp = cp_model.CpModel()
        self.reads: list[cp_model.IntervalVar] = []
        self.decompressions: list[cp_model.IntervalVar] = []
        self.executions: list[cp_model.IntervalVar] = []
        # Reads wait for nothing, so some optimal schedule reads without gaps.
        self.read_total = sum(
            layer.shards * task.read_shard * task.reads_exponent + task.read_sign_mantissa * task.reads_sign_mantissa
            for task in layer.tasks
        )
        makespan = self.cp.new_int_var(max(lower, worker_bound(layer)), upper, "makespan")
        tasks_of: dict[int, list[Task]] = defaultdict(list)
        for task in layer.tasks:
            tasks_of[task.expert].append(task)
        alike_experts: dict[tuple[object, ...], list[cp_model.IntVar]] = defaultdict(list)
        for expert, tasks in tasks_of.items():
            start, end = self.interval(layer.execute[expert], self.executions)
            self.cp.add(end <= makespan)
            self.add_expert(tasks, start)
            alike_experts[layer.execute[expert], *sorted(_costs(task) for task in tasks)].append(start)
        self.in_order(alike_experts)
        self.cp.add_no_overlap(self.reads)
        self.cp.add_no_overlap(self.executions)
        self.cp.add_cumulative(self.decompressions, [1] * len(self.decompressions), layer.workers)
        self.cp.minimize(makespan)

    def interval(
        self, duration: int, resource: list[cp_model.IntervalVar]
    ) -> tuple[cp_model.IntVar, cp_model.LinearExpr]:
        """Start and end of an operation; one without duration takes no resource."""
        latest_end = self.read_total if resource is self.reads else self.upper
        start = self.cp.new_int_var(0, latest_end - duration, "")
        if duration > 0:
            resource.append(self.cp.new_fixed_size_interval_var(start, duration, ""))
        return start, start + duration

    def in_order(self, alike: dict[tuple[object, ...], list[cp_model.IntVar]]) -> None:
        """What is alike may as well start in the order given."""
        for starts in alike.values():
            for first, second in pairwise(starts):
                self.cp.add(first <= second)

    def add_expert(self, tasks: list[Task], execution_start: cp_model.IntVar) -> None:
        alike_tasks: dict[tuple[object, ...], list[cp_model.IntVar]] = defaultdict(list)
        for task in tasks:
            if not task.has_work:
                continue
            recombine_start, recombine_end = self.interval(task.recombine, self.executions)
            self.cp.add(recombine_end <= execution_start)
            alike_tasks[_costs(task)].append(recombine_start)
            if task.reads_sign_mantissa:
                self.cp.add(self.interval(task.read_sign_mantissa, self.reads)[1] <= recombine_start)
            alike_shards: dict[tuple[object, ...], list[cp_model.IntVar]] = defaultdict(list)
            for _ in range(self.layer.shards):
                decompress_start, decompress_end = self.interval(task.decompress, self.decompressions)
                self.cp.add(decompress_end <= recombine_start)
                alike_shards["decompress",].append(decompress_start)
                if task.reads_exponent:
                    read_start, read_end = self.interval(task.read_shard, self.reads)
                    self.cp.add(read_end <= decompress_start)
                    alike_shards["read",].append(read_start)
            self.in_order(alike_shards)
        self.in_order(alike_tasks)


def _costs(task: Task) -> Costs:
    return task.state, task.read_shard, task.decompress, task.read_sign_mantissa, task.recombine


def worker_bound(layer: Layer) -> int:
    """No schedule is shorter: workers that wait for their first shards, decompress everything, and the shortest rest.

    The k-th shard to be ready is ready no earlier than the k shortest shard reads together.
    """
    working = [task for task in layer.tasks if task.has_work]
    if not working:
        return 0
    reads = sorted(task.read_shard * task.reads_exponent for task in working for _ in range(layer.shards))
    busy_workers = min(layer.workers, len(reads))
    heads = sum(sum(reads[: count + 1]) for count in range(busy_workers))
    total = sum(layer.shards * task.decompress for task in working)
    tail = min(task.recombine + layer.execute[task.expert] for task in working)
    if busy_workers < layer.workers:  # some workers never work: they bound nothing
        return 0
    return -(-(heads + total) // layer.workers) + tail


def optimal_makespan(layer: Layer, lower: int, upper: int, solver_seconds: float = 120.0) -> int:
    """Return the optimum in ticks; it must lie between a proven `lower` bound and an attained `upper` one.

    Raises RuntimeError if the solver does not prove optimality in time.
    """
    if lower == upper:
        return upper
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2
    solver.parameters.use_timetable_edge_finding_in_cumulative = True
    solver.parameters.use_overload_checker_in_cumulative = True
    solver.parameters.use_strong_propagation_in_disjunctive = True
    solver.parameters.max_time_in_seconds = solver_seconds
    status = solver.solve(_Model(layer, lower, upper).cp)
    if status != cp_model.OPTIMAL:
        raise RuntimeError(f"no proof of optimality within {solver_seconds} s: {solver.status_name(status)}")
    return round(solver.objective_value)
