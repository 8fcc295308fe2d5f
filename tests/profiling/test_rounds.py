"""Budget, interleaving and exact rates of the rounds, on a clock that goes on only when a probe works."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from profiling_machine import FakeClock

from zipmoe.profiling.estimate import Estimate
from zipmoe.profiling.rounds import run_rounds


@dataclass
class FakeProbe:
    clock: FakeClock
    label: str
    bytes_per_second: float
    work_per_unit: float = 1e6
    least_units: int = 1
    family: str = ""
    overhead_seconds: float = 0.0
    untimed_seconds: float = 0.0
    """Of every unit."""
    log: list[str] = field(default_factory=list)
    slowdown: float = 1.0
    """Every run is this much slower than the one before."""
    units: int = 0

    def run(self, units: int) -> float:
        self.log.append(self.label)
        self.units += units
        seconds = units * self.work_per_unit / self.bytes_per_second
        self.clock.now += seconds + self.overhead_seconds + self.untimed_seconds * units
        self.bytes_per_second /= self.slowdown
        return seconds


def test_rates_are_exact_and_overhead_is_not_counted() -> None:
    clock = FakeClock()
    probes = [
        FakeProbe(clock, "slow", 1e8, overhead_seconds=0.001, family="a"),
        FakeProbe(clock, "fast", 3e9, family="b"),
    ]
    results = run_rounds(probes, 2.0, clock=clock)
    assert [found.rate().median for found in results.samples if found] == pytest.approx([1e8, 3e9])
    assert all(found is not None and found.rate().spread == pytest.approx(0) for found in results.samples)
    assert results.left_out == ()


def test_work_is_counted_without_the_warm_up() -> None:
    clock = FakeClock()
    probe = FakeProbe(clock, "p", 1e8)
    (found,) = run_rounds([probe], 1.0, clock=clock).samples
    assert found is not None
    assert found.work == (probe.units - 1) * 1e6
    assert found.work == sum(units for units, _ in found.runs) * 1e6
    assert found.seconds_per_unit().median == pytest.approx(0.01)


def test_no_probe_exceeds_its_share() -> None:
    clock = FakeClock()
    probes = [FakeProbe(clock, str(i), 1e7 * 3**i, family=str(i), overhead_seconds=0.002) for i in range(6)]
    run_rounds(probes, 6.0, clock=clock)
    for probe in probes:
        spent = probe.units * probe.work_per_unit / probe.bytes_per_second + 0.002 * len(probe.log)
        assert spent <= 1.0 + 0.003
    assert clock.now <= 6.05


def test_work_that_is_not_timed_takes_of_the_share() -> None:
    clock = FakeClock()
    probe = FakeProbe(clock, "p", 1e9, untimed_seconds=0.05)
    (found,) = run_rounds([probe], 2.0, clock=clock).samples
    assert found is not None
    assert found.rate().median == pytest.approx(1e9)
    assert len(found.runs) >= 5
    assert clock.now <= 2.0


def test_rounds_are_interleaved() -> None:
    clock = FakeClock()
    log: list[str] = []
    probes = [FakeProbe(clock, name, 1e9, log=log) for name in "abc"]
    run_rounds(probes, 3.0, clock=clock)
    assert log[: 3 * 5] == list("abc") * 5


def test_what_does_not_fit_is_left_out_and_named() -> None:
    clock = FakeClock()
    small = FakeProbe(clock, "small blocks", 1e6, work_per_unit=1e4, family="disk")
    large = FakeProbe(clock, "large blocks", 1e6, work_per_unit=1e7, family="disk")
    results = run_rounds([small, large], 2.0, clock=clock)
    assert results.left_out == ("large blocks",)
    assert results.samples[0] is not None
    assert results.samples[1] is None
    assert large.log == []  # not tried: the small ones told how long it would take
    assert clock.now <= 2.0


def test_a_probe_that_fits_only_once_gives_one_sample() -> None:
    clock = FakeClock()
    (found,) = run_rounds([FakeProbe(clock, "p", 1e6, work_per_unit=7e5)], 1.0, clock=clock).samples
    assert found is not None
    assert found.runs == [(1, pytest.approx(0.7))]


def test_a_machine_that_slows_down_stays_within_the_time() -> None:
    clock = FakeClock()
    probe = FakeProbe(clock, "p", 1e9, slowdown=1.5)
    (found,) = run_rounds([probe], 1.0, clock=clock).samples
    assert found is not None
    assert clock.now <= 1.0 + 0.7
    assert found.rate().spread > 0.1


def test_progress_adds_up_to_the_time_spent() -> None:
    clock = FakeClock()
    passed: list[float] = []
    run_rounds([FakeProbe(clock, "p", 1e8)], 1.0, clock=clock, advance=lambda label, seconds: passed.append(seconds))
    assert sum(passed) == pytest.approx(clock.now)


def test_nothing_to_do() -> None:
    assert run_rounds([], 1.0).samples == ()


def test_estimate() -> None:
    assert Estimate.of([5.0]) == Estimate(5.0, 5.0, 5.0, 1)
    assert Estimate.of([3.0, 1.0, 2.0]) == Estimate(2.0, 1.0, 3.0, 3)
    assert Estimate.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Estimate(3.0, 2.0, 4.0, 5)
    assert Estimate.of([1.0, 2.0, 3.0, 4.0, 100.0]).spread == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="no values"):
        Estimate.of([])
