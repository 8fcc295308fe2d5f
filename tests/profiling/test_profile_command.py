"""``zipmoe profile`` as a person meets it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from zipmoe.cli.main import main
from zipmoe.planning.device import DeviceProfile
from zipmoe.profiling.profile_store import find_profile, report_path
from zipmoe.store.packed_folder import PackedFolder


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_tables_and_the_kept_profile(zstd_packed: Path, cache_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = _run(capsys, "profile", zstd_packed, "--seconds", 3)
    assert code == 0
    for text in (
        "disk, buffered reads, GB/s by block and number of reads at a time",
        "(a record)",
        "latency of one 4 KiB read, µs",
        "rho of this folder: gate_up_proj 0.",
        "zstd huf (folder)",
        "recombination, GB/s of BF16",
        "memory, GB/s by cores: read",
        "execution of one expert (p)",
    ):
        assert text in out
    assert "…" not in out
    (line,) = err.strip().splitlines()
    assert line.startswith(f"profile written to {cache_folder}/zipmoe/profiles/")
    said: list[str] = []
    profile = find_profile(PackedFolder.open(zstd_packed), report=said.append)
    assert profile is not None
    assert said == []
    assert "zstd" in profile.decompress_bytes_per_second


def test_json_and_output(zstd_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new/mine.json"
    code, out, err = _run(capsys, "profile", zstd_packed, "--seconds", 3, "--json", "--output", target)
    assert code == 0
    report = json.loads(out)
    assert report == json.loads(report_path(target).read_text())
    profile = DeviceProfile.load(target)
    assert profile.measured_at.isoformat() == report["provenance"]["measured_at"]
    assert str(target) in err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{source}"], "not a packed model"),
        (["/nowhere"], "not a folder"),
        (["{packed}", "--seconds", "0"], "0 seconds cannot be measured for"),
        (["{packed}", "--seconds", "soon"], "valid number"),
        (["{packed}", "--output", "{packed}/profile.json"], "nothing is written"),
        (["{packed}", "--output", "{tmp}"], "is a folder"),
        (["{packed}", "--fast"], "--fast"),
        ([], "DST"),
    ],
)
def test_refusals_are_one_line_and_exit_with_2(
    arguments: list[str],
    message: str,
    tiny_source: Path,
    zstd_packed: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [a.format(source=tiny_source, packed=zstd_packed, tmp=tmp_path) for a in arguments]
    code, out, err = _run(capsys, "profile", *filled)
    assert (code, out) == (2, "")
    lines = err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) == 2
    assert lines[1].startswith("hint: ")


def test_damage_exits_with_1(zstd_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(zstd_packed, tmp_path / "copy"))
    record = PackedFolder.open(copy).manifest.expert_groups[0].records[0]
    data = bytearray((copy / record.file).read_bytes())
    data[record.offset + 64] ^= 8
    (copy / record.file).write_bytes(data)
    code, out, err = _run(capsys, "profile", copy, "--seconds", 1)
    assert (code, out) == (1, "")
    assert record.name in err.splitlines()[0]
    assert "is damaged" in err.splitlines()[0]
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_may_not_be_read(
    zstd_packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path | str) -> PackedFolder:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(PackedFolder, "open", refuse)
    code, out, err = _run(capsys, "profile", zstd_packed)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"error: cannot read {str(zstd_packed)!r}: Permission denied",
        "hint: check the permissions of the folder",
    ]
