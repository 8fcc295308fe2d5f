"""Reading the original checkpoint: exactly the rows asked for, and a clear word when there is nothing to read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zipmoe.checkpoint.source import SourceCheckpoint, resolve_source
from zipmoe.errors import NotACheckpointError


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
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    source = SourceCheckpoint(tmp_path)
    for key, tensor in tensors.items():
        found = source.read(key)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


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
