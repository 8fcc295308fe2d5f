"""Dense matrices: tiles, rows, whole."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from packed_model import EMBEDDING, GROUPS, HEAD, PROJECTION, PackedModel, build

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.engine import DECODED_TENSORS, Engine
from zipmoe.errors import BudgetExceededError, InvalidArgumentError, UnsupportedOperationError


@pytest.mark.parametrize("parameter", [EMBEDDING, PROJECTION, HEAD])
def test_tiles_cover_the_matrix(engine: Engine, model: PackedModel, parameter: str) -> None:
    expected = model.dense[EMBEDDING if parameter == HEAD else parameter]
    end = 0
    for row_begin, row_end, tile in engine.dense_tiles(parameter):
        assert row_begin == end
        assert tile.data_ptr() % 64 == 0
        assert torch.equal(tile, expected[row_begin:row_end])
        end = row_end
    assert end == len(expected)
    assert torch.equal(engine.dense_matrix(parameter), expected)


@pytest.mark.parametrize("codec", [CodecSettings("fx3", None, 1), CodecSettings("zstd", 1, 1)], ids=lambda c: c.name)
def test_rows_in_any_order_with_repetitions(tmp_path: Path, codec: CodecSettings) -> None:
    model = build(tmp_path, codec)
    rows = torch.tensor([99, 0, 59, 60, 61, 0, 7, 99, 98])
    for threads in (1, 3):
        with model.engine(2, decode_threads=threads) as engine:
            assert torch.equal(engine.dense_rows(EMBEDDING, rows), model.dense[EMBEDDING][rows])
            assert torch.equal(engine.dense_rows(EMBEDDING, rows[::2]), model.dense[EMBEDDING][rows[::2]])
            assert engine.dense_rows(EMBEDDING, rows[:0]).shape == (0, 64)


def test_row_numbers_are_checked(engine: Engine) -> None:
    for row in (-1, 100):
        with pytest.raises(IndexError, match="of a matrix with 100 rows"):
            engine.dense_rows(EMBEDDING, torch.tensor([row]))
    with pytest.raises(InvalidArgumentError, match="int64"):
        engine.dense_rows(EMBEDDING, torch.tensor([1], dtype=torch.int32))
    with pytest.raises(InvalidArgumentError, match="not a packed dense matrix"):
        engine.dense_tiles("model.norm.weight")


def test_tiles_left_early_release_the_engine(engine: Engine, model: PackedModel) -> None:
    for _ in engine.dense_tiles(EMBEDDING):
        break
    with pytest.raises(KeyError):
        for _ in engine.dense_tiles(EMBEDDING):
            raise KeyError("the caller fails")
    gc.collect()
    assert engine._access._depth == 0
    tiles = engine.dense_tiles(EMBEDDING)
    next(tiles)
    tiles.close()
    assert list(tiles) == []
    assert engine._access._depth == 0


def test_a_second_iteration_of_the_thread_ends_the_first(engine: Engine, model: PackedModel) -> None:
    first = engine.dense_tiles(EMBEDDING)
    next(first)
    assert torch.equal(next(engine.dense_tiles(PROJECTION))[2], model.dense[PROJECTION])
    with pytest.raises(UnsupportedOperationError, match="another iteration"):
        next(first)
    assert engine._access._depth == 0


def test_tiles_and_experts_do_not_share_scratch(engine: Engine, model: PackedModel) -> None:
    handle = engine.group(GROUPS[0])
    with engine.request(handle, [3]) as request:
        next(request)
        matrix = engine.matrix(handle, 3, "gate_up_proj")
        for _ in engine.dense_tiles(PROJECTION):
            pass
        assert torch.equal(matrix, model.experts[GROUPS[0], 3, "gate_up_proj"])


def test_large_decoded_tensors_are_reserved_while_they_live(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zipmoe.engine.decoded_tensors.ACCOUNTED_BYTES", 4096)
    count = 100 * 64 * 2
    with model.engine(4) as engine:
        budget = engine.budget
        whole = engine.dense_matrix(EMBEDDING)
        assert whole.data_ptr() % 64 == 0
        assert budget.reserved(DECODED_TENSORS) == count
        view = whole[3:5]
        del whole
        engine.account("something", 0)
        assert budget.reserved(DECODED_TENSORS) == count  # the view keeps the memory alive
        assert torch.equal(view, model.dense[EMBEDDING][3:5])
        del view
        engine.account("something", 0)
        assert budget.reserved(DECODED_TENSORS) == 0
        assert budget.reserved_bytes <= budget.total_bytes
        kept = []
        with pytest.raises(BudgetExceededError, match="decoded tensors in use needs"):
            for _ in range(100):
                kept.append(engine.dense_matrix(EMBEDDING))
        assert all(torch.equal(matrix, model.dense[EMBEDDING]) for matrix in kept)
