"""Routing regroups the router's ids by expert."""

from __future__ import annotations

import pytest
import torch

from zipmoe.hf import routing
from zipmoe.hf.routing import Routing


@pytest.mark.parametrize("few", [0, 10_000])
@pytest.mark.parametrize("tokens", [1, 2, 9, 33])
def test_positions_of_every_expert(tokens: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by a list and by torch's operations."""
    monkeypatch.setattr(routing, "_FEW", few)
    ids = torch.randint(-1, 6, (tokens, 4), generator=torch.Generator().manual_seed(tokens))
    found = Routing(ids, 5)  # -1 and 5 mean no expert
    flat = ids.reshape(-1).tolist()
    present = sorted({expert for expert in flat if 0 <= expert < 5})
    assert found.experts == present
    assert found.tokens == [flat.count(expert) for expert in present]
    assert found.complete == all(0 <= expert < 5 for expert in flat)
    assert {expert: at.tolist() for expert, at in found.rows().items()} == {
        expert: [position for position, value in enumerate(flat) if value == expert] for expert in present
    }
    if found.complete:
        assert found.positions.tolist() == sorted(range(len(flat)), key=flat.__getitem__)


def test_no_tokens() -> None:
    found = Routing(torch.empty((0, 4), dtype=torch.int64), 5)
    assert (found.experts, found.tokens, found.complete, found.rows()) == ([], [], False, {})
