"""Embedding rows read on demand: the same numbers as from memory, in far less of it, and never unverified."""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path

import pytest
import torch
from packed_model import EMBEDDING, GROUPS, HEAD, PROJECTION, PackedModel, build

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.budget import DENSE, EXPERT_POOL, ROWS_ON_DEMAND, MemoryBudget, format_bytes
from zipmoe.engine.engine import Engine
from zipmoe.engine.memory_usage import resident_bytes
from zipmoe.engine.rows_on_demand import LARGEST_DETAILS_SHARE, RowsOnDemand
from zipmoe.errors import BudgetTooSmallError, CorruptRecordError, InvalidArgumentError, TruncatedShardError

CODECS = [CodecSettings("fx3", None, 1), CodecSettings("zstd", 1, 5), CodecSettings("lz4", None, 5)]
ROWS, COLUMNS = 3000, 256


@pytest.fixture(params=CODECS, ids=lambda codec: codec.name)
def tall(tmp_path: Path, request: pytest.FixtureRequest) -> PackedModel:
    """A model whose embedding has more pages than one look-up needs."""
    return build(tmp_path / "packed", request.param, embedding_shape=(ROWS, COLUMNS))


@pytest.fixture
def tall_fx3(tmp_path: Path) -> PackedModel:
    return build(tmp_path / "packed", embedding_shape=(ROWS, COLUMNS))


@pytest.mark.parametrize("verify", ["always", "first", "never"])
def test_rows_equal_those_of_the_resident_matrix(tall: PackedModel, verify: str) -> None:
    generator = torch.Generator().manual_seed(5)
    with tall.engine(2) as resident, tall.engine(2, rows_on_demand=[EMBEDDING], verify=verify) as engine:
        for count in (0, 1, 2, 64, 700):
            rows = torch.randint(0, ROWS, (count,), generator=generator)
            rows = torch.cat([rows, rows[: count // 3]])  # with repetitions
            expected = resident.dense_rows(EMBEDDING, rows)
            assert torch.equal(expected, tall.dense[EMBEDDING][rows])
            assert torch.equal(engine.dense_rows(EMBEDDING, rows), expected)
        for rows in ([0], [ROWS - 1], [ROWS - 1, 0], [1799, 1800], list(range(ROWS))):
            assert torch.equal(engine.dense_rows(EMBEDDING, torch.tensor(rows)), tall.dense[EMBEDDING][rows])
        for row in (-1, ROWS):
            with pytest.raises(IndexError, match=f"of a matrix with {ROWS} rows"):
                engine.dense_rows(EMBEDDING, torch.tensor([row]))


def test_the_whole_matrix_and_the_others(tall: PackedModel) -> None:
    with tall.engine(2, rows_on_demand=[EMBEDDING]) as engine:
        assert torch.equal(engine.dense_matrix(EMBEDDING), tall.dense[EMBEDDING])
        parts = [(begin, end, tile.clone()) for begin, end, tile in engine.dense_tiles(HEAD)]
        assert [(begin, end) for begin, end, _ in parts] == [(0, 1800), (1800, ROWS)]
        assert torch.equal(torch.cat([tile for _, _, tile in parts]), tall.dense[EMBEDDING])
        assert torch.equal(engine.dense_matrix(PROJECTION), tall.dense[PROJECTION])
        handle = engine.group(GROUPS[0])
        with engine.request(handle, [3]) as request:  # rows may be looked up while experts are there
            next(request)
            rows = torch.tensor([7, 2999])
            assert torch.equal(engine.dense_rows(EMBEDDING, rows), tall.dense[EMBEDDING][rows])
            assert torch.equal(engine.matrix(handle, 3, "down_proj"), tall.experts[GROUPS[0], 3, "down_proj"])


def test_one_row_reads_a_few_pages(tall_fx3: PackedModel) -> None:
    with tall_fx3.engine(2, rows_on_demand=[EMBEDDING]) as engine:
        before = engine.statistics.counters()
        engine.dense_rows(EMBEDDING, torch.tensor([1000]))
        spent = engine.statistics.counters().since(before)
        assert 0 < spent.read_bytes <= 4 * 4096
        assert spent.wait_seconds > 0
        before = engine.statistics.counters()
        engine.dense_rows(EMBEDDING, torch.tensor([1000]))
        assert engine.statistics.counters().since(before).read_bytes == spent.read_bytes  # nothing was kept


def test_unknown_parameters_are_refused(tall_fx3: PackedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="not a packed dense matrix"):
        Engine(tall_fx3.folder, tall_fx3.budget(2), rows_on_demand=["model.norm.weight"])


# --- integrity


def test_damage_after_loading_names_file_and_tensor(tall: PackedModel) -> None:
    block = tall.folder.manifest.dense[0].blocks[1]
    position = block.matrices[0].sections[-1].offset + block.length // 4
    rows = torch.arange(1800, ROWS)
    with tall.engine(2, rows_on_demand=[EMBEDDING]) as engine:
        tall.flip(block, position)
        for _ in range(2):
            with pytest.raises(CorruptRecordError) as caught:
                engine.dense_rows(EMBEDDING, rows)
            assert block.name in str(caught.value)
            assert str(tall.file(block)) in str(caught.value)
            assert caught.value.hint
        with pytest.raises(CorruptRecordError, match="checksum"):
            engine.dense_matrix(EMBEDDING)
        above = torch.arange(1800)  # the other block
        assert torch.equal(engine.dense_rows(EMBEDDING, above), tall.dense[EMBEDDING][above])
        tall.flip(block, position)
        assert torch.equal(engine.dense_rows(EMBEDDING, rows), tall.dense[EMBEDDING][rows])


@pytest.mark.parametrize("verify", ["first", "never"])
def test_without_checksums_of_pages_a_change_is_not_seen(tall_fx3: PackedModel, verify: str) -> None:
    block = tall_fx3.folder.manifest.dense[0].blocks[1]
    rows = torch.arange(1800, ROWS)
    with tall_fx3.engine(2, rows_on_demand=[EMBEDDING], verify=verify) as engine:
        tall_fx3.flip(block, block.length // 2)
        found = engine.dense_rows(EMBEDDING, rows)
        assert 0 < (found != tall_fx3.dense[EMBEDDING][rows]).sum() < 2 * COLUMNS


def test_damage_before_loading_is_found_at_the_start(tall: PackedModel) -> None:
    tall.flip(tall.folder.manifest.dense[0].blocks[1], 200)
    with pytest.raises(CorruptRecordError, match=EMBEDDING):
        tall.engine(2, rows_on_demand=[EMBEDDING])


def test_a_file_that_was_truncated_after_loading(tall_fx3: PackedModel) -> None:
    block = tall_fx3.folder.manifest.dense[0].blocks[1]
    with tall_fx3.engine(2, rows_on_demand=[EMBEDDING]) as engine:
        os.truncate(tall_fx3.file(block), block.offset + 4096)
        with pytest.raises(TruncatedShardError, match=block.name):
            engine.dense_rows(EMBEDDING, torch.tensor([ROWS - 1]))
        assert torch.equal(engine.dense_rows(EMBEDDING, torch.tensor([5])), tall_fx3.dense[EMBEDDING][5:6])


# --- memory


@pytest.mark.parametrize("codec", CODECS[:2], ids=lambda codec: codec.name)
def test_the_table_is_not_resident(tmp_path: Path, codec: CodecSettings) -> None:
    model = build(tmp_path, codec, embedding_shape=(40_000, 512))
    length = sum(block.length for block in model.folder.manifest.dense[0].blocks)
    assert length > 25_000_000
    rows = torch.arange(0, 40_000, 97)

    def growth(rows_on_demand: list[str]) -> int:
        gc.collect()
        before = resident_bytes()
        with model.engine(2, rows_on_demand=rows_on_demand) as engine:
            engine.dense_rows(EMBEDDING, rows)
            return resident_bytes() - before

    growth([EMBEDDING])  # libraries and allocator have grown before
    assert growth([]) - growth([EMBEDDING]) > length * 3 // 4


def test_the_budget_has_room_for_more_experts(tmp_path: Path) -> None:
    model = build(tmp_path, embedding_shape=(40_000, 512))
    length = sum(block.length for block in model.folder.manifest.dense[0].blocks)
    resident, on_demand = model.plan(), model.plan(rows_on_demand=[EMBEDDING])
    assert resident.dense_bytes - on_demand.dense_bytes == length
    # 8 MiB for rows at hand; 16 bytes for each page; header and index of 40,000 / 4 groups, in pages.
    index = 2 * (4 * 40_000 // 4 // 2 + 2 * 4096)
    assert on_demand.rows_on_demand_bytes <= (8 << 20) + 16 * length // 4096 + index
    with Engine(model.folder, model.budget(2), decode_threads=2, rows_on_demand=[EMBEDDING]) as engine:
        ledger = engine.budget.ledger
        assert ledger[ROWS_ON_DEMAND] == on_demand.rows_on_demand_bytes
        assert (
            ledger[DENSE]
            == on_demand.dense_reservation_bytes
            == engine._native.fixed_bytes
            - sum(-(-(count + 4096) // (2 << 20)) * (2 << 20) for count in on_demand.scratch_bytes)
        )
        assert ledger[EXPERT_POOL] >= resident.pool_reservation_bytes([2])
        assert engine._native.size_classes[0][1] > 2
        saved = format_bytes(length - on_demand.rows_on_demand_bytes)
        assert f"embedding rows on demand from disk, which saves {saved}" in engine.mode_line("fast", "eager")
    with model.engine(2) as engine:
        assert "on demand" not in engine.mode_line("fast", "eager")
        assert ROWS_ON_DEMAND not in engine.budget.ledger


def test_exceptions_stay_in_memory_where_the_budget_has_room(tmp_path: Path) -> None:
    model = build(tmp_path, embedding_shape=(40_000, 512))
    rows = RowsOnDemand.of_manifest(model.folder.manifest, [EMBEDDING])
    assert 0 < rows.details_bytes < rows.record_bytes // 8
    enough = math.ceil(rows.details_bytes / LARGEST_DETAILS_SHARE)
    numbers = torch.arange(3, 40_000, 397)  # no two of a group
    spent: list[int] = []
    for spare, kept in ((0, False), (enough, True)):
        budget = model.budget(2, spare=spare, rows_on_demand=[EMBEDDING])
        with Engine(model.folder, budget, decode_threads=2, rows_on_demand=[EMBEDDING]) as engine:
            details = rows.details_bytes if kept else 0
            assert engine.budget.ledger[ROWS_ON_DEMAND] == rows.reservation_bytes + details
            assert engine.budget.free_bytes >= 0
            saved = format_bytes(rows.record_bytes - rows.reservation_bytes - details)
            assert f"which saves {saved}" in engine.mode_line("fast", "eager")
            before = engine._native.counters()["reads"]
            assert torch.equal(engine.dense_rows(EMBEDDING, numbers), model.dense[EMBEDDING][numbers])
            spent.append(engine._native.counters()["reads"] - before)
    assert spent[1] <= len(numbers) < spent[0]


def test_exceptions_leave_the_pool_what_it_needs() -> None:
    rows = RowsOnDemand((1,), 1_000_000, 100_000, 1000)
    assert rows.memory_bytes == 100_000 and rows.saved_bytes == 900_000
    kept = rows.within(100_000, 99_000)
    assert kept.keeps_details and kept.memory_bytes == 101_000 and kept.saved_bytes == 899_000
    assert not rows.within(100_000, 99_001).keeps_details
    assert not rows.within(99_999, 0).keeps_details
    assert not RowsOnDemand((1,), 1_000_000, 100_000, 0).within(1 << 30, 0).keeps_details
    assert rows.reserved({ROWS_ON_DEMAND: 101_000}) == kept
    assert rows.reserved({ROWS_ON_DEMAND: 100_000}) == rows.reserved({}) == rows


def test_the_floor_is_itemised(tall_fx3: PackedModel) -> None:
    budget = tall_fx3.budget(2, rows_on_demand=[EMBEDDING])
    too_small = MemoryBudget(budget.total_bytes - 1, budget.ledger)
    with pytest.raises(BudgetTooSmallError) as caught:
        Engine(tall_fx3.folder, too_small, decode_threads=2, rows_on_demand=[EMBEDDING])
    plan = tall_fx3.plan(rows_on_demand=[EMBEDDING])
    assert f"{ROWS_ON_DEMAND} {format_bytes(plan.rows_on_demand_bytes)}" in str(caught.value)
    with Engine(tall_fx3.folder, budget, decode_threads=2, rows_on_demand=[EMBEDDING]) as engine:
        assert engine.budget.free_bytes >= 0
