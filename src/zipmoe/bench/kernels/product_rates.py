"""Times of products with rotating weights, interleaved, with the rate at which the same memory can be read at all.

In every round each method goes through the matrices in turn, and ratios are taken within a round, so that a machine
that speeds up or slows down meanwhile does not favour anyone. Before a timed pass a few untimed calls wake the method's
threads, and the other methods' threads have time to fall asleep. A method that is too slow to see every matrix in a
pass goes on in the next one where it stopped.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from zipmoe import _native
from zipmoe.bench.kernels.product_methods import Call, Form, Method, calls, methods
from zipmoe.bench.kernels.rotating_weights import RotatingWeights, lay_out
from zipmoe.profiling.touched_memory import TouchedMemory

_PAUSE_SECONDS = 0.004
_WARM_UP_CALLS = 3
_PASS_SECONDS = 0.1
_MIB = 1 << 20

Clock = Callable[[], float]


@dataclass
class ProductTimes:
    """One method with one shape, number of tokens and number of threads."""

    method: Method
    read_bytes: float
    """Of one product."""
    seconds: list[float] = field(default_factory=list)
    """Of one product, in every round."""

    @property
    def median_seconds(self) -> float:
        """Over the rounds."""
        return statistics.median(self.seconds)

    @property
    def bytes_per_second(self) -> float:
        """Of the weights as this method reads them."""
        return self.read_bytes / self.median_seconds

    def faster_than(self, other: ProductTimes) -> float:
        """Median over the rounds of the other's time divided by this one's."""
        return statistics.median(b / a for a, b in zip(self.seconds, other.seconds, strict=True))


@dataclass
class ProductRates:
    """All methods with one shape, number of tokens and number of threads."""

    rows: int
    columns: int
    tokens: int
    threads: int
    matrices: int
    times: list[ProductTimes]
    read_bytes_per_second: list[float] = field(default_factory=list)
    """A loop that only reads the same memory with as many threads, in every round."""

    @property
    def memory_bytes_per_second(self) -> list[float]:
        """What memory gave in every round: the best rate that anybody had, the loop that only reads or a product.

        With few threads a loop without prefetching is slower than a product with it, and would be no floor.
        """
        products = zip(*(([times.read_bytes / each for each in times.seconds]) for times in self.times), strict=True)
        return [max(read, *rates) for read, rates in zip(self.read_bytes_per_second, products, strict=True)]

    def of(self, form: Form, instruction_set: str = "") -> ProductTimes | None:
        """Times of a method; None if it was not measured."""
        wanted = Method(form, instruction_set)
        return next((each for each in self.times if each.method == wanted), None)

    def achieved_over_floor(self, times: ProductTimes) -> float:
        """Median over the rounds of a product's time over that of reading its weights; 1 is the best there is."""
        return statistics.median(
            seconds * rate / times.read_bytes
            for seconds, rate in zip(times.seconds, self.memory_bytes_per_second, strict=True)
        )


@dataclass
class _Rotation:
    """Goes through the matrices, from pass to pass."""

    call: Call
    count: int
    clock: Clock
    next_matrix: int = 0

    def timed_pass(self) -> float:
        """Seconds per product."""
        time.sleep(_PAUSE_SECONDS)
        began = self.clock()
        for _ in range(_WARM_UP_CALLS):
            self._one()
        each = (self.clock() - began) / _WARM_UP_CALLS
        number = max(1, min(self.count, int(_PASS_SECONDS / max(each, 1e-9))))
        began = self.clock()
        for _ in range(number):
            self._one()
        return (self.clock() - began) / number

    def _one(self) -> None:
        self.call(self.next_matrix)
        self.next_matrix = (self.next_matrix + 1) % self.count


def measure_shape(
    weights: RotatingWeights,
    memory: npt.NDArray[np.uint8],
    *,
    tokens: Sequence[int],
    thread_counts: Sequence[int],
    names: tuple[str, ...],
    rounds: int,
    clock: Clock = time.perf_counter,
) -> list[ProductRates]:
    """Everything that is to be known of one shape; ``memory``: bytes that are read for the floor."""
    count = len(weights.raw)
    found: list[tuple[ProductRates, list[_Rotation], _native.TimedWork]] = []
    for threads in thread_counts:
        pool, work = _native.ComputeThreads(threads), _native.TimedWork(threads)
        for number in tokens:
            chosen = methods(number, names)
            rotations = [_Rotation(call, count, clock) for call in calls(weights, chosen, number, pool).values()]
            times = [ProductTimes(method, method.read_bytes(weights)) for method in chosen]
            found.append((ProductRates(weights.rows, weights.columns, number, threads, count, times), rotations, work))
    before = torch.get_num_threads()
    try:
        for _ in range(rounds):
            for rates, rotations, work in found:
                torch.set_num_threads(rates.threads)
                for each, rotation in zip(rates.times, rotations, strict=True):
                    each.seconds.append(rotation.timed_pass())
                rates.read_bytes_per_second.append(_read_rate(work, memory))
    finally:
        torch.set_num_threads(before)
    return [rates for rates, _, _ in found]


def measure_products(
    shapes: Sequence[tuple[int, int]],
    memory: TouchedMemory,
    *,
    megabytes: int,
    tokens: Sequence[int],
    thread_counts: Sequence[int],
    names: tuple[str, ...],
    rounds: int,
    tell: Callable[[list[ProductRates]], None] = lambda rates: None,
) -> list[ProductRates]:
    """Shape after shape; ``tell`` hears of each as it is done."""
    memory.clear()
    everything = memory.take(memory.capacity_bytes)
    found = []
    for rows, columns in shapes:
        weights = lay_out(rows, columns, megabytes, memory)
        read = everything[: max(_MIB, weights.bfloat16_bytes * len(weights.raw))]
        rates = measure_shape(weights, read, tokens=tokens, thread_counts=thread_counts, names=names, rounds=rounds)
        tell(rates)
        found += rates
    return found


def _read_rate(work: _native.TimedWork, memory: npt.NDArray[np.uint8]) -> float:
    """Bytes per second of reading, nothing else."""
    units = memory.nbytes // _MIB
    return units * _MIB / work.read_memory(memory[: units * _MIB], units)
