"""A packed folder of 6 layers of 60 experts as large as those of Qwen1.5-MoE, on paper, and a measured machine."""

from __future__ import annotations

from datetime import UTC, datetime

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.planning.device import DeviceProfile, HostFingerprint
from zipmoe.store.manifest import DenseMatrix, ExpertGroup, Extent, Manifest, MatrixEntry, Record, Section

LAYERS, EXPERTS = 6, 60
SHAPES = (("gate_up_proj", 2816, 2048), ("down_proj", 2048, 1408))
WEIGHTS = sum(rows * columns for _, rows, columns in SHAPES)
RHO = 0.4
EMBEDDING = "model.embed_tokens.weight"

MACHINE = DeviceProfile(
    name="two cores",
    host=HostFingerprint("x86_64", "AMD EPYC", 2, 24),
    measured_at=datetime(2026, 11, 30, tzinfo=UTC),
    io_bytes_per_second={65536: 1.85e9, 262144: 3.34e9, 1 << 20: 3.86e9, 4 << 20: 3.88e9, 16 << 20: 3.76e9},
    io_latency_seconds=50e-6,
    decompress_bytes_per_second={"zstd": 1.44e9},
    recombine_bytes_per_second=36.3e9,
    decode_bytes_per_second={"zstd": 2.71e9, "fx3": 37.6e9},
    exponent_ratio={"zstd": 0.4035, "fx3": 0.397},
    execute_seconds_by_tokens=(1.2e-3, 1.3e-3),
    execute_expert_bytes=2 * WEIGHTS,
    workers=2,
    memory_bytes_per_second=29e9,
    shared_cores=True,
    dispatch_seconds=3e-6,
)
"""Numbers that ``zipmoe profile`` measured with such a model."""


def _record(name: str, shapes: tuple[tuple[str, int, int], ...], *, separable: bool) -> Record:
    matrices, exponent, sign_mantissa = [], 0, 0
    for matrix, rows, columns in shapes:
        weights = rows * columns
        packed = int(weights * RHO)
        lengths = (packed, weights) if separable else (packed + weights,)
        matrices.append(MatrixEntry(matrix, rows, columns, tuple(Section(0, length) for length in lengths), (packed,)))
        exponent += lengths[0]
        sign_mantissa += weights if separable else 0
    lengths = (("E", exponent), ("SM", sign_mantissa)) if separable else (("packed", exponent),)
    extents, offset = [], 0
    for kind, length in lengths:
        extents.append(Extent(kind, offset, length, 0))
        offset += -(-length // 4096) * 4096
    return Record(name, "file", 0, offset, tuple(extents), tuple(matrices))


def large_manifest(codec: str, experts: int = EXPERTS) -> Manifest:
    """The manifest; nothing of it is on disk."""
    separable = codec != "fx3"

    def dense(name: str, rows: int, columns: int) -> DenseMatrix:
        block = _record(name, (("weight", rows, columns),), separable=separable)
        return DenseMatrix(name, (), rows, columns, (block,))

    groups = tuple(
        ExpertGroup(
            f"model.layers.{layer}.mlp.experts",
            tuple(name for name, _, _ in SHAPES),
            tuple(_record(f"{layer}.{expert}", SHAPES, separable=separable) for expert in range(experts)),
        )
        for layer in range(LAYERS)
    )
    settings = CodecSettings("zstd", 3, 4) if separable else CodecSettings("fx3", None, 1)
    matrices = (dense(EMBEDDING, 8192, 2048), dense("lm_head.weight", 8192, 2048))
    return Manifest("0", "qwen2_moe", "Qwen2MoeForCausalLM", "f", 0, settings, {}, groups, matrices, (), "g")
