"""The test bed itself: complete, deterministic, and sensitive to what it is meant to catch."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from family_table import EXCLUDED, EXPERTS, FAMILIES, OWN_LOOP_EXPERTS
from tiny_models import (
    architecture,
    expert_parameters,
    expert_slices,
    families_with_experts,
    interface_families,
    logits,
    tiny_inputs,
    tiny_model,
)

MAX_BYTES = 2 << 20
ONE_ORDER = {"phimoe", "zaya", "nemotron_h", "inkling2", "inkling2_loop"}
"""Families whose two combine orders agree on any input: at most two experts per token, or a sum in FP32."""


def test_no_family_of_the_interface_is_forgotten() -> None:
    assert interface_families() - FAMILIES.keys() - EXCLUDED.keys() == set()
    assert OWN_LOOP_EXPERTS.keys() == FAMILIES.keys() - interface_families()


def test_no_family_with_experts_outside_the_interface_is_forgotten() -> None:
    assert families_with_experts() - FAMILIES.keys() == EXCLUDED.keys()
    assert all(EXCLUDED.values())
    assert not EXCLUDED.keys() & FAMILIES.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_loads_and_repeats_itself(family: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(family)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) < MAX_BYTES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = architecture(family).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    model.eval()
    stored = tiny_model(family).state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith(FAMILIES[family].reset_on_load or "never"):
            continue
        assert torch.equal(tensor.to(torch.bfloat16), stored[name].to(torch.bfloat16)), name
    inputs = tiny_inputs(family)
    first = logits(model, **inputs)
    assert first.isfinite().all()
    assert first.float().std() > 0.01
    assert torch.equal(first, logits(model, **inputs))


@pytest.mark.parametrize("family", FAMILIES)
def test_many_experts_of_every_layer_show_in_the_logits(family: str) -> None:
    model = tiny_model(family)
    inputs = tiny_inputs(family)
    before = logits(model, **inputs)
    groups = expert_parameters(model, family)
    assert groups
    for path, names in groups.items():
        used = 0
        for expert in range(EXPERTS):
            with expert_changed([s for name in names for s in expert_slices(model, path, name, family, expert)]):
                used += not torch.equal(before, logits(model, **inputs))
        assert used >= 3, f"{path}: only {used} experts matter"


@contextlib.contextmanager
def expert_changed(matrices: list[torch.Tensor]) -> Iterator[None]:
    kept = [matrix.clone() for matrix in matrices]
    for matrix in matrices:
        matrix.mul_(-1.5)
    yield
    for matrix, original in zip(matrices, kept, strict=True):
        matrix.copy_(original)


@pytest.mark.parametrize("family", sorted(interface_families() & FAMILIES.keys()))
def test_the_two_combine_orders_differ(family: str) -> None:
    """Otherwise a test in one order would prove nothing about the other."""
    model = tiny_model(family)
    inputs = tiny_inputs(family)
    model.set_experts_implementation("grouped_mm")
    default = logits(model, **inputs)
    model.set_experts_implementation("eager")
    assert torch.equal(default, logits(model, **inputs)) == (family in ONE_ORDER)


@pytest.mark.parametrize("family", sorted(interface_families() & FAMILIES.keys()))
def test_every_token_reaches_three_experts_where_the_family_allows_it(family: str) -> None:
    model = tiny_model(family)
    reached: set[int] = set()

    def count(module: torch.nn.Module, args: tuple[object, ...]) -> None:
        if len(args) > 1 and isinstance(args[1], torch.Tensor) and not args[1].is_floating_point():
            reached.add(args[1].shape[-1])

    for path in expert_parameters(model, family):
        model.get_submodule(path).register_forward_pre_hook(count)
    logits(model, **tiny_inputs(family))
    assert reached == {FAMILIES[family].top_k}
