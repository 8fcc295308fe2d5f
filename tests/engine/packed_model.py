"""A small packed folder, built by hand: two layers of experts and two dense matrices, with the original weights at
hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.budget import PROCESS, MemoryBudget
from zipmoe.engine.engine import Engine
from zipmoe.engine.memory_plan import MemoryPlan
from zipmoe.engine.rows_on_demand import RowsOnDemand
from zipmoe.store.manifest import DenseMatrix, ExpertGroup, FileEntry, Manifest, Record
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.record_encoder import encode_record

EXPERTS = 8
PARAMETERS = ("gate_up_proj", "down_proj")
SHAPES = {"gate_up_proj": (96, 64), "down_proj": (64, 48)}
GROUPS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
FX3 = CodecSettings("fx3", None, 1)


@dataclass(frozen=True)
class PackedModel:
    """The folder, and what must come out of it."""

    folder: PackedFolder
    experts: dict[tuple[str, int, str], torch.Tensor]
    dense: dict[str, torch.Tensor]

    def plan(self, decode_threads: int = 2, rows_on_demand: Collection[str] = ()) -> MemoryPlan:
        manifest = self.folder.manifest
        on_demand = RowsOnDemand.of_manifest(manifest, rows_on_demand)
        separable = manifest.codec.name != "fx3"
        return MemoryPlan.of(manifest, decode_threads, separable=separable, rows_on_demand=on_demand)

    def budget(
        self, slots: int, decode_threads: int = 2, spare: int = 0, rows_on_demand: Collection[str] = ()
    ) -> MemoryBudget:
        """A budget that leaves exactly ``slots`` slots in each size class, and ``spare`` bytes that are less than a
        slot.
        """
        plan = self.plan(decode_threads, rows_on_demand)
        pool = plan.pool_reservation_bytes([slots] * len(plan.size_classes))
        fixed = {PROCESS: 100_000_000, "workspace": 50_000_000}
        dense = plan.dense_reservation_bytes + plan.rows_on_demand_bytes
        return MemoryBudget(sum(fixed.values()) + dense + plan.scratch_reservation_bytes + pool + spare, fixed)

    def engine(
        self, slots: int = 4, *, decode_threads: int = 2, rows_on_demand: Collection[str] = (), **options: object
    ) -> Engine:
        budget = self.budget(slots, decode_threads, rows_on_demand=rows_on_demand)
        return Engine(self.folder, budget, decode_threads=decode_threads, rows_on_demand=rows_on_demand, **options)

    def record(self, group: int, expert: int) -> Record:
        return self.folder.manifest.expert_groups[group].records[expert]

    def file(self, record: Record) -> Path:
        return self.folder.path / record.file

    def flip(self, record: Record, position: int) -> None:
        """Invert a bit of the record's byte at ``position``."""
        with self.file(record).open("r+b") as stream:
            stream.seek(record.offset + position)
            byte = stream.read(1)[0]
            stream.seek(record.offset + position)
            stream.write(bytes([byte ^ 0x10]))


def build(
    path: Path,
    codec: CodecSettings = FX3,
    *,
    second_layer_scale: int = 1,
    embedding_shape: tuple[int, int] = (100, 64),
) -> PackedModel:
    """Write the folder.

    ``second_layer_scale``: the second layer's matrices have this many times as many rows; ``embedding_shape``: rows and
    columns of the embedding, which is cut into two blocks.
    """
    generator = torch.Generator().manual_seed(3)

    def weights(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.02).to(torch.bfloat16)

    path.mkdir(parents=True, exist_ok=True)
    files: dict[str, FileEntry] = {}
    experts: dict[tuple[str, int, str], torch.Tensor] = {}
    groups = []
    for layer, group in enumerate(GROUPS):
        scale = second_layer_scale if layer == 1 else 1
        matrices = []
        for expert in range(EXPERTS):
            for name in PARAMETERS:
                rows, columns = SHAPES[name]
                experts[group, expert, name] = weights(rows * scale, columns)
            matrices.append([(name, experts[group, expert, name]) for name in PARAMETERS])
        names = [f"zipmoe.{group}.{expert}" for expert in range(EXPERTS)]
        records = write_file(path / f"packed-{layer}.safetensors", names, matrices, codec, files)
        groups.append(ExpertGroup(group, PARAMETERS, tuple(records)))
    dense = {EMBEDDING: weights(*embedding_shape), PROJECTION: weights(40, 64)}
    cut = embedding_shape[0] * 3 // 5
    blocks = {EMBEDDING: [dense[EMBEDDING][:cut], dense[EMBEDDING][cut:]], PROJECTION: [dense[PROJECTION]]}
    dense_matrices = []
    for parameter, parts in blocks.items():
        names = [f"zipmoe.{parameter}.{index}" for index in range(len(parts))]
        file = path / f"packed-{parameter}.safetensors"
        records = write_file(file, names, [[(parameter, part)] for part in parts], codec, files)
        rows, columns = dense[parameter].shape
        tied = (HEAD,) if parameter == EMBEDDING else ()
        dense_matrices.append(DenseMatrix(parameter, tied, rows, columns, tuple(records)))
    manifest = Manifest(
        zipmoe_version="0",
        model_type="hand_made",
        architecture="HandMade",
        source_fingerprint="0",
        source_bytes=0,
        codec=codec,
        files=files,
        expert_groups=tuple(groups),
        dense=tuple(dense_matrices),
        unpacked=(),
        guard_tensor="guard",
    )
    return PackedModel(PackedFolder(path, manifest), experts, dense)


def write_file(
    path: Path,
    names: list[str],
    matrices: list[list[tuple[str, torch.Tensor]]],
    codec: CodecSettings,
    files: dict[str, FileEntry],
) -> list[Record]:
    """Write one record per name behind a header page; enters the file into ``files``."""
    data = bytearray(4096)
    records = []
    for name, record_matrices in zip(names, matrices, strict=True):
        encoded = encode_record(record_matrices, codec, codec.shards)
        records.append(Record(name, path.name, len(data), encoded.data.nbytes, encoded.extents, encoded.matrices))
        data += encoded.data.tobytes()
    path.write_bytes(data)
    files[path.name] = FileEntry(len(data), None)
    return records


def with_record(model: PackedModel, group: int, expert: int, change: Callable[[Record], Record]) -> PackedModel:
    """The model with one expert's manifest entry changed."""
    manifest = model.folder.manifest
    groups = list(manifest.expert_groups)
    records = list(groups[group].records)
    records[expert] = change(records[expert])
    groups[group] = replace(groups[group], records=tuple(records))
    folder = PackedFolder(model.folder.path, replace(manifest, expert_groups=tuple(groups)))
    return replace(model, folder=folder)
