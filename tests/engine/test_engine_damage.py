"""Damaged, truncated or missing data: a named error, never a wrong number, and an engine that can go on or be
closed.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from packed_model import EMBEDDING, EXPERTS, GROUPS, PARAMETERS, PackedModel, with_record

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.engine import Engine
from zipmoe.errors import (
    CodecUnavailableError,
    CorruptRecordError,
    InvalidArgumentError,
    ManifestError,
    MissingShardError,
    PackedFolderError,
    TruncatedShardError,
    UnsupportedOperationError,
)
from zipmoe.store.manifest import Record
from zipmoe.store.packed_folder import PackedFolder


def fetch(engine: Engine, experts: list[int], group: int = 0) -> list[int]:
    with engine.request(engine.group(GROUPS[group]), experts) as request:
        return list(request)


@pytest.mark.parametrize("verify", ["always", "first"])
def test_a_flipped_byte_names_file_and_tensor(model: PackedModel, verify: str) -> None:
    record = model.record(0, 5)
    model.flip(record, record.length // 2)
    with model.engine(3, verify=verify) as engine:
        for _ in range(2):  # also when asked again
            with pytest.raises(CorruptRecordError) as caught:
                fetch(engine, [4, 5, 6])
            assert record.name in str(caught.value)
            assert str(model.file(record)) in str(caught.value)
            assert "checksum" in str(caught.value)
            assert caught.value.hint
        healthy = [expert for expert in range(EXPERTS) if expert != 5]
        assert sorted(fetch(engine, healthy)) == healthy
        handle = engine.group(GROUPS[0])
        assert torch.equal(engine.expert_matrix(handle, 4, PARAMETERS[0]), model.experts[GROUPS[0], 4, PARAMETERS[0]])


def test_every_byte_that_is_decoded_is_covered(model: PackedModel) -> None:
    record = model.record(1, 0)
    sections = [section for matrix in record.matrices for section in matrix.sections]
    with model.engine(2) as engine:
        for position in (
            at for section in sections for at in range(section.offset, section.offset + section.length, 211)
        ):
            model.flip(record, position)
            with pytest.raises(CorruptRecordError):
                fetch(engine, [0], group=1)
            model.flip(record, position)
        assert fetch(engine, [0], group=1) == [0]


def test_damage_after_the_first_read_is_found_unless_told_otherwise(model: PackedModel) -> None:
    record = model.record(0, 0)
    position = record.matrices[0].sections[0].offset + 200  # a sign and mantissa, behind header and index
    for verify, found in (("always", True), ("first", False)):
        with model.engine(2, verify=verify) as engine:
            fetch(engine, [0])
            fetch(engine, [1, 2])  # 0 is evicted
            model.flip(record, position)
            if found:
                with pytest.raises(CorruptRecordError):
                    fetch(engine, [0])
            else:
                assert fetch(engine, [0]) == [0]
            model.flip(record, position)


def test_without_checksums_the_encoding_itself_is_checked(model: PackedModel) -> None:
    record = model.record(0, 2)
    model.flip(record, 0)  # the magic number
    with model.engine(2, verify="never") as engine:
        assert sorted(fetch(engine, [0, 1, 3])) == [0, 1, 3]
        with pytest.raises(CorruptRecordError, match=r"zipmoe\.model\.layers\.0\.mlp\.experts\.2"):
            fetch(engine, [2])


def test_a_damaged_dense_matrix_is_found_at_the_start(model: PackedModel) -> None:
    block = model.folder.manifest.dense[0].blocks[1]
    model.flip(block, 200)
    with pytest.raises(CorruptRecordError, match=EMBEDDING):
        model.engine(2)
    with pytest.raises(CorruptRecordError, match=EMBEDDING):
        model.engine(2, verify="first")


def test_a_truncated_file(model: PackedModel) -> None:
    record = model.record(1, EXPERTS - 1)
    os.truncate(model.file(record), record.offset + record.length - 4000)
    with model.engine(2) as engine:
        with pytest.raises(
            TruncatedShardError, match=f"only {record.length - 4000} of {record.length} bytes"
        ) as caught:
            fetch(engine, [0, EXPERTS - 1], group=1)
        assert record.name in str(caught.value)
        assert fetch(engine, [0], group=1) == [0]


def test_a_missing_file(model: PackedModel) -> None:
    file = model.file(model.record(1, 0))
    file.unlink()
    with pytest.raises(MissingShardError, match=str(file)):
        model.engine(2)


def test_a_file_that_cannot_be_read(model: PackedModel) -> None:
    file = model.file(model.record(0, 0))
    file.unlink()
    file.mkdir()
    with pytest.raises(PackedFolderError), model.engine(2) as engine:
        fetch(engine, [0])


@pytest.mark.parametrize(
    "change",
    [
        lambda record: replace(record, offset=record.offset + 1),
        lambda record: replace(record, offset=-4096),
        lambda record: replace(record, offset=1 << 64),
        lambda record: replace(record, extents=()),
        lambda record: replace(record, extents=(replace(record.extents[0], length=1 << 40),)),
        lambda record: replace(record, matrices=record.matrices[:1]),
        lambda record: replace(record, matrices=(replace(record.matrices[0], rows=0), record.matrices[1])),
    ],
)
def test_a_manifest_that_contradicts_itself(model: PackedModel, change: object) -> None:
    spoiled = with_record(model, 0, 1, change)  # type: ignore[arg-type]
    with pytest.raises(ManifestError, match=r"experts\.1"):
        Engine(spoiled.folder, model.budget(2))


def test_a_matrix_of_another_shape_than_its_bytes(model: PackedModel) -> None:
    def taller(record: Record) -> Record:
        return replace(record, matrices=(replace(record.matrices[0], rows=97), record.matrices[1]))

    spoiled = with_record(model, 0, 1, taller)
    with spoiled.engine(2) as engine, pytest.raises(CorruptRecordError, match=r"experts\.1"):
        fetch(engine, [1])


def test_an_unknown_codec(model: PackedModel) -> None:
    manifest = replace(model.folder.manifest, codec=CodecSettings("rot13", None, 1))
    with pytest.raises(CodecUnavailableError, match="rot13"):
        Engine(PackedFolder(model.folder.path, manifest), model.budget(2))


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "sometimes"},
        {"io_threads": 0},
        {"decode_threads": -1},
        {"io_mode": "psychic"},
        {"io_backend": "carrier pigeon"},
        {"instruction_set": "mmx"},
    ],
)
def test_bad_options(model: PackedModel, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        Engine(model.folder, model.budget(2), **options)  # type: ignore[arg-type]


def test_a_closed_engine_refuses_and_its_tensors_stay_mapped(model: PackedModel) -> None:
    engine = model.engine(2)
    handle = engine.group(GROUPS[0])
    with engine.request(handle, [0]) as request:
        next(request)
        tile = engine.matrix(handle, 0, PARAMETERS[0])
    engine.close()
    engine.close()
    assert not tile.any()
    for use in (
        lambda: engine.request(handle, [0]).__enter__(),
        lambda: engine.matrix(handle, 0, PARAMETERS[0]),
        lambda: engine.dense_matrix(EMBEDDING),
        lambda: engine.account("x", 1),
    ):
        with pytest.raises(UnsupportedOperationError, match="closed"):
            use()
    assert engine.statistics.counters().misses == 1
    assert "codec fx3" in engine.mode_line("exact", "eager")


def test_closing_inside_a_request(model: PackedModel) -> None:
    engine = model.engine(2)
    with engine.request(engine.group(GROUPS[0]), [0, 1, 2]) as request:
        next(request)
        engine.close()
        with pytest.raises(UnsupportedOperationError):
            next(request)
