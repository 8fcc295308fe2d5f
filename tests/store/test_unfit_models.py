"""Configurations and weights that do not belong together are refused before anything is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import EXPERTS, save_tiny_checkpoint, tiny_model

from zipmoe.errors import DamagedCheckpointError, NotAMixtureOfExpertsError, UnsupportedCheckpointError
from zipmoe.store.manifest import CodecSettings
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify

FX3 = CodecSettings("fx3", None, 1)


def _edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("experts", [EXPERTS - 2, EXPERTS + 2])
def test_another_number_of_experts_than_the_model_has(tmp_path: Path, experts: int) -> None:
    source = save_tiny_checkpoint(tmp_path / "source")
    _edit_config(source, num_experts=experts)
    with pytest.raises(DamagedCheckpointError, match=f"has {EXPERTS} experts .* the model has {experts}"):
        pack(source, tmp_path / "packed", FX3)
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize("experts", [EXPERTS - 2, EXPERTS + 2])
def test_another_number_of_experts_in_a_fused_checkpoint(tmp_path: Path, experts: int) -> None:
    source = save_tiny_checkpoint(tmp_path / "source")
    for file in source.glob("model*"):
        file.unlink()
    state = {k: t.clone() for k, t in tiny_model().state_dict().items()}
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    _edit_config(source, num_experts=experts)
    with pytest.raises(DamagedCheckpointError, match=f"shape .{EXPERTS}, .* the model wants .{experts}, "):
        pack(source, tmp_path / "packed", FX3)
    _edit_config(source, num_experts=EXPERTS)
    pack(source, tmp_path / "packed", FX3)
    assert verify(PackedFolder.open(tmp_path / "packed"), against=source).matrices_compared > 0


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"architectures": ["Trainer"]}, UnsupportedCheckpointError),
        ({"architectures": 7}, UnsupportedCheckpointError),
        ({"architectures": ["LlamaForCausalLM"]}, (UnsupportedCheckpointError, NotAMixtureOfExpertsError)),
        ({"hidden_size": "abc"}, UnsupportedCheckpointError),
        ({"num_attention_heads": 0}, UnsupportedCheckpointError),
        ({"moe_intermediate_size": 64}, DamagedCheckpointError),
    ],
)
def test_configuration_that_makes_no_model(tmp_path: Path, changes: dict[str, Any], error: Any) -> None:
    source = save_tiny_checkpoint(tmp_path / "source")
    _edit_config(source, **changes)
    with pytest.raises(error):
        pack(source, tmp_path / "packed", FX3)


def test_remote_code_is_refused_without_a_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny_checkpoint(tmp_path / "source")
    _edit_config(source, model_type="mystery", auto_map={"AutoConfig": "code.Config"})
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    with pytest.raises(UnsupportedCheckpointError, match="custom code"):
        pack(source, tmp_path / "packed", FX3)
    assert capsys.readouterr().out == ""


def test_a_tensor_under_two_names_is_left_to_transformers(tmp_path: Path) -> None:
    source = save_tiny_checkpoint(tmp_path / "source", max_shard_size="1GB")
    state = load_file(source / "model.safetensors")
    state["embed_tokens.weight"] = state["model.embed_tokens.weight"] + 1
    state["empty"] = torch.empty(3, 0, dtype=torch.bfloat16)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    manifest = pack(source, tmp_path / "packed", FX3, min_dense_bytes=0)
    assert "model.embed_tokens.weight" not in {matrix.parameter for matrix in manifest.dense}
    assert "stored under several names" in {reason.reason for reason in manifest.unpacked}
    assert verify(PackedFolder.open(tmp_path / "packed"), against=source).plain_tensors_compared > 0
