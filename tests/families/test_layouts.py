"""Checkpoint layouts that real models come in: sharded, fused, tied, mixed precision, with parts the model ignores."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_edits import read_state, rewrite, set_config
from equality import assert_same_answers
from family_table import CODECS, EXPERTS
from tiny_models import expert_parameters, tiny_model

from zipmoe.errors import NotAMixtureOfExpertsError
from zipmoe.store.manifest import Manifest
from zipmoe.store.pack import pack
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify

Folder = Callable[[str], Path]

FUSED_ON_DISK = (
    "aria",
    "granitemoe",
    "gpt_oss",
    "inkling2",
    "jetmoe",
    "llama4",
    "mistral4",
    "qwen3_vl_moe",
    "step3p7",
    "zaya",
)
IGNORED_EXPERTS = {
    "bailing_hybrid": "model.layers.{layers}.mlp.experts.{e}.{m}_proj.weight",
    "deepseek_v3": "model.layers.61.mlp.experts.{e}.{m}_proj.weight",
    "deepseek_v32": "model.layers.61.mlp.experts.{e}.{m}_proj.weight",
    "deepseek_v4": "mtp.0.ffn.experts.{e}.{m}.weight",
    "ernie4_5_moe": "model.mtp_block.0.mlp.experts.{e}.{m}_proj.weight",
    "glm4_moe": "model.layers.46.mlp.experts.{e}.{m}_proj.weight",
}
"""Families and names of experts of multi-token prediction layers, which their models ignore."""
FLOAT32_ROUTERS = ("deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "ernie4_5_moe", "kimi_linear", "nemotron_h")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)


def packed_and_verified(source: Path, destination: Path, codec: int = 0) -> Manifest:
    pack(source, destination, CODECS[codec], jobs=1, min_dense_bytes=0)
    opened = PackedFolder.open(destination)
    verify(opened, against=source, jobs=1)
    return opened.manifest


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v4", "switch_transformers", "gpt_oss", "dbrx"])
def test_the_experts_of_one_layer_lie_in_many_shards(family: str, folder: Path) -> None:
    source = folder / "sharded"
    tiny_model(family).save_pretrained(source, max_shard_size="20KB")
    shards = list(source.glob("*.safetensors"))
    assert len(shards) > 8
    packed_and_verified(source, folder / "packed")
    assert_same_answers(family, source, folder / "packed")


@pytest.mark.parametrize("family", FUSED_ON_DISK)
def test_experts_that_lie_fused_on_disk(family: str, checkpoint: Folder) -> None:
    """The layout is what the list above says; that it is packed bit for bit is tested for every family."""
    shapes = [t.shape for t in read_state(checkpoint(family)).values()]
    assert any(len(shape) == 3 and shape[0] == EXPERTS for shape in shapes)


def test_experts_that_lie_transposed_on_disk(checkpoint: Folder, folder: Path) -> None:
    """As in the hub's Qwen3-VL-MoE; Transformers tells by the shape that it must transpose."""

    def transpose(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {k: t.transpose(1, 2) if ".experts." in k and t.ndim == 3 else t for k, t in state.items()}

    source = rewrite(checkpoint("qwen3_vl_moe"), folder / "transposed", transpose)
    packed_and_verified(source, folder / "packed")
    assert_same_answers("qwen3_vl_moe", source, folder / "packed")
    assert_same_answers("qwen3_vl_moe", checkpoint("qwen3_vl_moe"), folder / "packed")


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "qwen3_5_moe", "deepseek_v3", "ernie4_5_vl_moe"])
def test_experts_stored_as_the_modules_hold_them(family: str, folder: Path) -> None:
    source = folder / "fused"
    tiny_model(family).save_pretrained(source, save_original_format=False)
    assert any(key.endswith("experts.gate_up_proj") for key in read_state(source))
    packed_and_verified(source, folder / "packed")
    assert_same_answers(family, source, folder / "packed")


@pytest.mark.parametrize("family", ["cohere2_moe", "lfm2_moe", "gemma4", "jetmoe", "switch_transformers", "zaya"])
def test_tied_embeddings_are_packed_once(family: str, checkpoint: Folder, folder: Path) -> None:
    manifest = packed_and_verified(checkpoint(family), folder / "packed")
    tied = [matrix for matrix in manifest.dense if matrix.tied_parameters]
    assert len(tied) == 1
    names = {matrix.parameter for matrix in manifest.dense}
    assert not names & set(tied[0].tied_parameters)
    assert {tied[0].parameter, *tied[0].tied_parameters} >= {"lm_head.weight"}


@pytest.mark.parametrize("family", FLOAT32_ROUTERS)
def test_routers_that_the_model_keeps_in_float32(family: str, checkpoint: Folder, folder: Path) -> None:
    """Real checkpoints store them in BF16; Transformers computes in FP32 with them, so they must stay as they are."""
    source = rewrite(
        checkpoint(family),
        folder / "bf16",
        lambda state: {k: t.bfloat16() if t.is_floating_point() else t for k, t in state.items()},
    )
    manifest = packed_and_verified(source, folder / "packed")
    kept = {n for n, p in tiny_model(family).named_parameters() if p.dtype == torch.float32}
    assert not kept & {matrix.parameter for matrix in manifest.dense}
    assert_same_answers(family, source, folder / "packed")


@pytest.mark.parametrize("family", IGNORED_EXPERTS)
def test_experts_that_the_model_ignores_are_dropped(family: str, checkpoint: Folder, folder: Path) -> None:
    layers = tiny_model(family).config.num_hidden_layers
    matrices = ("w1", "w2", "w3") if family == "deepseek_v4" else ("gate", "up", "down")
    ignored = {
        IGNORED_EXPERTS[family].format(layers=layers, e=e, m=m): torch.randn(48, 64).bfloat16()
        for e in range(8)
        for m in matrices
    }
    source = rewrite(checkpoint(family), folder / "mtp", lambda state: state | ignored)
    if family == "bailing_hybrid":
        set_config(source, num_nextn_predict_layers=1)
    manifest = packed_and_verified(source, folder / "packed")
    assert set(manifest.ignored_source_keys) == ignored.keys()
    assert not ignored.keys() & read_state(folder / "packed").keys()
    assert {group.path for group in manifest.expert_groups} == expert_parameters(tiny_model(family), family).keys()
    assert_same_answers(family, source, folder / "packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("family", ["mixtral", "switch_transformers"])
def test_checkpoints_in_another_precision_are_refused(
    family: str, dtype: torch.dtype, checkpoint: Folder, folder: Path
) -> None:
    source = rewrite(checkpoint(family), folder / "other", lambda state: {k: t.to(dtype) for k, t in state.items()})
    set_config(source, dtype=str(dtype).removeprefix("torch."))
    with pytest.raises(NotAMixtureOfExpertsError, match=r"no expert of .* is stored in BF16"):
        pack(source, folder / "packed", CODECS[0], jobs=1)
    assert not (folder / "packed").exists()


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_one_layer_in_float32_is_left_unpacked(family: str, checkpoint: Folder, folder: Path) -> None:
    def widen_last_layer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last = max(int(key.split("layers.")[1].split(".")[0]) for key in state if ".experts." in key)
        return {k: t.float() if f"layers.{last}." in k and ".experts." in k else t for k, t in state.items()}

    source = rewrite(checkpoint(family), folder / "mixed", widen_last_layer)
    manifest = packed_and_verified(source, folder / "packed")
    assert len(manifest.expert_groups) == len(expert_parameters(tiny_model(family), family)) - 1
    assert any("F32" in reason.reason for reason in manifest.unpacked)
    assert_same_answers(family, source, folder / "packed")
