"""Is a native schedule one that the machine can run? Looks only at what is promised, not at how it was found."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from schedule_instances import Layer, ticks

from zipmoe import _native


def check_feasible(layer: Layer, schedule: _native.LayerSchedule) -> None:
    """Assert that every operation runs once and long enough, after what it needs, on a resource that is free."""
    tasks = layer.tasks
    read_end = _check_reads(layer, schedule)

    expected = {(task, shard) for task, entry in enumerate(tasks) if entry.has_work for shard in range(layer.shards)}
    assert len(schedule.decompressions) == len(schedule.decompression_times) == len(expected)
    assert set(schedule.decompressions) == expected
    shards_end: dict[int, int] = defaultdict(int)
    spans_of_worker = defaultdict(list)
    for (task, shard), (worker, start, end) in zip(schedule.decompressions, schedule.decompression_times, strict=True):
        span = ticks(start), ticks(end)
        assert 0 <= worker < layer.workers
        assert span[1] - span[0] == tasks[task].decompress
        assert span[0] >= read_end.get((task, "E", shard), 0)
        spans_of_worker[worker].append(span)
        shards_end[task] = max(shards_end[task], span[1])
    for spans in spans_of_worker.values():
        check_disjoint(spans)

    execution = [(ticks(start), ticks(end)) for start, end in schedule.execution_times]
    recombination = [(ticks(start), ticks(end)) for start, end in schedule.recombination_times]
    assert len(execution) == len(layer.experts) and len(recombination) == len(tasks)
    check_disjoint(execution + [recombination[task] for task, entry in enumerate(tasks) if entry.has_work])
    for expert, span in zip(layer.experts, execution, strict=True):
        assert span[0] >= 0 and span[1] - span[0] == layer.execute[expert]
    for task, entry in enumerate(tasks):
        start, end = recombination[task]
        assert end - start == (entry.recombine if entry.has_work else 0)
        if entry.has_work:
            assert start >= shards_end[task]
            assert start >= read_end.get((task, "SM", 0), 0)
            assert execution[layer.experts.index(entry.expert)][0] >= end
    assert ticks(schedule.makespan) == max(end for _, end in execution)
    assert [ticks(end) for end in schedule.execution_end] == [end for _, end in execution]


def _check_reads(layer: Layer, schedule: _native.LayerSchedule) -> dict[tuple[int, str, int], int]:
    expected = {
        (task, "E", shard)
        for task, entry in enumerate(layer.tasks)
        if entry.reads_exponent
        for shard in range(layer.shards)
    } | {(task, "SM", 0) for task, entry in enumerate(layer.tasks) if entry.reads_sign_mantissa}
    assert len(schedule.io) == len(schedule.io_times) == len(expected)
    assert set(schedule.io) == expected
    read_end, previous_end, total = {}, 0, 0
    for read, (start, end) in zip(schedule.io, schedule.io_times, strict=True):
        task = layer.tasks[read[0]]
        assert ticks(start) >= previous_end  # one at a time, in the order given
        assert ticks(end) - ticks(start) == (task.read_shard if read[1] == "E" else task.read_sign_mantissa)
        read_end[read] = previous_end = ticks(end)
        total += ticks(end) - ticks(start)
    assert ticks(schedule.io_end) == previous_end
    assert ticks(schedule.io_seconds) == total
    return read_end


def check_disjoint(spans: list[tuple[int, int]]) -> None:
    """Assert that no two spans of positive length overlap."""
    spans = sorted(span for span in spans if span[0] < span[1])
    for (_, end), (start, _) in pairwise(spans):
        assert start >= end
