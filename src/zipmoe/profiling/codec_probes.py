"""The processor's part of a reconstruction: decompression of shards, recombination, decoding of whole matrices.

Whole matrices are decoded twice: one after the other, and in turn with the products that they are for, as a model does
it. The latter is what a step pays: torch's threads stay awake for some time after a product and take cores from the
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from zipmoe import _native
from zipmoe.codecs.registry import encode_level
from zipmoe.profiling.expert_sample import SampleMatrix
from zipmoe.profiling.operating_points import OperatingPoint
from zipmoe.profiling.rounds import Probe
from zipmoe.profiling.touched_memory import TouchedMemory
from zipmoe.store.record_encoder import READABLE_TAIL_BYTES

BETWEEN_PRODUCTS = "decode between products"
Bytes = npt.NDArray[np.uint8]
_RECOMBINED_WEIGHTS = 512 << 10
"""Weights of a unit of recombination: large enough for the clock, small enough for all workers to stay busy."""


@dataclass(frozen=True)
class EncodedSample:
    """The sample encoded at one operating point."""

    point: OperatingPoint
    matrices: tuple[tuple[int, int, tuple[Bytes, ...], tuple[int, ...]], ...]
    """Rows, columns, sections, shard bytes of each."""

    @property
    def weights(self) -> int:
        """Of all matrices."""
        return sum(rows * columns for rows, columns, _, _ in self.matrices)

    @property
    def section_bytes(self) -> int:
        """Of all sections of all matrices."""
        return sum(section.nbytes for _, _, sections, _ in self.matrices for section in sections)

    @property
    def exponent_ratio(self) -> float:
        """rho: what the exponents became, in bytes per byte."""
        return self.section_bytes / self.weights - 1

    def shards(self) -> list[tuple[Bytes, int]]:
        """Compressed bytes and raw length of every shard that is not empty."""
        found = []
        for rows, columns, sections, shard_bytes in self.matrices:
            begin = 0
            for index, count in enumerate(shard_bytes):
                shard_rows = rows * (index + 1) // len(shard_bytes) - rows * index // len(shard_bytes)
                if count:
                    found.append((sections[0][begin : begin + count], shard_rows * columns))
                begin += count
        return found


def encode_sample(point: OperatingPoint, sample: Sequence[SampleMatrix]) -> EncodedSample:
    """Encode all matrices."""
    level, huffman_only = encode_level(point.settings)
    matrices = []
    for matrix in sample:
        rows, columns = (int(length) for length in matrix.weights.shape)
        shards = matrix.shards(point.settings.shards) if point.separable else 1
        sections, shard_bytes = _native.encode(point.settings.name, matrix.weights, level, huffman_only, shards)
        arrays = tuple(data for _, data in sections)
        matrices.append((rows, columns, arrays, tuple(int(count) for count in shard_bytes)))
    return EncodedSample(point, tuple(matrices))


def placed(encoded: Sequence[EncodedSample], memory: TouchedMemory) -> list[EncodedSample]:
    """The samples with their bytes in ``memory``; SM-chunks, the same for all codecs, only once."""
    shared: dict[int, Bytes] = {}
    result = []
    for each in encoded:
        matrices = []
        for index, (rows, columns, sections, shard_bytes) in enumerate(each.matrices):
            pieces = []
            for kind, section in enumerate(sections):
                sign_mantissa = each.point.separable and kind == 1
                piece = shared.get(index) if sign_mantissa else None
                if piece is None:
                    piece = memory.copy(section, tail_bytes=READABLE_TAIL_BYTES)
                if sign_mantissa:
                    shared[index] = piece
                pieces.append(piece)
            matrices.append((rows, columns, tuple(pieces), shard_bytes))
        result.append(EncodedSample(each.point, tuple(matrices)))
    return result


def codec_memory_bytes(encoded: Sequence[EncodedSample], sample: Sequence[SampleMatrix], workers: int) -> int:
    """Memory that the probes need at most."""
    weights = sum(matrix.weights.size for matrix in sample)
    largest = max(matrix.weights.size for matrix in sample)
    pieces = 2 + 2 * len(sample) + sum(len(sections) for each in encoded for _, _, sections, _ in each.matrices)
    sections = sum(each.section_bytes for each in encoded)
    return sections + 2 * weights + 2 * largest + _scratch_bytes(encoded) * workers + 8192 * pieces


def _scratch_bytes(encoded: Sequence[EncodedSample]) -> int:
    """Of one worker, a multiple of 64: a raw shard or a piece of recombined weights."""
    largest = max([2 * _RECOMBINED_WEIGHTS, *(raw for each in encoded for _, raw in each.shards())])
    return -(-largest // 64) * 64


@dataclass
class CodecProbe(Probe):
    """One step with one codec on some workers; unit: once through the whole sample."""

    step: str
    """``"decompress"``, ``"recombine"``, ``"decode"``, or ``"decode between products"``."""
    key: str
    """Operating point; empty for recombination."""
    workers: int
    sample_bytes: float
    """Raw exponents for decompression, BF16 for the others."""
    _run: Callable[[int], float]

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.step} {self.key} on {self.workers} {'worker' if self.workers == 1 else 'workers'}".replace(
            "  ", " "
        )

    @property
    def work_per_unit(self) -> float:
        """Bytes of the sample."""
        return self.sample_bytes

    def run(self, units: int) -> float:
        """Go through the sample ``units`` times."""
        return self._run(units)


def codec_probes(
    encoded: Sequence[EncodedSample],
    sample: Sequence[SampleMatrix],
    worker_counts: Sequence[int],
    memory: TouchedMemory,
) -> list[CodecProbe]:
    """All probes, with their data placed in ``memory``."""
    largest = max(matrix.weights.size for matrix in sample)
    in_memory = placed(encoded, memory)
    planes = _planes(sample, memory)
    out = memory.take(2 * largest).view(np.uint16)
    scratch = memory.take(_scratch_bytes(encoded) * max(worker_counts))
    work = {workers: _native.TimedWork(workers) for workers in worker_counts}
    probes = []
    for each in in_memory:
        for workers in worker_counts:
            if each.point.separable:
                probes.append(_decompression(each, work[workers], scratch))
            decoder = _native.TimedDecoder(each.point.settings.name, workers)
            probes.append(_decoding(each, decoder, out))
            if workers == max(worker_counts):
                probes.append(_decoding_between_products(each, decoder, out))
    return probes + [_recombination(planes, work[workers], scratch) for workers in worker_counts]


def _decompression(each: EncodedSample, work: _native.TimedWork, scratch: Bytes) -> CodecProbe:
    shards = each.shards()

    def run(units: int) -> float:
        return work.decompress(each.point.settings.name, shards, units * len(shards), scratch)

    return CodecProbe("decompress", each.point.key, work.workers, float(each.weights), run)


def _decoding(each: EncodedSample, decoder: _native.TimedDecoder, out: npt.NDArray[np.uint16]) -> CodecProbe:
    matrices = [(rows, columns, list(sections), list(shards)) for rows, columns, sections, shards in each.matrices]

    def run(units: int) -> float:
        return decoder.decode(matrices, units * len(matrices), out)

    return CodecProbe("decode", each.point.key, decoder.workers, 2.0 * each.weights, run)


def _decoding_between_products(
    each: EncodedSample, decoder: _native.TimedDecoder, out: npt.NDArray[np.uint16]
) -> CodecProbe:
    """Only decoding is timed."""
    matrices = [(rows, columns, list(sections), list(shards)) for rows, columns, sections, shards in each.matrices]
    decoded = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    rows_in = {columns: torch.ones(1, columns, dtype=torch.bfloat16) for _, columns, _, _ in matrices}

    def run(units: int) -> float:
        seconds = 0.0
        with torch.no_grad():
            for _ in range(units):
                for matrix in matrices:
                    rows, columns, _, _ = matrix
                    seconds += decoder.decode([matrix], 1, out)
                    functional.linear(rows_in[columns], decoded[: rows * columns].view(rows, columns))
        return seconds

    return CodecProbe(BETWEEN_PRODUCTS, each.point.key, decoder.workers, 2.0 * each.weights, run)


def _recombination(planes: Sequence[tuple[Bytes, Bytes]], work: _native.TimedWork, scratch: Bytes) -> CodecProbe:
    weights = sum(exponent.nbytes for exponent, _ in planes)

    def run(units: int) -> float:
        return work.recombine(planes, units * len(planes), scratch)

    return CodecProbe("recombine", "", work.workers, 2.0 * weights, run)


def _planes(sample: Sequence[SampleMatrix], memory: TouchedMemory) -> list[tuple[Bytes, Bytes]]:
    pieces = []
    for matrix in sample:
        flat = matrix.weights.reshape(-1)
        exponent, sign_mantissa = (memory.copy(plane) for plane in _native.split(flat))
        for begin in range(0, flat.size, _RECOMBINED_WEIGHTS):
            end = begin + _RECOMBINED_WEIGHTS
            pieces.append((exponent[begin:end], sign_mantissa[begin:end]))
    return pieces
