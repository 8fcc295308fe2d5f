"""What people do with a loaded model: it works on packed weights, or says clearly why not."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import weakref
from pathlib import Path

import pytest
import torch

import zipmoe
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import BudgetExceededError, InvalidArgumentError, UnsupportedOperationError
from zipmoe.hf.saving import save_packed_folder
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify


@pytest.fixture
def model(mixtral):
    return mixtral.load()


@pytest.mark.parametrize(
    "convert",
    [
        lambda model: model.half(),
        lambda model: model.to(torch.float16),
        lambda model: model.to(dtype=torch.float64),
        lambda model: model.model.layers[0].to(torch.float16),
        lambda model: model.lm_head.half(),
        lambda model: model.to("meta"),
        lambda model: model.to("cuda"),
        lambda model: model.cuda(),
    ],
)
def test_inexact_conversions_and_other_devices_are_refused_and_change_nothing(mixtral, model, convert):
    before = mixtral.logits(model)
    with pytest.raises(UnsupportedOperationError):
        convert(model)
    assert torch.equal(mixtral.logits(model), before)


@pytest.mark.parametrize(
    "convert", [lambda m: m.float(), lambda m: m.to(torch.float32), lambda m: m.to("cpu", torch.float32)]
)
def test_widening_after_loading_equals_plain_transformers(mixtral, model, convert):
    logits = mixtral.logits(convert(model))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, mixtral.logits(mixtral.plain().float()))
    assert model.dtype == torch.float32
    assert torch.equal(mixtral.logits(model.bfloat16()), mixtral.logits(mixtral.plain().float().bfloat16()))


def test_conversions_that_change_nothing_work(mixtral, model):
    plain = mixtral.plain()
    assert torch.equal(mixtral.logits(model.to("cpu")), mixtral.logits(plain))
    assert torch.equal(mixtral.logits(model.bfloat16()), mixtral.logits(plain.bfloat16()))  # rotary tables change


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.model, lambda m: m.lm_head, lambda m: m.model.layers[0].mlp])
def test_copies_are_refused(model, part, duplicate):
    with pytest.raises(UnsupportedOperationError):
        duplicate(part(model))


def test_the_combine_order_can_be_switched_after_loading(packed_model):
    packed = packed_model("qwen2_moe")
    grouped, eager = packed.logits(packed.plain()), packed.logits(packed.plain(experts_implementation="eager"))
    assert not torch.equal(grouped, eager)
    model = packed.load()
    for name, expected in [("eager", eager), ("grouped_mm", grouped), ("eager", eager), ("zipmoe", grouped)]:
        model.set_experts_implementation(name)
        assert torch.equal(packed.logits(model), expected)
        assert ("eager" in model.zipmoe_mode_line()) == (expected is eager)


@pytest.mark.parametrize("name", ["batched_mm", "deepgemm", "no_such_thing"])
def test_other_experts_implementations_are_refused(mixtral, model, name):
    with pytest.raises(UnsupportedOperationError, match=name):
        model.set_experts_implementation(name)
    if name != "no_such_thing":  # Transformers itself refuses unknown names at load
        with pytest.raises(UnsupportedOperationError, match=name):
            mixtral.load(experts_implementation=name)
    model.config._experts_implementation = name
    with pytest.raises(UnsupportedOperationError, match=name):
        mixtral.logits(model)


def test_the_zipmoe_implementation_needs_a_packed_folder(mixtral):
    plain = mixtral.plain(experts_implementation="zipmoe")
    with pytest.raises(UnsupportedOperationError, match="packed folder"):
        mixtral.logits(plain)


def test_training_is_refused(mixtral, model):
    with pytest.raises(UnsupportedOperationError, match="inference"):
        model.train()
    assert model.eval() is model
    hidden = torch.zeros(1, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(UnsupportedOperationError, match="trained"):
        model(inputs_embeds=hidden)
    with pytest.raises(UnsupportedOperationError, match="trained"):
        model.lm_head(hidden)
    with pytest.raises(UnsupportedOperationError, match="trained"):
        model.model.layers[0].mlp.experts(hidden[0], torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))


def test_calls_outside_of_no_grad_record_nothing(mixtral, model):
    logits = model(**mixtral.inputs).logits
    assert not logits.requires_grad
    assert torch.equal(logits, mixtral.logits(mixtral.plain()))
    with torch.inference_mode():
        assert torch.equal(model(**mixtral.inputs).logits, logits)


def test_dequantizing_is_refused(model):
    with pytest.raises(UnsupportedOperationError, match="not unpacked"):
        model.dequantize()


@torch.no_grad()
@pytest.mark.parametrize("order", ["grouped_mm", "eager"])
def test_tokens_without_any_expert(model, order):
    model.set_experts_implementation(order)
    experts = model.model.layers[0].mlp.experts
    hidden, index = torch.ones(3, 64, dtype=torch.bfloat16), torch.full((3, 2), experts.num_experts)
    assert torch.equal(experts(hidden, index, torch.ones(3, 2)), torch.zeros_like(hidden))
    assert experts(hidden[:0], index[:0], torch.ones(0, 2)).shape == (0, 64)


def test_resizing_packed_embeddings_is_refused(model):
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.resize_token_embeddings(256) is model.get_input_embeddings()
    with pytest.raises(UnsupportedOperationError, match="resized"):
        model.resize_token_embeddings(300)
    with pytest.raises(UnsupportedOperationError, match="resized"):
        model.resize_token_embeddings(pad_to_multiple_of=100)


def test_save_pretrained_copies_the_folder(mixtral, model, tmp_path):
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(tmp_path / "copy")
    copied = zipmoe.load(tmp_path / "copy")
    assert torch.equal(mixtral.logits(copied), mixtral.logits(model))
    assert copied.generation_config.max_new_tokens == 17
    again = tmp_path / "again"
    copied.save_pretrained(again)
    copied.save_pretrained(tmp_path / "copy")  # onto itself
    names = {path.name for path in mixtral.folder.iterdir()}
    assert {path.name for path in again.iterdir()} == names == {path.name for path in (tmp_path / "copy").iterdir()}


def test_a_copy_has_the_side_files_of_subfolders(mixtral, tmp_path):
    template = Path("chat_templates", "tool.jinja")
    source = tmp_path / "source"
    shutil.copytree(mixtral.source, source)
    (source / template).parent.mkdir()
    (source / template).write_text("{{ messages }}")
    pack(source, tmp_path / "packed", CodecSettings("fx3", None, 1))
    folder = PackedFolder.open(tmp_path / "packed")
    copied = folder.path / "copies" / "first"  # below the folder itself: no copy of the copy
    save_packed_folder(folder, copied)
    assert (copied / template).read_text() == "{{ messages }}"
    assert not (copied / "copies").exists()
    assert verify(PackedFolder.open(copied)).changed_side_files == ()


def test_save_pretrained_refuses_what_it_cannot_do(model, tmp_path):
    with pytest.raises(UnsupportedOperationError, match="state_dict"):
        model.save_pretrained(tmp_path / "copy", state_dict={})
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="is a file"):
        model.save_pretrained(tmp_path / "file")


def test_pushing_uploads_the_copied_folder(model, mixtral, tmp_path, monkeypatch):
    uploads = []
    monkeypatch.setattr("zipmoe.hf.model_guards.push_folder", lambda *args, **kwargs: uploads.append((args, kwargs)))
    model.save_pretrained(tmp_path / "copy", push_to_hub=True, repo_id="someone/some-model", private=True)
    assert uploads == [((tmp_path / "copy", "someone/some-model"), {"private": True})]


def test_the_hub_mixin_pushes_through_save_pretrained(model, mixtral, monkeypatch):
    seen = {}

    def upload(self, directory, repo_id, *args, **kwargs):
        from pathlib import Path

        seen["files"] = {path.name for path in Path(directory).iterdir()}
        return "done"

    from transformers.utils import hub

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return type("Repo", (), {"repo_id": repo_id})

    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(
        hub, "create_and_tag_model_card", lambda *a, **k: type("Card", (), {"save": lambda s, p: None})()
    )
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    assert model.push_to_hub("someone/some-model") == "done"
    assert seen["files"] >= {path.name for path in mixtral.folder.iterdir()}


def test_footprint_counts_what_the_engine_holds(model, mixtral):
    unpacked = sum(p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers()))
    packed = sum(record.length for record in model.zipmoe_engine.folder.manifest.records())
    assert model.get_memory_footprint() >= unpacked + packed


def test_parameter_counts_are_those_of_the_plain_model(packed_model):
    for family in ("mixtral", "mixtral_tied", "switch"):
        packed = packed_model(family)
        model, plain = packed.load(), packed.plain()
        assert model.num_parameters() == plain.num_parameters()
        assert model.num_parameters(exclude_embeddings=True) == plain.num_parameters(exclude_embeddings=True)


def test_tied_embeddings_stay_tied(packed_model):
    packed = packed_model("mixtral_tied")
    model = packed.load()
    assert model.get_output_embeddings().weight.zipmoe_parameter == model.get_input_embeddings().weight.zipmoe_parameter
    model.tie_weights()
    model.model.tie_weights()
    assert torch.equal(packed.logits(model), packed.logits(packed.plain()))
    assert len([m for m in model._zipmoe_folder.manifest.dense if m.tied_parameters]) == 1


def test_packed_weights_cannot_be_replaced_or_written(model):
    with pytest.raises(UnsupportedOperationError, match="replaced"):
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(256, 64))
    with pytest.raises(UnsupportedOperationError, match="changed"):
        torch.nn.init.normal_(model.lm_head.weight)
    with pytest.raises(UnsupportedOperationError, match="changed"):
        model.lm_head.weight.data.zero_()
    with pytest.raises(UnsupportedOperationError, match="changed"):
        model.lm_head.weight[0] = 0


def test_expert_parameters_serve_one_expert_at_a_time(mixtral, model):
    plain = mixtral.plain()
    ours, theirs = model.model.layers[1].mlp.experts, plain.model.layers[1].mlp.experts
    assert ours.gate_up_proj.shape == theirs.gate_up_proj.shape
    assert ours.gate_up_proj.dtype == theirs.gate_up_proj.dtype
    assert torch.equal(ours.down_proj[3], theirs.down_proj[3])
    assert torch.equal(ours.gate_up_proj[torch.tensor(5)], theirs.gate_up_proj[5])
    with pytest.raises(IndexError):
        ours.gate_up_proj[6]
    with pytest.raises(UnsupportedOperationError, match="at once"):
        ours.gate_up_proj[1:3]
    with pytest.raises(UnsupportedOperationError, match="at once"):
        torch.bmm(ours.gate_up_proj, torch.zeros(6, 64, 1))


def test_generation_beyond_the_reserved_context_takes_from_the_pool_and_ends_with_a_clear_error(mixtral):
    from zipmoe.engine.budget import KV_CACHE

    model = mixtral.load(quantization_config=zipmoe.ZipMoEConfig(context_tokens=1))
    engine = model.zipmoe_engine
    start = engine.budget.reserved(KV_CACHE)
    ids = torch.ones(40, 16, dtype=torch.int64)
    assert torch.equal(
        model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False),
        mixtral.plain().generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False),
    )
    assert engine.budget.reserved(KV_CACHE) > start
    mixtral.generate(model, tokens=2)
    assert engine.budget.reserved(KV_CACHE) == start  # given back with the next short sequence
    engine.budget.set_reservation("somebody else", engine.budget.free_bytes)
    spare = engine._spare_bytes()
    with pytest.raises(BudgetExceededError, match=r"key-value cache|workspace"):
        model(input_ids=torch.ones(spare // 100 + 10, 100, dtype=torch.int64, device="meta"))


def test_a_model_that_is_dropped_gives_its_engine_back(mixtral):
    model = mixtral.load()
    mixtral.generate(model, tokens=2)
    engine = weakref.ref(model.zipmoe_engine)
    del model
    gc.collect()
    assert engine() is None
