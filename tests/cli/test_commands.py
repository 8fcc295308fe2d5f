"""The command line as a person meets it: output, errors of one line with a hint, exit codes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zipmoe.cli.main import main


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def _assert_one_clear_error(err: str) -> None:
    lines = [line for line in err.splitlines() if line.strip()]
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
    assert "Traceback" not in err


def test_pack_inspect_verify(tiny_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    destination = tmp_path / "packed"
    code, out, err = _run(capsys, "pack", tiny_source, destination, "--codec", "zstd", "--level", "huf", "--shards", 2)
    assert code == 0
    assert out.strip() == str(destination)  # stdout is data
    assert "packed 12 experts in 2 layers" in err
    assert "ratio" in err

    code, out, _ = _run(capsys, "inspect", destination)
    assert code == 0
    for text in (
        "Qwen2MoeForCausalLM",
        "zstd, level huf, 2 shards",
        "model.layers.1.mlp.experts",
        "not packed because",
    ):
        assert text in out
    code, out, _ = _run(capsys, "inspect", destination, "--json")
    summary = json.loads(out)
    assert code == 0
    assert [layer["experts"] for layer in summary["layers"]] == [6, 6]
    assert summary["folder_bytes"] == sum(p.stat().st_size for p in destination.glob("*.safetensors"))
    assert summary["ratio"] == pytest.approx(summary["folder_bytes"] / summary["source_bytes"])

    code, out, _ = _run(capsys, "verify", destination)
    assert (code, "intact" in out) == (0, True)
    code, out, _ = _run(capsys, "verify", destination, "--against", tiny_source)
    assert (code, "bit for bit" in out) == (0, True)


def test_verify_says_when_a_side_file_was_edited(
    tiny_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny_packed, tmp_path / "copy"))
    (copy / "notes.txt").write_text("edited\n")
    code, out, err = _run(capsys, "verify", copy)
    assert (code, "intact" in out) == (0, True)
    assert "notes.txt was changed since the pack" in err


def test_damage_exits_with_1(tiny_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(tiny_packed, tmp_path / "copy"))
    path = next(copy.glob("packed-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    code, out, err = _run(capsys, "verify", copy)
    assert (code, out) == (1, "")
    _assert_one_clear_error(err)
    assert path.name in err
    assert "zipmoe.model" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pack", "/nowhere/at/all", "{tmp}/x"], "does not exist"),
        (["pack", "{packed}", "{tmp}/x"], "already packed"),
        (["pack", "{source}", "{packed}"], "already holds a packed model"),
        (["pack", "{source}", "{source}"], "same folder"),
        (["pack", "{source}", "{tmp}/x", "--codec", "rar"], "rar"),
        (["pack", "{source}", "{tmp}/x", "--codec", "zstd", "--level", "high"], "neither a number nor 'huf'"),
        (["pack", "{source}", "{tmp}/x", "--codec", "zstd", "--level", "99"], "99"),
        (["pack", "{source}", "{tmp}/x", "--codec", "fx3", "--level", "3"], "level"),
        (["pack", "{source}", "{tmp}/x", "--codec", "fx3", "--shards", "4"], "shards"),
        (["pack", "{source}", "{tmp}/x", "--codec", "lz4", "--level", "huf"], "huf"),
        (["pack", "{source}", "{tmp}/x", "--codec", "zstd", "--shards", "0"], "shards"),
        (["pack", "{source}", "{tmp}/x", "--jobs", "0"], "--jobs 0"),
        (["pack", "{source}"], "DST"),
        (["pack", "{source}", "{tmp}/x", "--fast"], "--fast"),
        (["inspect", "{source}"], "not a packed model"),
        (["inspect", "/nowhere"], "not a folder"),
        (["verify", "{tmp}"], "not a packed model"),
        (["verify", "{packed}", "--against", "/nowhere"], "does not exist"),
        (["verify", "{packed}", "--jobs", "-1"], "--jobs -1"),
        (["frobnicate"], "frobnicate"),
        (["pack", "{source}", "{source}/config.json/x"], "cannot be created"),
        (["pack", "~nobody-here/model", "{tmp}/x"], "does not exist"),
        (["inspect", "~nobody-here/model"], "not a folder"),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(
    arguments: list[str],
    message: str,
    tiny_source: Path,
    tiny_packed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.format(source=tiny_source, packed=tiny_packed, tmp=tmp_path) for a in arguments]
    code, out, err = _run(capsys, *filled)
    assert (code, out) == (2, "")
    _assert_one_clear_error(err)
    assert message in err
    assert not (tmp_path / "x").exists()


def test_interrupted_pack_tells_how_to_go_on(
    tiny_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipmoe.store.record_shard import RecordShardWriter

    append = RecordShardWriter.append
    calls = 0

    def append_then_interrupt(self: RecordShardWriter, data: object) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return append(self, data)  # type: ignore[arg-type]

    monkeypatch.setattr(RecordShardWriter, "append", append_then_interrupt)
    code, out, err = _run(capsys, "pack", tiny_source, tmp_path / "packed")
    assert (code, out) == (130, "")
    assert err == "error: interrupted\nhint: run the same command again and it continues where it was\n"
    code, _, err = _run(capsys, "inspect", tmp_path / "packed")
    assert code == 2
    assert "interrupted pack" in err
    monkeypatch.undo()
    code, _, _ = _run(capsys, "pack", tiny_source, tmp_path / "packed")
    assert code == 0


def test_every_interrupted_command_says_so(
    tiny_packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from zipmoe.store.packed_folder import PackedFolder

    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PackedFolder, "open", interrupt)
    for arguments in (["inspect", tiny_packed], ["verify", tiny_packed], ["run", tiny_packed, "--prompt-ids", "1"]):
        assert _run(capsys, *arguments) == (130, "", "error: interrupted\n")


def test_help_lists_every_command_and_needs_no_torch() -> None:
    script = "import sys; from zipmoe.cli.main import main; main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for command in ("pack", "inspect", "verify", "profile", "run"):
        assert re.search(rf"^\s+{command}\s", done.stdout, re.MULTILINE)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from zipmoe._version import __version__

    assert _run(capsys, "--version") == (0, f"zipmoe {__version__}\n", "")


def test_numbers_of_inspect_add_up(tiny_packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json.loads(_run(capsys, "inspect", tiny_packed, "--json")[1])
    parts = summary["layers"] + summary["dense"]
    unpacked = sum(reason["bytes"] for reason in summary["unpacked"])
    before = sum(part["bytes_before"] for part in parts) + unpacked + summary["ignored_source_bytes"]
    after = sum(part["bytes_after"] for part in parts) + unpacked + summary["header_bytes"]
    assert (before, after) == (summary["source_bytes"], summary["folder_bytes"])
    assert summary["ignored_source_bytes"] == 0
    assert summary["header_bytes"] > 0


def test_missing_side_file_is_called_missing(
    tiny_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(tiny_packed, tmp_path / "copy"))
    (copy / "notes.txt").unlink()
    code, _, err = _run(capsys, "verify", copy)
    assert code == 0
    assert "notes.txt is missing" in err


def test_errors_of_the_system_are_one_line(
    tiny_source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, "pack", tiny_source, tmp_path / ("x" * 300))
    assert (code, out) == (1, "")
    _assert_one_clear_error(err)
    assert "File name too long" in err
