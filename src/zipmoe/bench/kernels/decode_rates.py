"""Rates of decoding to BF16, codec by codec on the same weights, interleaved.

Packed matrices lie in memory beyond the caches, as in the engine's pool, and are decoded into one buffer that is used
again and again. With all cores one matrix after the other is decoded, as the engine does it, on the best instruction
set.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from zipmoe import _native
from zipmoe.bench.kernels.rotating_weights import Words, gaussian_weights
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.codecs.registry import DEFAULT_CODEC, settings_from_options
from zipmoe.profiling.codec_probes import EncodedSample, codec_memory_bytes, encode_sample, placed
from zipmoe.profiling.expert_sample import SampleMatrix
from zipmoe.profiling.operating_points import operating_points
from zipmoe.profiling.touched_memory import TouchedMemory

_MATRICES = 12
"""Of Qwen1.5-MoE's shape: 69 MB of BF16, beyond the caches of most processors."""
_SHAPE = (1408, 2048)


@dataclass
class DecodeRates:
    """One codec with its parameters."""

    key: str
    """The codec's name, with a level where that is not the default: ``zstd huf``."""
    settings: CodecSettings
    bfloat16_bytes: int
    """Of all matrices."""
    packed_bytes: int
    one_core_seconds: dict[str, list[float]] = field(default_factory=dict)
    """For all matrices, by instruction set, in every round."""
    all_cores: int = 1
    all_cores_seconds: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Packed bytes over BF16 bytes."""
        return self.packed_bytes / self.bfloat16_bytes

    def one_core_bytes_per_second(self, instruction_set: str) -> float:
        """BF16 bytes produced, median over the rounds."""
        return self.bfloat16_bytes / statistics.median(self.one_core_seconds[instruction_set])

    @property
    def all_cores_bytes_per_second(self) -> float:
        """BF16 bytes produced, median over the rounds."""
        return self.bfloat16_bytes / statistics.median(self.all_cores_seconds)


def measure_decoding(
    names: Sequence[str],
    workers: int,
    rounds: int,
    *,
    shape: tuple[int, int] = _SHAPE,
    matrices: int = _MATRICES,
) -> list[DecodeRates]:
    """All codecs of this build with their default parameters, zstd also without matching.

    Args:
        names: instruction sets.
        workers: threads for "all cores".
        rounds: of everything.
        shape: rows and columns of a matrix.
        matrices: so many different ones.

    Raises:
        ArithmeticError: a codec does not give the weights back.
    """
    sample = [SampleMatrix("", gaussian_weights(*shape, seed), shape[0]) for seed in range(matrices)]
    points = operating_points(settings_from_options(DEFAULT_CODEC))
    encoded = [encode_sample(point, sample) for point in points]
    memory = TouchedMemory(codec_memory_bytes(encoded, sample, workers))
    in_memory = placed(encoded, memory)
    out = memory.take(2 * shape[0] * shape[1]).view(np.uint16).reshape(shape)
    decoders = [_native.TimedDecoder(each.point.settings.name, workers) for each in in_memory]
    found = [
        DecodeRates(each.point.key, each.point.settings, 2 * each.weights, each.section_bytes, all_cores=workers)
        for each in in_memory
    ]
    for _ in range(rounds):
        for rates, each, decoder in zip(found, in_memory, decoders, strict=True):
            for name in names:
                seconds = _decode_all(each, out, name, sample[-1].weights)
                rates.one_core_seconds.setdefault(name, []).append(seconds)
            whole = [(rows, columns, list(sections), list(shards)) for rows, columns, sections, shards in each.matrices]
            rates.all_cores_seconds.append(decoder.decode(whole, len(whole), out.reshape(-1)))
    return found


def _decode_all(encoded: EncodedSample, out: Words, instruction_set: str, last: Words) -> float:
    """Seconds for all matrices on the calling thread."""
    codec = encoded.point.settings.name
    began = time.perf_counter()
    for rows, columns, sections, shard_bytes in encoded.matrices:
        _native.decode(codec, rows, columns, list(sections), list(shard_bytes), 0, rows, out, instruction_set)
    seconds = time.perf_counter() - began
    if not np.array_equal(out, last):
        raise ArithmeticError(f"{encoded.point.key} on {instruction_set} does not give the weights back")
    return seconds
