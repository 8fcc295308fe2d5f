"""What a caller may choose when loading, and what is refused with which error."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers

import zipmoe
from zipmoe.errors import (
    BudgetTooSmallError,
    InvalidArgumentError,
    ManifestError,
    NotAPackedFolderError,
    PackedFolderError,
    UnsupportedOperationError,
)


@pytest.fixture
def copy(mixtral, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(mixtral.folder, folder)
    return folder


def change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def test_arguments_reach_the_engine(mixtral):
    settings = zipmoe.ZipMoEConfig(
        memory="8GB", mode="exact", verify="first", io_mode="buffered", io_threads=2, decode_threads=1
    )
    with pytest.warns(UserWarning, match="loading attributes"):
        model = mixtral.load(quantization_config=settings)
    assert model.zipmoe_mode == "exact"
    assert model.zipmoe_engine.budget.total_bytes == 8_000_000_000
    line = model.zipmoe_mode_line()
    for words in ("mode exact", "grouped_mm", "buffered reads", "2 threads", "1 thread", "first", "8.00 GB"):
        assert words in line, line


@pytest.mark.filterwarnings("error")
def test_load_takes_memory_and_mode(mixtral):
    model = zipmoe.load(str(mixtral.folder), memory="7.5GB", mode="exact")
    assert (model.zipmoe_mode, model.zipmoe_engine.budget.total_bytes) == ("exact", 7_500_000_000)


def test_the_environment_is_the_default_of_memory_and_mode(mixtral, monkeypatch):
    monkeypatch.setenv("ZIPMOE_MEMORY", "7.25GB")
    monkeypatch.setenv("ZIPMOE_MODE", "exact")
    model = mixtral.load()
    assert (model.zipmoe_mode, model.zipmoe_engine.budget.total_bytes) == ("exact", 7_250_000_000)
    model = zipmoe.load(mixtral.folder, memory="8GB", mode="fast")
    assert (model.zipmoe_mode, model.zipmoe_engine.budget.total_bytes) == ("fast", 8_000_000_000)
    monkeypatch.setenv("ZIPMOE_MODE", "slow")
    with pytest.raises(InvalidArgumentError, match="ZIPMOE_MODE"):
        mixtral.load()


def test_memory_is_not_ignored_beside_a_quantization_config(mixtral):
    with pytest.raises(InvalidArgumentError, match="memory and mode"):
        zipmoe.load(mixtral.folder, memory="1GB", quantization_config=zipmoe.ZipMoEConfig(mode="exact"))


@torch.no_grad()
def test_a_model_loaded_in_inference_mode_works_outside_of_it(packed_model):
    switch = packed_model("switch")
    with torch.inference_mode():
        model = switch.load()
    assert torch.equal(switch.logits(model), switch.logits(switch.plain()))


def test_fast_is_the_default_mode(mixtral, monkeypatch):
    monkeypatch.delenv("ZIPMOE_MODE")
    model = mixtral.load()
    assert model.zipmoe_mode == "fast"
    assert f"mode fast ({model.zipmoe_engine.fused.what_runs()}) with grouped_mm combine" in model.zipmoe_mode_line()


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "slow"},
        {"verify": "sometimes"},
        {"io_mode": "direct"},
        {"io_threads": 0},
        {"io_backend": "pigeon"},
        {"context_tokens": -1},
        {"colour": "blue"},
    ],
)
def test_bad_settings_are_refused(arguments):
    with pytest.raises(InvalidArgumentError, match=next(iter(arguments))):
        zipmoe.ZipMoEConfig(**arguments)


def test_a_bad_amount_of_memory_is_refused(mixtral):
    with pytest.raises(InvalidArgumentError, match="4 apples"):
        zipmoe.load(mixtral.folder, memory="4 apples")


def test_a_budget_below_the_floor_is_refused_before_weights_are_loaded(mixtral, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", None)
    with pytest.raises(BudgetTooSmallError, match="unpacked tensors"):
        zipmoe.load(mixtral.folder, memory="10MB")


def test_only_two_keys_are_stored():
    settings = zipmoe.ZipMoEConfig(memory="8GB", mode="exact")
    assert json.loads(settings.to_json_string()) == {"quant_method": "zipmoe", "format_version": 1}
    assert settings.get_loading_attributes()["memory"] == "8GB"


def test_an_unknown_format_version_is_refused(copy):
    change_config(copy, format_version=2)
    with pytest.raises(ManifestError, match="version 2"):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


def test_unknown_keys_in_the_folder_are_refused(copy):
    change_config(copy, group_size=64)
    with pytest.raises(InvalidArgumentError, match="group_size"):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, "float16"])
def test_dtypes_that_lose_bits_are_refused(mixtral, dtype):
    with pytest.raises(UnsupportedOperationError, match="float"):
        mixtral.load(dtype=dtype)


@pytest.mark.parametrize("device_map", ["cuda", "meta", {"": 0}, {"model": "cpu", "lm_head": "disk"}])
def test_other_devices_are_refused(mixtral, device_map):
    with pytest.raises((InvalidArgumentError, RuntimeError), match=r"CPU|cuda|meta"):
        mixtral.load(device_map=device_map)


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}, torch.device("cpu")])
def test_the_cpu_is_accepted_as_a_device(mixtral, device_map):
    model = mixtral.load(device_map=device_map)
    assert torch.equal(mixtral.logits(model), mixtral.logits(mixtral.plain()))


def test_plain_folders_are_refused(mixtral, tmp_path):
    for load in (zipmoe.load, lambda f: mixtral._class().from_pretrained(f, quantization_config=zipmoe.ZipMoEConfig())):
        with pytest.raises(NotAPackedFolderError):
            load(mixtral.source)
    with pytest.raises(NotAPackedFolderError, match="nowhere"):
        zipmoe.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotAPackedFolderError, match="empty"):
        zipmoe.load(tmp_path / "empty")


def test_the_manifest_of_another_model_is_refused(packed_model, copy):
    other = packed_model("qwen2_moe").folder
    shutil.copy(other / "zipmoe.json", copy / "zipmoe.json")
    with pytest.raises(PackedFolderError):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_local_experts", 8, "8 experts, the folder has 6"),
        ("intermediate_size", 128, "gate_up_proj"),
        ("vocab_size", 512, "shape"),
        ("num_hidden_layers", 1, "no experts at"),
    ],
)
def test_a_config_that_contradicts_the_manifest_is_refused(copy, key, value, message):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ManifestError, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(copy)


def test_a_hub_snapshot_loads_and_fetches_the_manifest(mixtral, tmp_path, monkeypatch):
    """A hub download brings the files that the tensor index names; the manifest is fetched in addition."""
    blobs = tmp_path / "models--someone--model" / "blobs"
    snapshot = tmp_path / "models--someone--model" / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in mixtral.folder.iterdir():
        shutil.copy(path, blobs / path.name)
        if path.name != "zipmoe.json":
            (snapshot / path.name).symlink_to(blobs / path.name)
    fetched = []

    def cached_file(name, filename, *, cache_dir, revision, **_):
        fetched.append((name, filename, cache_dir, revision))
        (snapshot / filename).symlink_to(blobs / filename)

    monkeypatch.setattr("zipmoe.hf.quantizer.cached_file", cached_file)
    model = zipmoe.load(snapshot)
    assert fetched == [(str(snapshot), "zipmoe.json", tmp_path, "0" * 40)]
    assert torch.equal(mixtral.logits(model), mixtral.logits(mixtral.plain()))
