"""How experts modules use the engine: which experts they ask for, in which order, and how often."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _with_fake_engine(fake_engine):
    pass


def experts_of(packed, **arguments):
    model = packed.load(**arguments)
    return model.model.layers[0].mlp.experts, model.zipmoe_engine, packed.plain(**arguments).model.layers[0].mlp.experts


INDEX = torch.tensor([[4, 1, 0], [1, 4, 5], [1, 0, 4]])
WEIGHTS = torch.tensor([[0.5, 0.25, 0.125], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])


@pytest.fixture
def hidden():
    torch.manual_seed(0)
    return torch.randn(3, 64).to(torch.bfloat16)


@torch.no_grad()
@pytest.mark.parametrize(("order", "ascending"), [("grouped_mm", False), ("eager", True)])
def test_each_needed_expert_is_requested_once(mixtral, hidden, order, ascending):
    ours, engine, theirs = experts_of(mixtral, experts_implementation=order)
    assert torch.equal(ours(hidden, INDEX, WEIGHTS), theirs(hidden, INDEX, WEIGHTS))
    assert engine.requests == [("model.layers.0.mlp.experts", [0, 1, 4, 5], ascending)]
    assert engine.fetched == []


@torch.no_grad()
@pytest.mark.parametrize("order", ["grouped_mm", "eager"])
def test_ids_that_mean_no_expert_are_skipped(mixtral, hidden, order):
    ours, engine, theirs = experts_of(mixtral, experts_implementation=order)
    index = INDEX.clone()
    index[0, 1] = index[2, 2] = ours.num_experts
    theirs._is_expert_parallel = True
    assert torch.equal(ours(hidden, index, WEIGHTS), theirs(hidden, index, WEIGHTS))
    assert engine.requests[0][1] == [0, 1, 4, 5]
    none = torch.full_like(index, ours.num_experts)
    assert torch.equal(ours(hidden, none, WEIGHTS), torch.zeros_like(hidden))


@torch.no_grad()
def test_no_tokens(mixtral):
    ours, _, _ = experts_of(mixtral)
    nothing = ours(torch.empty(0, 64, dtype=torch.bfloat16), INDEX[:0], WEIGHTS[:0])
    assert nothing.shape == (0, 64)


@torch.no_grad()
@pytest.mark.parametrize("order", ["grouped_mm", "eager"])
def test_weights_in_bfloat16_keep_their_type(mixtral, hidden, order):
    ours, _, theirs = experts_of(mixtral, experts_implementation=order)
    weights = WEIGHTS.to(torch.bfloat16)
    assert torch.equal(ours(hidden, INDEX, weights), theirs(hidden, INDEX, weights))


@pytest.mark.parametrize("family", ["switch", "dbrx", "longcat_flash", "llama4", "jetmoe"])
def test_families_outside_the_interface_request_only_routed_experts(packed_model, family):
    packed = packed_model(family)
    model = packed.load()
    one_token = {name: values[:1, :1] for name, values in packed.inputs.items()}
    with torch.no_grad():
        assert torch.equal(model(**one_token).logits, packed.plain()(**one_token).logits)
    engine = model.zipmoe_engine
    assert engine.requests
    assert engine.fetched == []
    counts = {group.path: len(group.records) for group in engine.folder.manifest.expert_groups}
    assert any(len(experts) < counts[path] for path, experts, _ in engine.requests)
    assert all(0 <= expert < counts[path] for path, experts, _ in engine.requests for expert in experts)
    assert {path for path, _, _ in engine.requests} == counts.keys()


def test_dense_matrices_are_used_in_tiles_and_rows(mixtral):
    model = mixtral.load()
    mixtral.logits(model)
    engine = model.zipmoe_engine
    assert engine.whole == []
    assert engine.tiles.count("lm_head.weight") == 1
    assert engine.rows == [len(mixtral.inputs["input_ids"].unique())]


def test_a_failing_forward_ends_its_request(mixtral, hidden):
    ours, engine, _ = experts_of(mixtral, experts_implementation="eager")
    ours.act_fn = None
    for order in ("eager", "grouped_mm"):
        ours.config._experts_implementation = order
        with pytest.raises(TypeError):
            ours(hidden, INDEX, WEIGHTS)
        assert not engine._open
