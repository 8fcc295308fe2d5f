"""The shortest makespan of a small layer, proved by OR-tools' constraint solver CP-SAT.

The model states the machine and nothing of any algorithm: reads never overlap, at most L decompressions run at a time,
recombinations and executions never overlap; a shard is decompressed after its read, a tensor recombined after its shards
and its SM read, an expert executed after its recombinations.
"""

from __future__ import annotations

from ortools.sat.python import cp_model
from schedule_instances import Layer


def optimal_makespan(layer: Layer, lower: int, upper: int, solver_seconds: float = 60.0) -> int:
    """Return the optimum in ticks; it must lie between a proven `lower` bound and an attained `upper` one.

    Raises RuntimeError if the solver does not prove optimality in time.
    """
    if lower == upper:
        return upper
    model = cp_model.CpModel()
    reads, decompressions, executions = [], [], []

    def interval(
        duration: int, resource: list[cp_model.IntervalVar], latest_end: int = upper
    ) -> tuple[cp_model.IntVar, cp_model.LinearExpr]:
        start = model.new_int_var(0, latest_end - duration, "")
        resource.append(model.new_fixed_size_interval_var(start, duration, ""))
        return start, start + duration

    # Reads wait for nothing, so some optimal schedule reads without gaps.
    read_total = sum(
        layer.shards * task.read_shard * task.reads_exponent + task.read_sign_mantissa * task.reads_sign_mantissa
        for task in layer.tasks
    )

    makespan = model.new_int_var(lower, upper, "makespan")
    execution_starts = {}
    for expert, duration in layer.execute.items():
        execution_starts[expert], end = interval(duration, executions)
        model.add(end <= makespan)
    first_start: dict[tuple[object, ...], cp_model.IntVar] = {}
    for task in layer.tasks:
        if not task.has_work:
            continue
        recombine_start, recombine_end = interval(task.recombine, executions)
        model.add(recombine_end <= execution_starts[task.expert])
        if task.reads_sign_mantissa:
            model.add(interval(task.read_sign_mantissa, reads, read_total)[1] <= recombine_start)
        # Tensors of an expert that cost the same are alike: their order is free.
        alike = (task.expert, task.state, task.read_shard, task.decompress, task.read_sign_mantissa, task.recombine)
        if alike in first_start:
            model.add(first_start[alike] <= recombine_start)
        first_start[alike] = recombine_start
        previous_read = previous_decompression = None
        for _ in range(layer.shards):
            decompress_start, decompress_end = interval(task.decompress, decompressions)
            model.add(decompress_end <= recombine_start)
            if task.reads_exponent:
                read_start, read_end = interval(task.read_shard, reads, read_total)
                model.add(read_end <= decompress_start)
                if previous_read is not None:  # the shards of a task are alike: their order is free
                    model.add(previous_read <= read_start)
                previous_read = read_end
            if previous_decompression is not None:
                model.add(previous_decompression <= decompress_start)
            previous_decompression = decompress_start
    model.add_no_overlap(reads)
    model.add_no_overlap(executions)
    model.add_cumulative(decompressions, [1] * len(decompressions), layer.workers)
    model.minimize(makespan)

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2
    solver.parameters.use_timetable_edge_finding_in_cumulative = True
    solver.parameters.use_overload_checker_in_cumulative = True
    solver.parameters.use_strong_propagation_in_disjunctive = True
    solver.parameters.max_time_in_seconds = solver_seconds
    status = solver.solve(model)
    if status != cp_model.OPTIMAL:
        raise RuntimeError(f"no proof of optimality within {solver_seconds} s: {solver.status_name(status)}")
    return round(solver.objective_value)
