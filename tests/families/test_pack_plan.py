"""What the packer plans and reads, against the parameters that plain Transformers loads from the same checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from family_table import FAMILIES
from tiny_models import architecture, expert_parameters, expert_slices

from zipmoe.checkpoint.expert_reader import ExpertReader
from zipmoe.checkpoint.source import SourceCheckpoint
from zipmoe.store.pack_plan import meta_model, plan_pack


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_read_as_the_model_holds_it(family: str, checkpoint: Callable[[str], Path]) -> None:
    source = SourceCheckpoint(checkpoint(family))
    plan = plan_pack(meta_model(source), source, min_dense_bytes=0)
    plain = architecture(family).from_pretrained(checkpoint(family))

    expected = {path: set(names) for path, names in expert_parameters(plain, family).items()}
    found = {
        path: {p.format(expert=e) for p in g.parameters for e in range(g.num_experts)}
        for g in plan.groups
        for path in (g.path, *plan.tied_paths.get(g.path, ()))
    }
    assert found == expected

    reader = ExpertReader(meta_model(source), source, plan.expert_units)
    for group in plan.groups:
        for expert in range(group.num_experts):
            for parameter in group.parameters:
                for path in (group.path, *plan.tied_paths.get(group.path, ())):
                    held = expert_slices(plain, path, parameter.format(expert=expert), family, expert)
                    assert torch.equal(reader.read(group, parameter, expert), held[0]), f"{path} {parameter} {expert}"
    for matrix in plan.dense:
        for block in matrix.blocks:
            held_rows = plain.get_parameter(matrix.parameter)[block.begin : block.end]
            assert held_rows.dtype == torch.bfloat16
            assert torch.equal(source.read_rows(block.key, block.begin, block.end), held_rows), matrix.parameter
    assert len(plan.dense) >= 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_the_checkpoint_has_one_fate(family: str, checkpoint: Callable[[str], Path]) -> None:
    source = SourceCheckpoint(checkpoint(family))
    plan = plan_pack(meta_model(source), source, min_dense_bytes=0)
    fates = Counter(plan.plain_keys) + Counter(plan.ignored_keys)
    fates += Counter({key for unit in plan.expert_units.values() for key in unit.keys})
    fates += Counter({block.key for matrix in plan.dense for block in matrix.blocks})
    assert fates == Counter(list(source.tensors))
    assert not plan.ignored_keys
    reasons = {reason.reason for reason in plan.unpacked}
    assert not {r for r in reasons if "unknown" in r or "experts in" in r}
    assert sum(reason.tensors for reason in plan.unpacked) == len(plan.plain_keys)
