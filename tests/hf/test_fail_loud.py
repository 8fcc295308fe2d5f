"""Without ZipMoE, Transformers must refuse a packed folder instead of loading random experts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from zipmoe.store.guard_tensor import GUARD_SHAPE, guard_tensor_name
from zipmoe.store.packed_folder import PackedFolder

FAMILIES = ["mixtral", "gpt_oss", "switch", "dbrx", "llama4", "jetmoe"]
LOAD = """
import sys, transformers
assert "zipmoe" not in sys.modules
for architecture, folder in zip(sys.argv[1::2], sys.argv[2::2]):
    for arguments, message in [
        ({}, 'experts_implementation="zipmoe"'),
        ({"experts_implementation": "eager"}, "ignore_mismatched_sizes"),
    ]:
        try:
            getattr(transformers, architecture).from_pretrained(folder, **arguments)
        except (ValueError, RuntimeError) as error:
            assert message in str(error), (architecture, arguments, error)
        else:
            raise AssertionError(f"{architecture} loaded random experts with {arguments}")
"""


def test_plain_transformers_refuses_packed_folders(packed_model):
    folders = [packed_model(family) for family in FAMILIES]
    arguments = [argument for p in folders for argument in (p.tiny.architecture, str(p.folder))]
    done = subprocess.run([sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("family", ["mixtral", "switch", "dbrx"])
def test_the_guard_tensor_has_the_name_of_an_expert_parameter(packed_model, family):
    packed = packed_model(family)
    manifest = PackedFolder.open(packed.folder).manifest
    name = guard_tensor_name(manifest)
    assert name == manifest.guard_tensor
    assert packed.tiny.build().get_parameter(name).shape != GUARD_SHAPE
    index = json.loads((packed.folder / "model.safetensors.index.json").read_text())
    with safe_open(packed.folder / index["weight_map"][name], "np") as file:
        guard = file.get_slice(name)
        assert (tuple(guard.get_shape()), guard.get_dtype()) == (GUARD_SHAPE, "U8")
