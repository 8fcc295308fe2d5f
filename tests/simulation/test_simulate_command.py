"""``zipmoe simulate`` as a person meets it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from small_traces import trace_of

from zipmoe import _native
from zipmoe.cli.main import main
from zipmoe.planning.device import host_fingerprint
from zipmoe.planning.trace import RoutingTrace, TraceHeader, write_trace
from zipmoe.profiling.profile_store import REPORT_SUFFIX, profiles_folder
from zipmoe.simulation.device_choice import load_device, preset_names, preset_sources, this_machine_profile_path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance = random.Random(5)
    steps = [[sorted(chance.sample(range(6 + 10 * (n % 2)), 4)) for _ in range(2)] for n in range(60)]
    made = trace_of(steps, experts=16, top_k=4)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write_trace(path, RoutingTrace(TraceHeader("OLMoE-1B-7B-0924", made.header.experts, 4), made.steps))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["simulate", *(str(a) for a in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_holds_every_policy(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--trace", trace, "--device", "jetson-orin", "--policy", "all", "--json")
    code, out, err = run(capsys, *arguments)
    assert code == 0
    value = json.loads(out)
    assert [report["policy"] for report in value["policies"]] == ["auto", *_native.cache_policies()]
    assert value["planned"] is True
    assert value["warm_up_steps"] == 30
    assert value["policies"][0]["chosen_policy"].startswith(("zipmoe", "l"))
    assert all(report["chosen_policy"] is None for report in value["policies"][1:])
    for report in value["policies"]:
        assert sum(report["hit_rates"].values()) == pytest.approx(1)
        assert report["hit_rate"] <= value["optimal_hit_rate"] + 1e-12
        assert report["seconds_per_token"] > 0
    assert "planned from the warm-up" in err
    assert run(capsys, *arguments)[1] == out


def test_table_and_plans(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--trace", trace, "--device", "jetson-orin", "--slots", "1,2,0,4", "--policy", "lru")
    assert code == 0
    assert "as asked: F 1 + C 2 + E 4 of 16 experts" in err
    for text in ("policy", "ms/token", "lru", "Belady"):
        assert text in out
    code, _, err = run(
        capsys, "--trace", trace, "--device", "jetson-orin", "--codec", "fx3", "--memory-share", "0.3", "--workers", 2
    )
    assert code == 0
    assert "2 workers; fx3; cache_affinity" in err
    code, _, err = run(capsys, "--trace", trace, "--device", "jetson-orin", "--pools", "C", "--memory-share", "0.25")
    assert "as asked: C 5 of 16 experts" in err


def test_a_half_life_is_that_of_the_policy_that_has_one(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def reports(*options: object) -> dict[str, dict[str, object]]:
        code, out, err = run(
            capsys, "--trace", trace, "--device", "jetson-orin", "--slots", "1,2,0,2", "--json", *options
        )
        assert code == 0, err
        return {report["policy"]: report for report in json.loads(out)["policies"]}

    alone = reports("--half-life", "0.5")
    assert list(alone) == ["zipmoe"]
    assert reports("--half-life", "0.5", "--policy", "zipmoe") == alone
    assert alone["zipmoe"] != reports("--policy", "zipmoe")["zipmoe"]
    assert reports("--half-life", "16", "--policy", "zipmoe") == reports("--policy", "zipmoe")
    beside, without = reports("--half-life", "0.5", "--policy", "all"), reports("--policy", "all")
    assert beside["zipmoe"] == alone["zipmoe"]
    assert {name for name in beside if beside[name] != without[name]} == {"zipmoe"}
    assert list(reports()) == ["auto"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "oracle"), "policy must be one of auto, zipmoe, lru, lfu, lfuda, fifo, marking, not 'oracle'"),
        (("--policy", ","), "--policy is empty"),
        (("--slots", "3,a"), "--slots '3,a' is not a plan"),
        (("--slots", "17"), "more slots than the 16 experts"),
        (("--slots", "3", "--pools", "C"), "--slots is a whole plan"),
        (("--memory-share", "2"), "memory share of 2 is out of range"),
        (("--pools", "Q"), "'Q' is not a set of pools"),
        (("--codec", "fx3", "--pools", "S"), "the codec has F, C"),
        (("--codec", "rot13"), "codec 'rot13' does not exist"),
        (("--device", "toaster"), "device 'toaster' is neither a preset nor a file"),
        (("--device", "this"), "this machine has no device profile"),
        (("--warm-up", "1"), "a warm-up of 1 is not a share"),
        (("--warm-up", "0"), "nothing to plan from"),
        (("--shards", "0"), "0 shards"),
        (("--workers", "0"), "--workers 0"),
        (("--half-life", "0"), "half-life of activation counts must be above 0 steps"),
        (("--half-life", "0", "--policy", "all"), "half-life of activation counts must be above 0 steps"),
        (("--half-life", "4", "--policy", "auto"), "the policy 'auto' has no half-life of its own"),
        (("--half-life", "4", "--policy", "lru,fifo"), "the policy 'lru' has no half-life"),
        (("--tolerance", "-1"), "tolerance of -1"),
        (("--order", "best"), "--order 'best' is unknown"),
        (("--other-seconds", "-1"), "--other-seconds -1"),
        (("--expert-shape", "3x4x5"), "--expert-shape '3x4x5'"),
        (("--trace", "nowhere.jsonl"), "there is no trace 'nowhere.jsonl'"),
    ],
)
def test_errors_are_one_line_and_a_hint(
    trace: Path,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = run(capsys, "--trace", trace, "--device", "jetson-orin", *arguments)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith(("OLMoE", "as asked"))]
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))


def test_unknown_models_need_the_shape_of_an_expert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, trace_of([[[0]], [[1]]] * 4, experts=3, top_k=1))
    code, _, err = run(capsys, "--trace", path, "--device", "jetson-orin", "--slots", 1)
    assert code == 2
    assert "experts of 'small' are not known" in err
    assert "--expert-shape" in err
    assert (
        run(capsys, "--trace", path, "--device", "jetson-orin", "--slots", 1, "--expert-shape", "64x32,32x64")[0] == 0
    )


def test_devices_by_preset_by_file_and_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in preset_names():
        device = load_device(name)
        assert device.name == name
        told = set(preset_sources(name))
        assert told == set(device.__dataclass_fields__) - {"name"}  # every number says where it is from
    device = load_device("jetson-orin")
    assert (device.workers, device.host.cores, device.read_seconds(35_000_000)) == (6, 12, 0.01)
    device.save(tmp_path / "other.json")
    assert load_device(str(tmp_path / "other.json")) == device
    assert this_machine_profile_path() is None
    profiles_folder().mkdir(parents=True)
    device.save(profiles_folder() / "000000000000-11111111-22222222.json")  # of another machine
    assert this_machine_profile_path() is None
    own = profiles_folder() / f"{host_fingerprint().digest}-11111111-22222222.json"
    device.save(own)
    own.with_name(own.name.replace(".json", REPORT_SUFFIX)).write_text("{}")
    assert this_machine_profile_path() == own
    assert load_device("this") == device
