"""Packing every family: all experts, all bits, nothing left over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from family_table import CODECS, FAMILIES, second_codec
from tiny_models import expert_parameters, tiny_model

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.store.packed_folder import PackedFolder
from zipmoe.store.verify import verify

Packed = Callable[[str, CodecSettings], Path]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("turn", ["fx3", "second codec"])
def test_the_packed_folder_holds_every_bit(
    family: str, turn: str, packed: Packed, checkpoint: Callable[[str], Path]
) -> None:
    settings = CODECS[0] if turn == "fx3" else second_codec(family)
    folder = PackedFolder.open(packed(family, settings))
    assert folder.manifest.codec == settings
    result = verify(folder, against=checkpoint(family), jobs=1)
    assert result.matrices_compared == sum(len(record.matrices) for record in folder.manifest.records())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_expert_parameter_is_packed(family: str, packed: Packed) -> None:
    manifest = PackedFolder.open(packed(family, CODECS[0])).manifest
    held = {
        path: {p.format(expert=e) for p in group.parameters for e in range(len(group.records))}
        for group in manifest.expert_groups
        for path in (group.path, *group.tied_paths)
    }
    expected = expert_parameters(tiny_model(family), family)
    assert held == {path: set(names) for path, names in expected.items()}


def test_every_codec_meets_many_families() -> None:
    turns = [second_codec(family).name for family in FAMILIES]
    assert {codec.name for codec in CODECS[1:]} == set(turns)
    assert min(turns.count(name) for name in set(turns)) >= 10


@pytest.mark.parametrize("family", FAMILIES)
def test_the_configuration_refuses_to_load_without_the_plug_in(family: str, packed: Packed) -> None:
    config = json.loads((packed(family, CODECS[0]) / "config.json").read_text())
    assert config["experts_implementation"] == "zipmoe"
    assert config["quantization_config"]["quant_method"] == "zipmoe"
