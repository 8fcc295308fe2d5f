"""What the work of one sparse layer costs, in seconds: constants of its tensors, the scheduler's makespan, the bound.

All experts of a layer share their tensors' shapes. Symbols of the ZipMoE paper (section 3.3): u = seconds to read one
tensor's SM-chunk, rho*u/K = one of its K E-shards, c = seconds to decompress a shard on one of L workers, p = seconds
to execute an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zipmoe import _native
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.partition import FULL_BYTES_PER_WEIGHT, CodecCapabilities, ExpertState
from zipmoe.store.manifest import Record

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
StateArray = npt.NDArray[np.uint8]

NOT_FULL = np.array([0, 1, 1, 1, 1])
"""Per state F, C, S, E, M: whether BF16 is missing."""
READS_EXPONENT = np.array([0, 0, 1, 0, 1])
"""Whether the E-chunk must be read (codecs with chunks)."""
READS_SIGN_MANTISSA = np.array([0, 0, 0, 1, 1])
"""Whether the SM-chunk must be read (codecs with chunks)."""
READS_PACKED = np.array([0, 0, 0, 0, 1])
"""Whether the packed record must be read (codecs without chunks)."""


class Makespan(Protocol):
    """Seconds from a layer's router to the end of its last execution."""

    def __call__(self, states: StateArray) -> float:
        """Makespan when the activated experts are in these states (uint8 [experts], codes of `ExpertState`)."""
        ...


@dataclass(frozen=True)
class TensorBytes:
    """One tensor of an expert."""

    weights: int
    exponent: int
    """Compressed E-chunk, or all packed bytes if the codec is not separable."""
    sign_mantissa: int
    """SM-chunk; 0 if the codec is not separable."""

    @classmethod
    def of_record(cls, record: Record) -> tuple[TensorBytes, ...]:
        """The tensors of one expert's record."""
        kinds = [extent.kind for extent in record.extents]
        tensors = []
        for matrix in record.matrices:
            lengths = dict(zip(kinds, (section.length for section in matrix.sections), strict=True))
            tensors.append(
                cls(matrix.rows * matrix.columns, lengths.get("E", 0) + lengths.get("packed", 0), lengths.get("SM", 0))
            )
        return tuple(tensors)


@dataclass(frozen=True)
class LayerCosts:
    """Constants of a layer's work."""

    read_sign_mantissa_seconds: tuple[float, ...]
    """u of each tensor of an expert; of a codec without chunks: the packed tensor."""
    read_shard_seconds: tuple[float, ...]
    """rho*u/K of each tensor."""
    decompress_seconds: tuple[float, ...]
    """c of each tensor: one shard on one worker."""
    recombine_seconds: tuple[float, ...]
    """Recombination of each tensor; it occupies the execution resource. On shared cores: all of its decoding."""
    execute_seconds_by_tokens: tuple[float, ...]
    """p of an expert on 1, 2, ... tokens."""
    shards: int
    """K; 0 for a codec whose experts are in memory as a whole or not at all, and which reconstructs nothing."""
    workers: int
    """L."""
    io_latency_seconds: float = 0.0
    """Paid once by a layer that reads anything."""
    decode_seconds: float = 0.0
    """Added to the execution of every expert that is not in F: decoding of a codec without chunks, if not free."""
    packed_execute_seconds_by_tokens: tuple[float, ...] = ()
    """p of an expert that is not in F, where that is not p of F with ``decode_seconds``: kernels on packed weights."""

    def __post_init__(self) -> None:
        tensors = len(self.read_sign_mantissa_seconds)
        per_tensor = (self.read_shard_seconds, self.decompress_seconds, self.recombine_seconds)
        if not tensors or any(len(values) != tensors for values in per_tensor):
            raise InvalidArgumentError("every tensor of an expert needs its four costs")
        single = [self.io_latency_seconds, self.decode_seconds]
        times = [self.execute_seconds_by_tokens, self.packed_execute_seconds_by_tokens]
        values = np.concatenate([self.read_sign_mantissa_seconds, *per_tensor, *times, single])
        if not (np.isfinite(values).all() and (values >= 0).all()) or not self.execute_seconds_by_tokens:
            raise InvalidArgumentError("costs of a layer must be finite seconds, none of them negative")
        if self.shards < 0 or self.workers < 1:
            raise InvalidArgumentError(f"{self.shards} shards and {self.workers} workers cannot work")

    @classmethod
    def from_profile(
        cls,
        profile: DeviceProfile,
        codec: str,
        capabilities: CodecCapabilities,
        tensors: Sequence[TensorBytes],
        shards: int,
        *,
        fast: bool = True,
    ) -> LayerCosts:
        """Costs of experts of these tensors on a measured machine.

        Where decoding and execution share the cores, decompression moves to the execution resource: nothing is left
        that workers could do beside it, and a tensor's recombination stands for all of its decoding.

        Args:
            profile: of the machine.
            codec: the folder's, or an operating point of the profile.
            capabilities: of the codec.
            tensors: of an expert.
            shards: K.
            fast: few tokens are multiplied with packed weights (docs/compute.md), if the machine was measured with it.

        Raises:
            InvalidArgumentError: the profile lacks the codec.
        """
        full_bytes = FULL_BYTES_PER_WEIGHT * sum(tensor.weights for tensor in tensors)
        scale = full_bytes / profile.execute_expert_bytes
        execute = tuple(seconds * scale for seconds in profile.execute_seconds_by_tokens)
        nothing = (0.0,) * len(tensors)
        if capabilities.whole:
            decode = profile.decode_bytes_per_second.get(codec)
            decode_seconds = full_bytes / decode if decode else 0.0
            packed: tuple[float, ...] = ()
            if fast and codec in profile.fused_bytes_per_second:
                packed_bytes = sum(tensor.exponent + tensor.sign_mantissa for tensor in tensors)
                packed = tuple(packed_bytes / rate for rate in profile.fused_bytes_per_second[codec])
                packed += tuple(seconds + decode_seconds for seconds in execute[len(packed) :])
                unpacked = tuple(full_bytes / rate for rate in profile.unpacked_bytes_per_second)
                execute, decode_seconds = unpacked + execute[len(unpacked) :], 0.0
            return cls(
                tuple(profile.read_seconds(tensor.exponent + tensor.sign_mantissa) for tensor in tensors),
                nothing,
                nothing,
                nothing,
                execute,
                0,
                profile.workers,
                profile.io_latency_seconds,
                decode_seconds,
                packed,
            )
        if codec not in profile.decompress_bytes_per_second:
            raise InvalidArgumentError(
                f"device profile {profile.name!r} knows nothing about codec {codec!r}",
                hint="measure this machine again: zipmoe profile",
            )
        if shards < 1:
            raise InvalidArgumentError(f"an E-chunk cannot have {shards} shards")
        decompress = tuple(tensor.weights / shards / profile.decompress_bytes_per_second[codec] for tensor in tensors)
        recombine = tuple(
            FULL_BYTES_PER_WEIGHT * tensor.weights / profile.recombine_bytes_per_second for tensor in tensors
        )
        if profile.shared_cores:
            recombine, decompress = _decode_seconds(profile, codec, tensors, decompress, recombine, shards), nothing
        return cls(
            tuple(profile.read_seconds(tensor.sign_mantissa) for tensor in tensors),
            tuple(profile.read_seconds(-(-tensor.exponent // shards)) for tensor in tensors),
            decompress,
            recombine,
            execute,
            shards,
            profile.workers,
            profile.io_latency_seconds,
        )

    def execute_seconds(self, tokens: float) -> float:
        """p in F for a mean number of tokens per expert: interpolated, beyond the last measurement extrapolated."""
        return _for_tokens(self.execute_seconds_by_tokens, tokens)

    def execute_seconds_by_state(self, tokens: float) -> FloatArray:
        """p per state F, C, S, E, M, decoding included."""
        full = self.execute_seconds(tokens)
        packed = self.packed_execute_seconds_by_tokens
        not_full = _for_tokens(packed, tokens) if packed else full + self.decode_seconds
        return np.where(NOT_FULL, not_full, full)


def _for_tokens(times: Sequence[float], tokens: float) -> float:
    measured = len(times)
    if tokens <= measured:
        return float(np.interp(tokens, np.arange(1, measured + 1), times))
    slope = times[-1] - times[-2] if measured > 1 else times[-1]
    return times[-1] + (tokens - measured) * max(slope, 0.0)


def _decode_seconds(
    profile: DeviceProfile,
    codec: str,
    tensors: Sequence[TensorBytes],
    decompress: Sequence[float],
    recombine: Sequence[float],
    shards: int,
) -> tuple[float, ...]:
    """Decoding of each tensor by all cores: as measured, or else its shards spread over the workers."""
    rate = profile.decode_bytes_per_second.get(codec)
    if rate is not None:
        return tuple(FULL_BYTES_PER_WEIGHT * tensor.weights / rate for tensor in tensors)
    return tuple(shards * shard / profile.workers + whole for shard, whole in zip(decompress, recombine, strict=True))


class ScheduledMakespan:
    """The native scheduler on this layer's costs; the default cost model."""

    def __init__(self, costs: LayerCosts, assignments: float, order: str = "cache_affinity") -> None:
        """Bind the scheduler.

        Args:
            costs: constants of the layer.
            assignments: token-expert pairs of a step (tokens times top_k); n activated experts get 1/n of them each.
            order: ``cache_affinity`` or ``fifo``.
        """
        self._costs = costs
        self._assignments = assignments
        self._order = order

    def __call__(self, states: StateArray) -> float:
        """Makespan in seconds."""
        costs = self._costs
        tokens = max(1.0, self._assignments / len(states))
        makespan = _native.layer_makespan(
            np.ascontiguousarray(states, dtype=np.uint8),
            len(costs.read_shard_seconds),
            costs.read_sign_mantissa_seconds,
            costs.read_shard_seconds,
            costs.decompress_seconds,
            costs.recombine_seconds,
            costs.execute_seconds_by_state(tokens)[states],
            costs.shards,
            costs.workers,
            self._order,
        )
        return float(makespan) + (costs.io_latency_seconds if reads_anything(states) else 0.0)


class MakespanBound:
    """max(total I/O, total decompression / L, total recombination and execution, longest chain): no schedule is
    shorter. The fallback for activated sets that are too large to schedule pattern by pattern.
    """

    def __init__(self, costs: LayerCosts, assignments: float) -> None:
        """Take the constants of the layer; arguments as for :class:`ScheduledMakespan`."""
        self._costs = costs
        self._assignments = assignments
        shard = np.array(costs.read_shard_seconds)
        sign_mantissa = np.array(costs.read_sign_mantissa_seconds)
        decompress = np.array(costs.decompress_seconds)
        recombine = np.array(costs.recombine_seconds)
        if costs.shards:
            reads_exponent, reads_sign_mantissa, reconstructs = READS_EXPONENT, READS_SIGN_MANTISSA, NOT_FULL
        else:
            reads_exponent, reads_sign_mantissa, reconstructs = READS_PACKED * 0, READS_PACKED, NOT_FULL * 0
        self._io = reads_exponent * (shard.sum() * costs.shards) + reads_sign_mantissa * sign_mantissa.sum()
        self._worker = reconstructs * (decompress.sum() * costs.shards / costs.workers)
        self._beside_execution = reconstructs * recombine.sum()
        # Of the slowest tensor: one shard's way or the SM-chunk's, whichever is longer, and recombination.
        exponent_way = np.outer(reads_exponent, shard) + np.outer(reconstructs, decompress)
        sign_mantissa_way = np.outer(reads_sign_mantissa, sign_mantissa)
        ways = np.maximum(exponent_way, sign_mantissa_way) + np.outer(reconstructs, recombine)
        self._chain = ways.max(axis=1)

    def __call__(self, states: StateArray) -> float:
        """Bound in seconds."""
        return float(self.of_patterns(np.bincount(states, minlength=5)[None, :])[0])

    def of_patterns(self, patterns: IntArray) -> FloatArray:
        """Bounds of many hit patterns: [...] for counts of F, C, S, E, M of [..., 5]."""
        costs = self._costs
        sizes = patterns.sum(axis=-1)
        execute = np.array(  # [sizes, states]
            [
                costs.execute_seconds_by_state(max(1.0, self._assignments / max(n, 1)))
                for n in range(int(sizes.max(initial=0)) + 1)
            ]
        )
        io, worker, chain, bound = (np.zeros(sizes.shape) for _ in range(4))
        reads = np.zeros(sizes.shape, dtype=np.bool_)
        for state in range(5):  # state by state: patterns may be millions
            count = patterns[..., state]
            present = count > 0
            io += count * self._io[state]
            worker += count * self._worker[state]
            executed = execute[sizes, state]
            bound += count * (self._beside_execution[state] + executed)
            np.maximum(chain, present * (self._chain[state] + executed), out=chain)
            if state >= ExpertState.SIGN_MANTISSA:
                reads |= present
        for other in (io, worker, chain):
            np.maximum(bound, other, out=bound)
        return np.asarray(bound + reads * costs.io_latency_seconds, dtype=np.float64)


def reads_anything(states: StateArray) -> bool:
    """Whether some expert lacks a chunk."""
    return bool((states >= ExpertState.SIGN_MANTISSA).any())


def states_of_pattern(pattern: IntArray) -> StateArray:
    """Activated experts of a hit pattern [5], the most popular first: uint8 [k]."""
    return np.repeat(np.arange(5, dtype=np.uint8), pattern)
