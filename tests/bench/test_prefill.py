"""The floor of the time to first token: operations counted by hand, and which bound counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zipmoe.bench.benchmark import Measured
from zipmoe.bench.comparison import rows_of
from zipmoe.bench.comparison_table import tables
from zipmoe.bench.contenders import Contender, Variant
from zipmoe.bench.machine_rates import MachineRates, RateProbe
from zipmoe.bench.measurement import Generation, WorkerOutput, read_output
from zipmoe.bench.memory_levels import MemoryLevel
from zipmoe.bench.prefill_floor import PrefillFloor, prefill_floor
from zipmoe.bench.prefill_work import PrefillWork, prefill_work
from zipmoe.bench.product_probe import ProductProbe, product_probes, product_shapes
from zipmoe.hf.loading import load
from zipmoe.store.packed_folder import PackedFolder


def test_operations_of_linear_layers_and_attention() -> None:
    work = PrefillWork(token_parameters=1000.0, sequence_parameters=500, full_attention_width=64)
    # tokens pass 1000 weights each, one of them the output matrix; 1 + 2 + 3 pairs of positions
    assert work.operations(3) == 2 * (3 * 1000 + 500) + 2 * 64 * 6
    assert work.operations(3, sequences=4) == 4 * work.operations(3)


def test_sliding_attention_looks_back_no_further_than_its_window() -> None:
    work = PrefillWork(0.0, 0, full_attention_width=0, sliding_attention_width=10, window=2)
    assert work.operations(5) == 2 * 10 * (1 + 2 + 2 + 2 + 2)
    assert work.operations(1) == 2 * 10


def test_operations_that_the_logits_need() -> None:
    # of 1000 weights 300 are the last layer's, which one token of three passes, looking at 3 positions and not at 6
    work = PrefillWork(1000.0, 500, 64, last_layer_parameters=300.0, last_layer_attention_width=16)
    assert work.needed_operations(3) == 2 * (3 * 700 + 300 + 500) + 2 * (48 * 6 + 16 * 3)
    assert work.needed_operations(3, sequences=4) == 4 * work.needed_operations(3)
    assert work.needed_operations(1) == work.operations(1)
    slides = PrefillWork(0.0, 0, 0, 30, 2, last_layer_attention_width=10, last_layer_slides=True)
    assert slides.needed_operations(5) == 2 * (20 * (1 + 2 + 2 + 2 + 2) + 10 * 2)


def test_the_strict_floor_has_fewer_operations() -> None:
    work = PrefillWork(100.0, 0, 0, last_layer_parameters=50.0)
    found = prefill_floor([_generation(2.2, 0)], 10, work, RATES)
    assert found is not None
    assert (found.operations, found.needed_operations) == (2000.0, 1100.0)
    assert found.achieved_over_floor == 2.2
    assert found.achieved_over_strict_floor == pytest.approx(4.0)


def test_a_model_counted_by_hand(tiny_packed: Path) -> None:
    model = load(str(tiny_packed))
    folder = PackedFolder.open(tiny_packed)
    found = prefill_work(model, folder.manifest)
    assert found is not None
    config = model.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    heads, head = config.num_attention_heads, hidden // config.num_attention_heads
    attention = 2 * heads * head * hidden + 2 * config.num_key_value_heads * head * hidden
    experts = config.num_experts_per_tok * 3 * hidden * config.moe_intermediate_size
    shared = 3 * hidden * config.shared_expert_intermediate_size + hidden
    router = config.num_experts * hidden
    assert found.token_parameters == layers * (attention + experts + shared + router)
    assert found.sequence_parameters == config.vocab_size * hidden
    assert found.full_attention_width == layers * heads * 2 * head
    assert found.sliding_attention_width == 0
    queries_and_output = 2 * heads * head * hidden
    assert found.last_layer_parameters == queries_and_output + experts + shared + router
    assert found.last_layer_attention_width == heads * 2 * head
    assert not found.last_layer_slides
    assert PrefillWork.from_json(json.loads(json.dumps(found.to_json()))) == found
    model.zipmoe_engine.close()


def _generation(ttft: float, read: int | None) -> Generation:
    return Generation(1, (ttft, ttft + 1.0), (0, 0), ((1, 2),), prefill_read_bytes=read)


WORK = PrefillWork(100.0, 0, 0)
RATES = (MachineRates(1.0, 900.0, "", 1900.0), MachineRates(1.0, 1100.0, "", 2100.0), MachineRates(1.0, 9e9, ""))


def test_the_larger_bound_counts_and_the_median_prompt() -> None:
    # 10 tokens are 2000 operations, 1 s; 3000 bytes are 3 s
    by_disk = prefill_floor([_generation(9.0, 3000)], 10, WORK, RATES)
    assert by_disk == PrefillFloor(3000.0, 2000.0, 3.0, 1.0, 9.0, 2000.0, 1.0)
    assert (by_disk.floor_seconds, by_disk.achieved_over_floor, by_disk.bound_by) == (3.0, 3.0, "disk")
    prompts = [_generation(9.0, 3000), _generation(1.2, 500), _generation(2.0, 0)]
    found = prefill_floor(prompts, 10, WORK, RATES)
    assert found is not None
    assert (found.achieved_seconds, found.achieved_over_floor, found.bound_by) == (2.0, 2.0, "products")
    even = prefill_floor(prompts[:2], 10, WORK, RATES)
    assert even is not None
    assert even.achieved_seconds == 1.2


def test_no_floor_without_what_it_needs() -> None:
    assert prefill_floor([_generation(1.0, None)], 10, WORK, RATES) is None
    assert prefill_floor([_generation(1.0, 5)], 10, WORK, RATES[2:]) is None
    assert prefill_floor([], 10, WORK, RATES) is None


def test_rows_and_tables_show_it() -> None:
    loaded: dict[str, Any] = {"seconds": 1.0, "prefill_work": WORK.to_json()}
    measured = Measured(
        Variant(Contender.ZIPMOE),
        MemoryLevel("50%", 4_000_000_000, False),
        0,
        None,
        WorkerOutput(loaded, (_generation(2.0, 3000),), None, True),
        rates=RATES[:2],
        batches=(((1,) * 10,),),
    )
    (row,) = rows_of([measured])
    assert row.prefill == PrefillFloor(3000.0, 2000.0, 3.0, 1.0, 2.0, 2000.0, 1.0)
    assert row.to_json()["prefill"]["bound_by"] == "disk"
    assert row.to_json()["prefill"]["achieved_over_strict_floor"] == 2 / 3
    assert tables_of(row) == "0.67 (disk: 3.000 s; strict 0.67)"


def tables_of(row: Any) -> str:
    """The last cell of the only row."""
    from types import SimpleNamespace

    (table,) = tables(SimpleNamespace(rows=[row]))  # type: ignore[arg-type]
    assert table.headings[-1] == "TTFT / floor"
    return table.rows[0][-1]


def test_a_worker_tells_what_the_prompt_read() -> None:
    fields = {"kind": "generation", "batch": 1, "token_seconds": [1.0], "read_bytes": [5], "tokens": [[1]]}
    output = read_output(json.dumps({**fields, "prefill_read_bytes": 4}) + "\n")
    assert output.generations[0].prefill_read_bytes == 4
    assert read_output(json.dumps(fields) + "\n").generations[0].prefill_read_bytes is None


def test_products_of_the_models_shapes(tiny_packed: Path) -> None:
    folder = PackedFolder.open(tiny_packed)
    shapes = product_shapes(folder.manifest)
    assert 1 <= len(shapes) <= 3
    assert list(shapes) == sorted(shapes, key=lambda shape: -shape[0] * shape[1])
    rates = RateProbe(folder).measure(8)
    assert rates.product_operations_per_second is not None
    assert rates.product_operations_per_second > 0


def test_a_product_probe_counts_operations_and_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads()
    (probe,) = product_probes([(4, 6)], 5, before + 1)
    assert isinstance(probe, ProductProbe)
    assert probe.work_per_unit == 2 * 5 * 4 * 6
    assert probe.run(3) > 0
    assert probe.next_matrix == 3
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("tokens", [1, 7])
def test_pairs_of_a_window_as_long_as_the_prompt_are_all_pairs(tokens: int) -> None:
    sliding = PrefillWork(0.0, 0, 0, 3, tokens)
    assert sliding.operations(tokens) == PrefillWork(0.0, 0, 3).operations(tokens)
