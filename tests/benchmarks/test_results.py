"""What benchmarks share: documents whose findings survive, commands under a limit, plots."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import limited_run
import line_plot
import pytest
import replayed_models
import result_document

SCRIPTS = sorted(path.stem for path in Path(result_document.__file__).parent.glob("*.py"))
SHARED = {"result_document", "replayed_models", "line_plot", "limited_run"}


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in SHARED])
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = __import__(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as exit_:
        script.main()
    assert exit_.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_every_script_is_in_the_index() -> None:
    index = (Path(result_document.__file__).parent / "README.md").read_text()
    assert [name for name in SCRIPTS if f"`{name}.py`" not in index] == []


def test_findings_around_the_tables_are_kept(tmp_path: Path) -> None:
    data, document = tmp_path / "r.json", tmp_path / "r.md"
    first = result_document.table(["a", "b"], [[1, "x"]])
    assert first == "| a | b |\n| --- | --- |\n| 1 | x |\n"
    result_document.write_results(data, document, "Title", {"cases": {"one": 1}}, first)
    text = document.read_text()
    assert text.startswith("# Title\n")
    document.write_text(f"{text}\nA finding.\n".replace("# Title", "# My title"))
    result_document.write_results(data, document, "Title", {"cases": {"two": 2}}, "| new |\n")
    text = document.read_text()
    assert text.startswith("# My title\n") and text.endswith("\nA finding.\n")
    assert "| new |" in text and "| a | b |" not in text
    assert result_document.earlier_results(data, "cases") == {"two": 2}
    assert result_document.earlier_results(tmp_path / "none.json", "cases") == {}
    document.write_text("no marks")
    with pytest.raises(SystemExit, match="lacks the marks"):
        result_document.write_results(data, document, "Title", {}, "")
    assert document.read_text() == "no marks"


def test_limited_run_returns_figures_and_output(tmp_path: Path) -> None:
    tool = tmp_path / "limit-run"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import json, subprocess, sys\n"
        "own, command = sys.argv[1:sys.argv.index('--')], sys.argv[sys.argv.index('--') + 1:]\n"
        "rc = subprocess.run(command).returncode\n"
        "figures = {'rc': rc, 'limit': own[own.index('--mem') + 1], 'evicted': own[own.index('--evict') + 1]}\n"
        "open(own[own.index('--json') + 1], 'w').write(json.dumps(figures))\n"
    )
    tool.chmod(0o755)
    command = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"]
    figures, out, err = limited_run.limited_run(tmp_path, 1000, command, tmp_path)
    assert figures == {"rc": 3, "limit": "1000", "evicted": str(tmp_path)}
    assert (out, err) == ("out\n", "err\n")
    with pytest.raises(SystemExit, match="no limit-run"):
        limited_run.limited_run(tmp_path / "elsewhere", 1000, command, tmp_path)


def test_plots_are_left_out_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    path = tmp_path / "plot.svg"
    assert not line_plot.save_lines(path, {"panel": {"line": [(1, 2)]}}, x_label="x", y_label="y")
    assert not path.exists()
    assert capsys.readouterr().err.count("matplotlib is not installed") == 1


def test_device_constants_are_json() -> None:
    device = replayed_models.load_device("jetson-orin")
    constants = json.loads(json.dumps(replayed_models.device_constants([device])))
    assert constants["jetson-orin"]["workers"] == 6
    assert constants["jetson-orin"]["exponent_ratio"]["zstd"] == 0.4052
