"""Without ZipMoE, Transformers must refuse a packed folder instead of loading random experts."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from zipmoe.store.guard_tensor import GUARD_SHAPE, guard_tensor_name
from zipmoe.store.packed_folder import PackedFolder

LOAD = """
import sys, transformers
assert "zipmoe" not in sys.modules
arguments = {} if sys.argv[3] == "default" else {"experts_implementation": sys.argv[3]}
getattr(transformers, sys.argv[1]).from_pretrained(sys.argv[2], **arguments)
"""


@pytest.mark.parametrize("order", ["default", "eager", "grouped_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "switch", "dbrx", "llama4", "jetmoe"])
def test_plain_transformers_refuses_a_packed_folder(packed_model, family, order):
    packed = packed_model(family)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, packed.tiny.architecture, str(packed.folder), order],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert 'experts_implementation="zipmoe"' in done.stderr or "ignore_mismatched_sizes" in done.stderr, done.stderr


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
