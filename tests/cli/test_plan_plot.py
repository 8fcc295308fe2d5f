"""The picture of ``zipmoe plan --plot``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from large_folder import MACHINE, large_manifest

from zipmoe.cli.plan_plot import check_plot, draw_plan
from zipmoe.errors import InvalidArgumentError
from zipmoe.simulation.budget_plan import PlanRequest, plan_for_budget


@pytest.mark.parametrize("codec", ["zstd", "fx3"])
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_both_kinds_of_pictures_are_drawn(codec: str, suffix: str, magic: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = plan_for_budget(PlanRequest(large_manifest(codec), MACHINE, 4, 2_000_000_000))
    path = tmp_path / f"plan{suffix}"
    check_plot(path)
    draw_plan(plan, path, "a folder")
    assert path.read_bytes().startswith(magic)
    if suffix == ".svg":
        text = path.read_text()
        assert text.count("<use ") > len(plan.report.candidates)  # a point for every partition


def test_what_cannot_be_drawn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "plan.pdf", tmp_path / "nowhere/plan.png"):
        with pytest.raises(InvalidArgumentError, match="cannot be drawn"):
            check_plot(path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InvalidArgumentError, match="needs matplotlib") as caught:
        check_plot(tmp_path / "plan.png")
    assert caught.value.hint == "pip install 'zipmoe[plot]'"
