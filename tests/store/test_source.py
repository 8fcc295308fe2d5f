"""Reading the original checkpoint: exactly the rows asked for, and a clear word when there is nothing to read."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import save_tiny_checkpoint

from zipmoe.checkpoint.source import SourceCheckpoint, resolve_source
from zipmoe.errors import DamagedCheckpointError, NotACheckpointError


def test_rows_and_whole_tensors_equal_the_library(tiny_source: Path) -> None:
    source = SourceCheckpoint(tiny_source)
    expected = {key: t for file in tiny_source.glob("*.safetensors") for key, t in load_file(file).items()}
    assert source.tensors.keys() == expected.keys()
    assert source.total_bytes == sum(t.nbytes for t in expected.values())
    for key, tensor in expected.items():
        assert torch.equal(source.read(key), tensor)
        middle = tensor.shape[0] // 2
        assert torch.equal(source.read_rows(key, middle, middle + 1), tensor[middle : middle + 1])
        assert torch.equal(source.read_rows(key, 0, tensor.shape[0]), tensor)
        with pytest.raises(IndexError, match="which has"):
            source.read_rows(key, 0, tensor.shape[0] + 1)


def test_every_dtype_and_scalars(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "half": torch.randn(2, 3).half(),
        "integers": torch.arange(6).reshape(3, 2),
        "flags": torch.tensor([True, False]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "float8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "unsigned": torch.arange(3).to(torch.uint32),
        "no_rows": torch.empty(0, 5, dtype=torch.bfloat16),
        "no_columns": torch.empty(5, 0, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = SourceCheckpoint(tmp_path)
    for key, tensor in tensors.items():
        found = source.read(key)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    before = source.fingerprint()
    save_file({**tensors, "scalar": torch.tensor(4.5)}, tmp_path / "model.safetensors")
    assert SourceCheckpoint(tmp_path).fingerprint() != before


def test_fingerprint_tells_trainings_apart(tiny_source: Path, tmp_path: Path) -> None:
    reference = SourceCheckpoint(tiny_source).fingerprint()
    assert SourceCheckpoint(tiny_source).fingerprint() == reference
    assert len(reference) == 16
    file = sorted(tiny_source.glob("*.safetensors"))[0]
    for other in tiny_source.iterdir():
        (tmp_path / other.name).write_bytes(other.read_bytes())
    tensors = load_file(file)
    key = sorted(tensors)[0]
    tensors[key] = tensors[key] + 1
    save_file(tensors, tmp_path / file.name)
    assert SourceCheckpoint(tmp_path).fingerprint() != reference


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    with pytest.raises(NotACheckpointError, match="does not exist"):
        resolve_source(str(tmp_path / "nowhere"))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotACheckpointError, match="is a file"):
        resolve_source(str(tmp_path / "file"))

    def offline(*arguments: object, **options: object) -> str:
        raise ConnectionError("no route\nwith a second line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(NotACheckpointError, match=r"could not be downloaded: no route$"):
        resolve_source("organisation/model")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    assert resolve_source("organisation/model") == tmp_path


@pytest.mark.parametrize("content", ["", "[]", "{", '"text"'])
def test_unreadable_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(NotACheckpointError, match=r"config\.json"):
        SourceCheckpoint(tmp_path)


def test_only_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NotACheckpointError, match=r"no safetensors weights \(only pytorch_model\.bin"):
        SourceCheckpoint(tmp_path)


def _unreferenced_tensor(folder: Path) -> str:
    """Remove a tensor from the index, but not from its shard."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    key = "model.layers.0.self_attn.q_proj.bias"
    del content["weight_map"][key]
    index.write_text(json.dumps(content))
    return key


def test_tensors_are_those_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import Qwen2MoeForCausalLM

    shards = save_tiny_checkpoint(tmp_path / "shards")
    key = _unreferenced_tensor(shards)
    plain = Qwen2MoeForCausalLM.from_pretrained(shards, dtype=torch.bfloat16).state_dict()
    assert torch.equal(SourceCheckpoint(shards).read(key), plain[key])

    single = save_tiny_checkpoint(tmp_path / "single", seed=1, max_shard_size="1GB")
    (shards / "model.safetensors").write_bytes((single / "model.safetensors").read_bytes())
    plain = Qwen2MoeForCausalLM.from_pretrained(shards, dtype=torch.bfloat16).state_dict()
    for name in ("model.embed_tokens.weight", key):
        assert torch.equal(SourceCheckpoint(shards).read(name), plain[name])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "source")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    key, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), key: tensor + 1}, second)
    with pytest.raises(DamagedCheckpointError, match=f"{key}.* twice: in {first.name} and in {second.name}"):
        SourceCheckpoint(folder)


def test_hostile_json_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("[" * 100_000)
    with pytest.raises(NotACheckpointError, match="not readable JSON"):
        SourceCheckpoint(tmp_path)
    config.write_text('{"text_config": "text"}')
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert SourceCheckpoint(tmp_path).tensors.keys() == {"weight"}


def test_shard_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny_checkpoint(tmp_path / "source", max_shard_size="1GB")
    open_file = Path.open

    def deny(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(DamagedCheckpointError, match=r"cannot read shard .*Permission denied"):
        SourceCheckpoint(folder)
