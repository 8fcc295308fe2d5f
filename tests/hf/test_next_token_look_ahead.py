"""Look-ahead from the likeliest next token to the first sparse layer's experts changes when they are read, only."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from few_slots import PROMPTS, both, counters, decode, load
from torch import nn
from torch.nn import functional

from zipmoe.errors import CorruptRecordError, ZipMoEError
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.hf.early_routing import EarlyRouter
from zipmoe.hf.next_token_look_ahead import (
    LEAST_SHARE,
    NextTokenLookAhead,
    TrackRecord,
    likeliest,
    look_ahead_to_next_token,
    unit_rms,
)

FAMILIES = ("qwen2_moe", "ernie4_5_moe", "mixtral")


def observe(model: Any) -> list[Any]:
    """A list that grows with every prediction: the group's path, the ids, and those that were not in memory."""
    seen: list[Any] = []
    look_ahead = model.zipmoe_look_ahead.look_ahead
    original = look_ahead.predict_next

    def predict_next(group: Any, expert_ids: Sequence[int], of_pass: bool) -> list[int]:
        absent = original(group, expert_ids, of_pass)
        seen.append((group.path, list(expert_ids), absent))
        return absent

    look_ahead.predict_next = predict_next
    return seen


def first_block(model: Any) -> Any:
    return next(layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts"))


def expected_ids(model: Any, tokens: list[int]) -> list[int]:
    """What the first sparse block's router says of the tokens' embeddings, every token's first choice first."""
    table = model.get_input_embeddings().weight[torch.arange(model.config.vocab_size)]
    router = first_block(model).gate
    given = unit_rms(table[tokens])
    chosen = router.route(given)[2] if isinstance(router, EarlyRouter) else router(given)[2]
    return list(dict.fromkeys(chosen.t().reshape(-1).tolist()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prediction_is_what_the_first_router_says_of_the_next_tokens_embedding(packed_model, family):
    model = load(packed_model(family), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)  # routers are found
        paths = [group.path for group in model.zipmoe_engine.folder.manifest.expert_groups]
        for rows in (1, 3):
            seen = observe(model)
            logits = decode(model, PROMPTS[:rows], steps=3)
            tokens = [step[:, -1].float().argmax(-1).tolist() for step in logits]
            assert [path for path, _, _ in seen] == paths[:1] * 3  # after the prompt, too
            assert [ids for _, ids, _ in seen] == [expected_ids(model, each) for each in tokens]
            assert all(set(absent) <= set(ids) for _, ids, absent in seen)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_sampling_and_greedy_decoding_do_not_change(packed_model, mode):
    packed = packed_model("qwen2_moe")
    with both(packed, mode=mode) as (model, other):
        seen = observe(model)
        for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 2.0}):
            found = []
            for each in (model, other):
                torch.manual_seed(0)
                arguments = {"attention_mask": torch.ones_like(PROMPTS), "max_new_tokens": 8, **settings}
                found.append(each.generate(PROMPTS, **arguments, return_dict_in_generate=True, output_logits=True))
            assert torch.equal(found[0].sequences, found[1].sequences)
            for ours, theirs in zip(found[0].logits, found[1].logits, strict=True):
                assert torch.equal(ours, theirs)
        assert len(seen) >= 14  # the routers are found in the first prompt


def test_rows_of_the_next_token_are_looked_up_once(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine as engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        asked: list[list[int]] = []
        original = engine.dense_rows
        engine.dense_rows = lambda parameter, rows: asked.append(rows.tolist()) or original(parameter, rows)
        logits = decode(model, PROMPTS[:1], steps=3)
        tokens = [step[:, -1].argmax(-1).tolist() for step in logits]
        assert asked == [sorted(PROMPTS[0].tolist()), *tokens]


def test_a_row_that_cannot_be_read_is_an_error_of_the_step_that_asks_for_it(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine as engine, torch.no_grad():
        expected = decode(model, PROMPTS[:1], steps=1)[0]
        seen = observe(model)
        original, calls = engine.dense_rows, []

        def dense_rows(parameter: str, rows: torch.Tensor) -> torch.Tensor:
            calls.append(rows.tolist())
            if len(calls) > 1:
                raise CorruptRecordError("damaged")
            return original(parameter, rows)

        engine.dense_rows = dense_rows
        assert torch.equal(decode(model, PROMPTS[:1], steps=1)[0], expected)
        assert seen == [] and len(calls) == 2
        with pytest.raises(CorruptRecordError):
            decode(model, PROMPTS[:1], steps=1)


def await_reads(model: Any, read_bytes: int) -> None:
    """Until so many bytes have been read."""
    deadline = time.monotonic() + 60
    while counters(model).read_bytes < read_bytes:
        assert time.monotonic() < deadline


def test_right_predictions_are_used_and_wrong_ones_dropped(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine as engine:
        group = engine.group(engine.folder.manifest.expert_groups[0].path)
        other = engine.group(engine.folder.manifest.expert_groups[1].path)
        length = engine._catalogue.records[group.records[0]].length
        look_ahead = model.zipmoe_look_ahead.look_ahead
        before = counters(model)
        assert look_ahead.predict_next(group, [2, 1]) == [2, 1]
        await_reads(model, before.read_bytes + 2 * length)
        with engine.request(group, [1, 0]) as request:
            assert sorted(request) == [0, 1]
        after = counters(model)
        assert (after.prefetched, after.misses, after.hits) == (1, 1, 0)
        assert (after.wasted_reads, after.wasted_bytes) == (1, length)
        assert after.predicted_reads == 2
        assert look_ahead.predict_next(group, [0, 3]) == [3]  # the other one is in memory, and stays there
        with engine.request(other, [0]) as request:
            assert look_ahead.predict_next(group, [4]) == []  # not while a request is open
            assert list(request) == [0]
        assert counters(model).predicted_reads == 3
        assert engine._native.resident(group.records[0])
        with engine.request(group, [0, 1]) as request:
            assert sorted(request) == [0, 1]
        assert counters(model).hits == 2


def test_many_sequences_predict_what_their_next_tokens_ask_for(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        seen = observe(model)
        decode(model, torch.cat([PROMPTS, PROMPTS]), steps=2)
        assert len(seen) == 2
        tokens = [3, 1, 4, 1, 5, 9]
        logits = functional.one_hot(torch.tensor(tokens), model.config.vocab_size).to(torch.bfloat16)
        model.zipmoe_next_token.predict(logits.unsqueeze(1))
        assert len(seen) == 3 and set(seen[2][1]) == set(expected_ids(model, tokens))


def test_nothing_is_predicted_for_gradients_and_other_shapes(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        seen = observe(model)
        logits = torch.randn((1, 1, model.config.vocab_size))
        beyond = torch.arange(model.config.vocab_size + 1.0).unsqueeze(0)
        for useless in (logits.flatten(), logits.unsqueeze(0), logits[:0], beyond):
            model.zipmoe_next_token.predict(useless)
        with torch.enable_grad():
            model.zipmoe_next_token.predict(logits.requires_grad_())
        assert seen == []
        model.zipmoe_next_token.predict(logits)
        assert len(seen) == 1


def test_nothing_is_predicted_where_routers_cannot_be_asked(packed_model):
    model = load(packed_model("dbrx"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1])
        assert counters(model).predicted_reads == 0
        assert "next token" not in model.zipmoe_mode_line()


def test_nothing_is_installed_where_everything_fits(packed_model):
    settings = ZipMoEConfig(memory="8GB", mode="exact", context_tokens=32)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed_model("qwen2_moe").load(quantization_config=settings)
    with model.zipmoe_engine:
        assert model.zipmoe_next_token is None
        assert not model.lm_head._forward_hooks


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        (nn.Embedding(8, 4), None),
        (None, nn.Linear(4, 8)),
        (nn.Embedding(8, 4), nn.Linear(4, 9)),
        (nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 8)),
    ],
)
def test_models_of_other_shapes_have_none(embedding, head):
    model = SimpleNamespace(get_input_embeddings=lambda: embedding, get_output_embeddings=lambda: head)
    chain: Any = SimpleNamespace(first=None, look_ahead=None, seen=0)
    assert look_ahead_to_next_token(model, chain) is None


@pytest.mark.parametrize("head", [None, nn.Linear(4, 8)])
def test_models_whose_embedding_is_not_found_have_none(head):
    def not_found() -> nn.Module:
        raise NotImplementedError

    model = SimpleNamespace(get_input_embeddings=not_found, get_output_embeddings=lambda: head)
    chain: Any = SimpleNamespace(first=None, look_ahead=None, seen=0)
    assert look_ahead_to_next_token(model, chain) is None


@pytest.mark.parametrize("where", ["router", "reads"])
def test_a_prediction_that_fails_is_no_error_of_the_step(packed_model, monkeypatch, where):
    model = load(packed_model("qwen2_moe"), True)
    calls = []

    def fail(*_: Any, **__: Any) -> None:
        calls.append(where)
        raise ZipMoEError("closed")

    with model.zipmoe_engine, torch.no_grad():
        expected = decode(model, PROMPTS[:1], steps=3)
        chain = model.zipmoe_look_ahead
        failing, name = (chain.first, "likely") if where == "router" else (chain.look_ahead, "predict_next")
        monkeypatch.setattr(failing, name, fail)
        for ours, theirs in zip(decode(model, PROMPTS[:1], steps=3), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert len(calls) == 3


def test_a_router_that_returns_something_else_is_not_compared(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        predictor = model.zipmoe_next_token
        (hook,) = first_block(model).gate._forward_hooks.values()
        for output in (torch.zeros(2, 4), None, (1, 2), (1, 2, "experts"), (1, 2, torch.tensor(3))):
            predictor._unconfirmed = [1]
            hook(first_block(model).gate, (), output)


def test_predictions_for_steps_of_several_tokens_are_not_right(packed_model):
    """As in assisted decoding, where no step is the one that was predicted."""
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        predictor = model.zipmoe_next_token
        predictor._unconfirmed, predictor._rows = [1, 2], 1
        predictor.compare(torch.tensor([[1, 2], [2, 1]]))
        assert predictor.track_record.share == (31 / 32) ** 2
        predictor._unconfirmed = [1]
        predictor.predict(torch.empty(0))  # the router was not heard of
        assert predictor.track_record.share == (31 / 32) ** 3
        assert predictor._unconfirmed == []


def test_nothing_is_said_where_the_router_takes_no_embedding(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        predictor = model.zipmoe_next_token
        assert predictor.describe() != ""
        other = nn.Embedding(8, model.config.hidden_size // 2)
        assert NextTokenLookAhead(model.zipmoe_look_ahead, other).describe() == ""


def test_predictions_stop_where_they_do_not_come_true(packed_model):
    model = load(packed_model("qwen2_moe"), True)
    note = "and from the likeliest next token to the first layer's"
    assert note in model.zipmoe_mode_line()
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        record = model.zipmoe_next_token.track_record
        first = first_block(model)
        chosen = torch.zeros((1, 1), dtype=torch.int64)
        model.zipmoe_next_token._unconfirmed, model.zipmoe_next_token._rows = [1, 2], 1
        model.zipmoe_next_token.compare(chosen)
        assert record.share == (31 / 32) ** 2
        while record.pays:
            record.add(1, 0)
        seen = observe(model)
        decode(model, PROMPTS[:1], steps=8)
        assert seen == []
        assert "none from the likeliest next token" in model.zipmoe_mode_line()
        assert note not in model.zipmoe_mode_line()
        decode(model, PROMPTS[:1], steps=24)
        assert len(seen) == 1
        assert len(first.gate._forward_hooks) == 1


def test_the_router_is_compared_with_what_was_predicted(packed_model):
    """The hidden states of the first block are the next token's embedding: every prediction comes true."""
    model = load(packed_model("qwen2_moe"), True)
    with model.zipmoe_engine, torch.no_grad():
        decode(model, PROMPTS[:1], steps=1)
        embedding = model.get_input_embeddings()
        rows: list[torch.Tensor] = []
        embedding.register_forward_hook(lambda _, __, output: rows.append(output))
        first_block(model).register_forward_pre_hook(
            lambda _, args: (unit_rms(rows[-1].squeeze(0)).unsqueeze(0),), prepend=True
        )
        record = model.zipmoe_next_token.track_record
        model.zipmoe_next_token._unconfirmed = []
        record.share = 0.5
        seen = observe(model)
        decode(model, PROMPTS[:1], steps=5)
        missing = sum(len(absent) for _, _, absent in seen[:-1])
        assert missing > 0
        assert record.share == pytest.approx(1 - 0.5 * (31 / 32) ** missing)


def test_track_record():
    record = TrackRecord()
    assert record.pays and record.may_predict()
    record.add(2, 1)
    assert record.share == 31 / 32
    while record.share >= LEAST_SHARE:
        assert record.may_predict()
        record.add(1, 0)
    assert [record.may_predict() for _ in range(64)] == ([False] * 31 + [True]) * 2
    record.add(8, 8)
    assert record.pays and record.may_predict()


def test_the_likeliest_of_each_row():
    torch.manual_seed(0)
    random = torch.randn(3, 1000)
    for dtype in (torch.bfloat16, torch.float32):
        for logits in (random, random.abs(), -random.abs() - 0.01):
            rounded = logits.to(dtype)
            assert likeliest(rounded) == rounded.double().argmax(-1).tolist()
    assert likeliest(torch.tensor([[-2.0, 0.0, -0.0]], dtype=torch.bfloat16)) == [1]
    assert likeliest(torch.tensor([[-2.0, -1.0, -3.0], [0.5, float("inf"), 7.0]], dtype=torch.bfloat16)) == [1, 1]


def test_unit_rms():
    rows = (torch.randn(2, 512) * torch.tensor([[1e-3], [30.0]])).to(torch.bfloat16)
    wide = rows.double()
    expected = wide / wide.square().mean(-1, keepdim=True).sqrt()
    assert torch.allclose(unit_rms(rows).double(), expected, rtol=2**-7)
    assert torch.equal(unit_rms(torch.zeros(1, 8)), torch.zeros(1, 8))
