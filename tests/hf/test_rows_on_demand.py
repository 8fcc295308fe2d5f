"""Embeddings whose rows are read on demand: which tables qualify, and that nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import representative_models
import torch
from transformers import AutoConfig

import zipmoe
from zipmoe.engine import rows_on_demand
from zipmoe.engine.budget import (
    DENSE,
    EXPERT_POOL,
    KV_CACHE,
    PROCESS,
    ROWS_ON_DEMAND,
    SCRATCH,
    UNPACKED,
    WORKSPACE,
    MemoryBudget,
)
from zipmoe.engine.memory_plan import MemoryPlan
from zipmoe.engine.pool_budget import budget_without_pools, pools_bytes, reserve_all_but_pools, tables_on_demand
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.engine.rows_on_demand import RowsOnDemand, looked_up_matrices, model_on_meta
from zipmoe.errors import BudgetTooSmallError, InvalidArgumentError
from zipmoe.hf import engine_opening
from zipmoe.hf.automatic_pools import AutomaticPools
from zipmoe.store.manifest import CodecSettings
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder

WORDS = "embedding rows on demand from disk"


@pytest.fixture(autouse=True)
def small_tables_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_on_demand, "SMALLEST_TABLE_BYTES", 0)


ON_DEMAND = {"quantization_config": zipmoe.ZipMoEConfig(embedding="on-demand")}


def looked_up(packed) -> tuple[str, ...]:
    manifest = PackedFolder.open(packed.folder).manifest
    return looked_up_matrices(model_on_meta(AutoConfig.from_pretrained(packed.folder), manifest.architecture), manifest)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixtral", ("model.embed_tokens.weight",)),
        ("qwen2_moe", ("model.embed_tokens.weight",)),
        ("deepseek_v3", ("model.embed_tokens.weight",)),
        ("dbrx", ("transformer.wte.weight",)),
        ("mixtral_tied", ()),
    ],
)
def test_logits_are_those_of_plain_transformers(packed_model, name, expected):
    packed = packed_model(name)
    assert looked_up(packed) == expected
    model = packed.load(**ON_DEMAND)
    assert looked_up_matrices(model, model.zipmoe_engine.folder.manifest) == expected  # packed modules change nothing
    assert bool(model.zipmoe_engine._on_demand.records) == bool(expected)
    assert bool(model.zipmoe_engine.budget.reserved(ROWS_ON_DEMAND)) == bool(expected)
    plain = packed.plain()
    assert torch.equal(packed.logits(model), packed.logits(plain))
    assert torch.equal(packed.generate(model), packed.generate(plain))
    embedding, original = model.get_input_embeddings(), plain.get_input_embeddings()
    assert torch.equal(embedding.weight.materialise(), original.weight)
    assert embedding(torch.empty(1, 0, dtype=torch.int64)).shape == (1, 0, original.embedding_dim)
    assert torch.equal(model.get_output_embeddings().weight.materialise(), plain.get_output_embeddings().weight)


def test_tables_shared_by_names_and_stacks(packed_model):
    """An encoder and a decoder share one table, and the head with them."""
    switch = packed_model("switch")
    tables = looked_up(switch)
    assert "shared.weight" not in tables
    assert torch.equal(switch.logits(switch.load(**ON_DEMAND)), switch.logits(switch.plain()))


def test_a_base_model_without_its_head_only_looks_rows_up(packed_model):
    import transformers

    tied = packed_model("mixtral_tied")
    base = transformers.MixtralModel.from_pretrained(tied.folder, **ON_DEMAND)
    plain = transformers.MixtralModel.from_pretrained(tied.source)
    assert base.zipmoe_engine.budget.reserved(ROWS_ON_DEMAND) > 0
    with torch.no_grad():
        assert torch.equal(base(**tied.inputs).last_hidden_state, plain(**tied.inputs).last_hidden_state)


def test_a_model_in_float32(mixtral):
    model, plain = mixtral.load(dtype=torch.float32, **ON_DEMAND), mixtral.plain(dtype=torch.float32)
    assert torch.equal(mixtral.logits(model), mixtral.logits(plain))


def test_the_caller_may_keep_the_table_resident(mixtral):
    model = zipmoe.load(mixtral.folder, quantization_config=zipmoe.ZipMoEConfig(embedding="resident"))
    assert WORDS not in model.zipmoe_mode_line()
    assert ROWS_ON_DEMAND not in model.zipmoe_engine.budget.ledger
    assert torch.equal(mixtral.logits(model), mixtral.logits(mixtral.plain()))
    with pytest.raises(InvalidArgumentError, match="embedding"):
        zipmoe.ZipMoEConfig(embedding="somewhere")


def test_a_table_is_resident_where_all_experts_have_room_beside_it(packed_model):
    packed = packed_model("mixtral")
    manifest = PackedFolder.open(packed.folder).manifest
    meta = model_on_meta(AutoConfig.from_pretrained(packed.folder), manifest.architecture)
    tables = looked_up(packed)
    ample = MemoryBudget(8 << 30)
    assert tables_on_demand(manifest, tables, "auto", ample) == ()
    assert tables_on_demand(manifest, tables, "on-demand", ample) == tables
    assert tables_on_demand(manifest, tables, "resident", ample) == ()
    everything = 8 << 30
    everything -= reserve_all_but_pools(manifest, ample, RowsOnDemand()).free_bytes
    pool = MemoryPlan.of(manifest, 1, separable=False)
    everything += pool.pool_reservation_bytes([shape.records for shape in pool.size_classes])
    assert tables_on_demand(manifest, tables, "auto", MemoryBudget(everything - 4096)) == tables
    assert tables_on_demand(manifest, tables, "auto", MemoryBudget(1)) == tables
    assert ROWS_ON_DEMAND not in packed.load().zipmoe_engine.budget.ledger
    assert ROWS_ON_DEMAND not in budget_without_pools(manifest, "8GB", meta, 64).ledger


@pytest.fixture(scope="module")
def large_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose table takes more memory than reading its rows does."""
    root = tmp_path_factory.mktemp("large_table")
    config = representative_models._mixtral(vocab_size=160_000)
    representative_models.TinyModel("MixtralForCausalLM", lambda: config).build().save_pretrained(root / "source")
    pack(root / "source", root / "packed", CodecSettings("fx3", None, 1), jobs=1, min_dense_bytes=0)
    return root / "packed"


@pytest.mark.parametrize("pools", ["F=6", "C=6", "F=3,C=3", PoolSettings(PoolSlots(compressed=1), staging=6)])
def test_pools_that_need_more_than_the_single_pool_get_the_tables_memory(large_table, monkeypatch, pools):
    """The budget that a single pool of all experts has room in beside the table, and these pools do not."""
    manifest = PackedFolder.open(large_table).manifest
    parts = {PROCESS: 1, WORKSPACE: 1}
    single = MemoryPlan.of(manifest, 1, separable=False)
    total = (1 << 40) - reserve_all_but_pools(manifest, MemoryBudget(1 << 40, parts), RowsOnDemand()).free_bytes
    all_experts = single.pool_reservation_bytes([shape.records for shape in single.size_classes])
    total += max(all_experts, pools_bytes(manifest, PoolSlots()))  # what stages experts is larger than these few
    monkeypatch.setattr(engine_opening, "_budget", lambda *_: MemoryBudget(total, parts))

    def ledger(**settings) -> dict[str, int]:
        config = zipmoe.ZipMoEConfig(memory="8GB", **settings)
        with zipmoe.load(large_table, quantization_config=config).zipmoe_engine as engine:
            return engine.budget.ledger

    assert ROWS_ON_DEMAND not in ledger()
    assert ledger(pools=pools)[ROWS_ON_DEMAND] > 0
    with pytest.raises(BudgetTooSmallError):
        ledger(pools=pools, embedding="resident")
    monkeypatch.setattr(engine_opening, "_budget", lambda *_: MemoryBudget(1 << 33, parts))
    assert ROWS_ON_DEMAND not in ledger(pools=pools)


@pytest.mark.parametrize("pools", [None, PoolSettings(PoolSlots(compressed=3))])
@pytest.mark.parametrize("on_demand", [True, False])
def test_a_run_keeps_to_the_tables_that_were_planned_with(packed_model, monkeypatch, pools, on_demand):
    """Even if the process has grown or shrunk since, so that another place would be chosen now."""
    packed = packed_model("mixtral")
    tables = looked_up(packed) if on_demand else ()
    planned = AutomaticPools(pools, (), tables)
    monkeypatch.setattr(engine_opening, "automatic_pools", lambda *_: planned)
    monkeypatch.setattr(engine_opening, "tables_on_demand", lambda *_: pytest.fail("asked again"))
    settings = zipmoe.ZipMoEConfig(memory="8GB", pools="plan")
    with zipmoe.load(packed.folder, quantization_config=settings).zipmoe_engine as engine:
        assert (ROWS_ON_DEMAND in engine.budget.ledger) == on_demand


def test_small_tables_stay_in_memory(mixtral, monkeypatch):
    monkeypatch.setattr(rows_on_demand, "SMALLEST_TABLE_BYTES", 16 << 20)
    assert looked_up(mixtral) == ()
    assert ROWS_ON_DEMAND not in mixtral.load(**ON_DEMAND).zipmoe_engine.budget.ledger


def test_systems_with_large_pages_keep_tables_in_memory(mixtral, monkeypatch):
    monkeypatch.setattr(rows_on_demand.mmap, "PAGESIZE", 65536)
    assert looked_up(mixtral) == ()


def test_save_pretrained_copies_the_table(mixtral, tmp_path: Path):
    model = mixtral.load(**ON_DEMAND)
    model.save_pretrained(tmp_path / "copy")
    again = zipmoe.load(tmp_path / "copy")
    assert torch.equal(mixtral.logits(again), mixtral.logits(mixtral.plain()))


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("name", ["mixtral", "mixtral_tied"])
def test_plan_and_run_reserve_the_same(packed_model, name, mode):
    packed = packed_model(name)
    manifest = PackedFolder.open(packed.folder).manifest
    meta = model_on_meta(AutoConfig.from_pretrained(packed.folder), manifest.architecture)
    planned = budget_without_pools(manifest, "8GB", meta, 64).ledger
    pools = PoolSettings(PoolSlots(compressed=3))
    settings = zipmoe.ZipMoEConfig(memory="8GB", context_tokens=64, mode=mode, pools=pools)
    with zipmoe.load(packed.folder, quantization_config=settings).zipmoe_engine as engine:
        run = engine.budget.ledger
    assert planned.keys() == run.keys() - {EXPERT_POOL}
    assert {DENSE, SCRATCH, KV_CACHE, WORKSPACE, UNPACKED} <= planned.keys()
    for item in planned.keys() - {PROCESS}:  # the run's is another one, or has grown
        assert planned[item] == run[item]
    assert run[EXPERT_POOL] == pools_bytes(manifest, pools.slots)
