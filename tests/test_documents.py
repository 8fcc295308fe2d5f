"""The documents name what exists: every module, every field of the manifest, every command that the README shows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import typer.main

from zipmoe.cli.main import app
from zipmoe.store import manifest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for path in (ROOT / "src" / "zipmoe").glob("*/**/*.py") if path.name != "__init__.py")
MANIFEST_CLASSES = [value for value in vars(manifest).values() if dataclasses.is_dataclass(value)]


def test_architecture_names_every_module() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert MODULES
    assert [path.name for path in MODULES if f"`{path.name}`" not in text] == []


def test_architecture_names_no_module_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    present = {path.name for path in (ROOT / "src" / "zipmoe").rglob("*.py")}
    assert set(re.findall(r"`([a-z0-9_]+\.py)`", text)) - present == set()


def test_format_names_every_field_of_the_manifest() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    fields = {field.name for each in MANIFEST_CLASSES for field in dataclasses.fields(each)}
    assert "xxh3_64" in fields
    assert {name for name in fields if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("command", ["pack", "inspect", "verify", "run", "bench"])
def test_readme_shows_options_that_exist(command: str) -> None:
    lines = re.findall(rf"^\| `zipmoe {command} (.*?)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    group = typer.main.get_command(app)
    parameters = group.commands[command].params  # type: ignore[attr-defined]
    known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    shown = set(re.findall(r"--[a-z-]+", " ".join(lines)))
    assert shown
    assert shown - known == set()
