from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fake_engine import FakeEngine
from observed_model import PROMPT, ObservedModel, experts_class
from representative_models import TINY_MODELS, TinyModel

import zipmoe
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.hf.configuration import ZipMoEConfig
from zipmoe.store.pack import pack

IDS = torch.tensor([[5, 9, 31, 77, 120, 3, 240, 18, 64], [7, 7, 200, 41, 6, 99, 150, 23, 12]])


@dataclass(frozen=True)
class Packed:
    """A tiny model as a checkpoint, and packed with every matrix that can be."""

    tiny: TinyModel
    source: Path
    folder: Path

    def plain(self, **kwargs: Any) -> Any:
        return self._class().from_pretrained(self.source, **kwargs)

    def load(self, **kwargs: Any) -> Any:
        return self._class().from_pretrained(self.folder, **kwargs)

    def _class(self) -> Any:
        return getattr(transformers, self.tiny.architecture)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        mask = torch.ones_like(IDS)
        if self.tiny.encoder_decoder:
            return {"input_ids": IDS, "attention_mask": mask, "decoder_input_ids": IDS[:, :5]}
        return {"input_ids": IDS, "attention_mask": mask}

    def logits(self, model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**self.inputs).logits

    def generate(self, model: Any, tokens: int = 6) -> torch.Tensor:
        return model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )


@pytest.fixture(scope="session")
def packed_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Packed]:
    built: dict[str, Packed] = {}

    def get(name: str) -> Packed:
        if name not in built:
            root = tmp_path_factory.mktemp(name)
            TINY_MODELS[name].build().save_pretrained(root / "source")
            pack(root / "source", root / "packed", CodecSettings("fx3", None, 1), jobs=1, min_dense_bytes=0)
            built[name] = Packed(TINY_MODELS[name], root / "source", root / "packed")
        return built[name]

    return get


@pytest.fixture
def observed(packed_model: Callable[[str], Packed], monkeypatch: pytest.MonkeyPatch) -> Iterator[ObservedModel]:
    held = ObservedModel(packed_model("qwen2_moe").folder)
    monkeypatch.setattr(experts_class(held.layer.mlp.experts), "forward", held.experts_forward)
    with held.model.zipmoe_engine:
        yield held


@pytest.fixture
def whole(packed_model: Callable[[str], Packed]) -> Iterator[Any]:
    """The same model, which leaves nothing out."""
    settings = ZipMoEConfig(memory="8GB", mode="fast", last_positions=False)
    with pytest.warns(UserWarning, match="quantization_config"):
        model = packed_model("qwen2_moe").load(quantization_config=settings)
    assert model.zipmoe_last_positions is None
    with model.zipmoe_engine, torch.no_grad():
        model(input_ids=PROMPT)  # of which modules that are used for the first time compute themselves
        yield model


@pytest.fixture
def mixtral(packed_model: Callable[[str], Packed]) -> Packed:
    return packed_model("mixtral")


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models open a FakeEngine instead of the real one."""
    from zipmoe.hf import quantizer

    monkeypatch.setattr(quantizer, "open_engine", lambda model, folder, *_: FakeEngine(folder))


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    assert zipmoe.__version__
