"""Statistics on fixed numbers with known results."""

from __future__ import annotations

import numpy as np
import pytest

from zipmoe.bench.latency_statistics import (
    agreement,
    hit_rate,
    median_tpot,
    median_ttft,
    percentile,
    read_bytes_per_token,
    tokens_per_second,
    tpot_percentile,
)
from zipmoe.bench.machine_rates import MachineRates
from zipmoe.bench.measurement import Generation
from zipmoe.bench.roofline import roofline


def _generation(*token_seconds: float, batch: int = 1, **counts: int) -> Generation:
    steps = len(token_seconds)
    tokens = tuple(tuple(range(steps)) for _ in range(batch))
    return Generation(batch, token_seconds, tuple(1000 * step for step in range(steps)), tokens, **counts)


SLOW = _generation(5.0, 6.0, 8.0, 9.0)  # steps 1, 2, 1
FAST = _generation(1.0, 1.5, 2.0, 4.5)  # steps 0.5, 0.5, 2.5


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.95, 1.0])
def test_percentiles_are_those_of_numpy(share: float) -> None:
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0]
    assert percentile(values, share) == pytest.approx(np.percentile(values, 100 * share))


def test_medians() -> None:
    assert median_ttft([SLOW, FAST]) == 3.0
    assert median_tpot([SLOW, FAST]) == 0.75
    assert median_tpot([SLOW, FAST, _generation(1.0, 3.0)]) == 1.0


def test_p95_is_over_all_steps() -> None:
    assert tpot_percentile([SLOW, FAST], 0.95) == pytest.approx(np.percentile([1, 2, 1, 0.5, 0.5, 2.5], 95))


def test_throughput_counts_every_sequence() -> None:
    assert tokens_per_second([SLOW]) == 0.75
    assert tokens_per_second([_generation(5.0, 6.0, 8.0, 9.0, batch=4)]) == 3.0
    assert read_bytes_per_token([_generation(5.0, 6.0, batch=4)]) == 250.0


def test_of_nothing_there_is_nothing() -> None:
    assert median_ttft([]) is None
    one_token = [_generation(1.0)]
    assert (median_ttft(one_token), median_tpot(one_token), tokens_per_second(one_token)) == (1.0, None, None)
    assert (hit_rate(one_token), tpot_percentile(one_token, 0.95), read_bytes_per_token(one_token)) == (
        None,
        None,
        None,
    )


def test_hit_rate() -> None:
    assert hit_rate([_generation(1.0, hits=3, misses=1), _generation(1.0, hits=0, misses=4)]) == 0.375


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == (2, 4)
    assert agreement([[1, 2], [5, 6]], [[1, 2], [5, 6]]) == (4, 4)
    assert agreement([[1, 2]], [[1, 2, 3]]) == (2, 3)


def test_roofline_is_the_larger_bound() -> None:
    run = _generation(5.0, 6.0, 8.0, 9.0, decode_hits=9, decode_misses=3, decode_read_bytes=6000)
    rates = [MachineRates(9000.0, 900.0, ""), MachineRates(11000.0, 1100.0, "")]
    found = roofline([run], dense_bytes=2000, expert_bytes=500, rates=rates)
    assert found is not None
    assert (found.active_bytes, found.missed_bytes) == (2000 + 500 * 4, 2000)
    assert (found.memory_seconds, found.disk_seconds) == (0.4, 2.0)
    assert (found.floor_seconds, found.bound_by) == (2.0, "disk")
    assert found.achieved_over_floor == pytest.approx((4 / 3) / 2.0)


def test_no_roofline_without_counts_or_rates() -> None:
    assert roofline([SLOW], 1.0, 1.0, [MachineRates(1.0, 1.0, "")]) is None
    counted = _generation(1.0, 2.0, decode_hits=1, decode_misses=0, decode_read_bytes=0)
    assert roofline([counted], 1.0, 1.0, []) is None
