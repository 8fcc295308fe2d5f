"""``zipmoe run``: the text and the tokens are those of plain Transformers; bad input is one clear line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zipmoe.cli.main import main

PROMPT = "once upon a time there was a cat"


def _run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["run", *(str(a) for a in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def expected(talking_source: Path) -> tuple[list[int], str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(talking_source)
    tokenizer = AutoTokenizer.from_pretrained(talking_source)
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None
        )
    new = out[0, ids.shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--exact"],
        ["--exact", "--combine", "eager"],
        ["--pools", "F=1,C=2"],
        ["--io", "buffered"],
        ["--look-ahead"],
    ],
    ids=["default", "exact", "eager", "pools", "buffered", "look-ahead"],
)
def test_tokens_and_text_of_plain_transformers(
    talking_packed: Path, expected: tuple[list[int], str], options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    common = [talking_packed, "--memory", "8GB", "--prompt", PROMPT, "--max-new-tokens", 12, "--ignore-eos", *options]
    code, out, err = _run(capsys, *common, "--json")
    assert code == 0, err
    result = json.loads(out)
    if "eager" not in options:
        assert (result["tokens"], result["text"]) == expected
    assert len(result["tokens"]) == 12
    assert result["prompt_tokens"] == len(PROMPT.split())
    statistics = result["statistics"]
    assert statistics["tokens"] == 12
    assert statistics["ttft_seconds"] > 0
    assert statistics["hits"] + statistics["misses"] > 0
    for piece in (
        "mode exact",  # of the option, or of the environment that the tests set
        "codec fx3",
        "budget 8.00 GB",
        "reads",
        "pool",
        *(["buffered reads"] if "--io" in options else []),
    ):
        assert piece in result["mode"]
    assert result["mode"] in err  # the mode line is the first thing that a person sees
    code, out, err = _run(capsys, *common)
    assert code == 0
    if "eager" not in options:
        assert out.strip() == expected[1].strip()
    assert re.search(r"TTFT .* TPOT .* hit rate .* per token.* peak memory", err)


def test_fast_is_the_default(talking_packed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("ZIPMOE_MODE")
    arguments = [talking_packed, "--memory", "8GB", "--prompt", PROMPT, "--max-new-tokens", 3, "--ignore-eos", "--json"]
    code, out, _ = _run(capsys, *arguments)
    result = json.loads(out)
    assert (code, len(result["tokens"])) == (0, 3)
    assert "mode fast (fused kernels" in result["mode"]
    assert result["statistics"]["compute_seconds"] > 0


def test_prompt_ids_chat_and_sampling(talking_packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [talking_packed, "--memory", "8GB", "--max-new-tokens", 6, "--ignore-eos", "--json"]
    code, out, _ = _run(capsys, *common, "--prompt-ids", "5, 6 7")
    assert (code, json.loads(out)["prompt_tokens"], json.loads(out)["text"]) == (0, 3, None)
    code, out, _ = _run(capsys, *common, "--prompt", "a dog", "--chat")
    assert (code, json.loads(out)["prompt_tokens"]) == (0, 4)  # "there was a dog"
    sampled = []
    for seed in (1, 1, 2):
        code, out, _ = _run(capsys, *common, "--prompt", PROMPT, "--temperature", 5.0, "--seed", seed)
        assert code == 0
        sampled.append(json.loads(out)["tokens"])
    assert sampled[0] == sampled[1]
    assert sampled[0] != sampled[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "4 apples", "--prompt", "a"], "4 apples"),
        (["--memory", "-1GB", "--prompt", "a"], "-1GB"),
        (["--memory", "1MB", "--prompt", "a"], "floor of"),
        (["--memory", "100000GB", "--prompt", "a"], "was asked for"),
        (["--memory", "8GB"], "--prompt or --prompt-ids"),
        (["--memory", "8GB", "--prompt", "a", "--prompt-ids", "1"], "--prompt or --prompt-ids"),
        (["--memory", "8GB", "--prompt", ""], "prompt is empty"),
        (["--memory", "8GB", "--prompt-ids", "1,x"], "not a list of numbers"),
        (["--memory", "8GB", "--prompt-ids", "9999"], "vocabulary"),
        (["--memory", "8GB", "--prompt-ids", "-1"], "vocabulary"),
        (["--memory", "8GB", "--prompt-ids", "9" * 20], "vocabulary"),
        (["--memory", "8GB", "--prompt", "a\udcff"], "not valid UTF-8"),
        (["--memory", "8GB", "--prompt", "a", "--temperature", "1", "--seed", "9" * 20], "--seed"),
        (["--memory", "8GB", "--prompt", "a", "--seed", "1"], "greedy"),
        (["--memory", "8GB", "--prompt", "a", "--top-p", "0.5"], "greedy"),
        (["--memory", "8GB", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["--memory", "8GB", "--prompt", "a", "--temperature", "1e-40"], "temperature"),
        (["--memory", "8GB", "--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--memory", "8GB", "--prompt", "a", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["--memory", "8GB", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["--memory", "8GB", "--prompt", "a", "--combine", "alphabetical"], "alphabetical"),
        (["--memory", "8GB", "--prompt", "a", "--io", "mapped"], "--io 'mapped' is unknown"),
        (["--memory", "8GB", "--prompt", "a", "--io-backend", "pigeon"], "io_backend must be one of auto"),
        (["--memory", "8GB", "--prompt", "a", "--pools", "C=all"], "'C=all' does not say"),
        (["--memory", "8GB", "--prompt", "a", "--pools", "C=1,S=1"], "records have no parts"),
        (["--memory", "8GB", "--prompt", "a", "--policy", "oracle"], "policy must be one of auto, zipmoe, lru"),
        (["--memory", "8GB", "--prompt", "a", "--half-life", "0"], "above 0 steps"),
        (["--memory", "8GB", "--prompt", "a", "--policy", "lru", "--half-life", "8"], "'lru' has no half-life"),
    ],
)
def test_bad_input_exits_with_2_and_one_line(
    talking_packed: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, talking_packed, *options)
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if line and not line.startswith("zipmoe: ")]
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))


def test_end_of_text_ends_the_text_unless_it_is_ignored(
    talking_packed: Path, expected: tuple[list[int], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens, _ = expected
    copy = Path(shutil.copytree(talking_packed, tmp_path / "copy"))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": tokens[3], "pad_token_id": 0}))
    common = [copy, "--memory", "8GB", "--prompt", PROMPT, "--max-new-tokens", 12, "--json"]
    _, out, _ = _run(capsys, *common)
    assert json.loads(out)["tokens"] == tokens[: tokens.index(tokens[3]) + 1]
    _, out, _ = _run(capsys, *common, "--ignore-eos")
    assert json.loads(out)["tokens"] == tokens


def test_the_environment_chooses_the_mode_where_no_option_does(
    talking_packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [talking_packed, "--memory", "8GB", "--prompt", PROMPT, "--max-new-tokens", 1]
    monkeypatch.setenv("ZIPMOE_MODE", "exact")
    _, _, err = _run(capsys, *common)
    assert "mode exact" in err
    monkeypatch.setenv("ZIPMOE_MODE", "slow")
    code, _, err = _run(capsys, *common)
    assert code == 2
    assert "ZIPMOE_MODE must be one of fast, exact, not 'slow'" in err


def test_folder_that_is_not_packed(talking_source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _run(capsys, talking_source, "--prompt", "a")
    assert code == 2
    assert "not a packed model" in err
    assert "zipmoe pack" in err


def test_damage_is_met_as_a_named_error_and_no_token_follows(
    talking_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zipmoe.store.packed_folder import PackedFolder

    copy = Path(shutil.copytree(talking_packed, tmp_path / "copy"))
    folder = PackedFolder.open(copy)
    for group in folder.manifest.expert_groups:  # every expert of one layer, so that the first step meets one
        for record in group.records:
            data = bytearray((copy / record.file).read_bytes())
            data[record.offset + record.extents[0].length // 2] ^= 1
            (copy / record.file).write_bytes(data)
        break
    code, out, err = _run(capsys, copy, "--memory", "8GB", "--prompt", PROMPT)
    assert (code, out.strip()) == (1, "")
    assert "packed-00001" in err
    assert "zipmoe.model.layers.0.mlp.experts." in err


def test_recorded_trace_is_the_routing_of_plain_transformers(
    talking_source: Path, talking_packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    from zipmoe.planning.trace import read_trace

    path = tmp_path / "routing.jsonl"
    options = ["--memory", "8GB", "--prompt-ids", "5 6 7 8", "--max-new-tokens", 4, "--ignore-eos", "--json"]
    code, out, err = _run(capsys, talking_packed, *options, "--record-trace", path)
    assert code == 0, err
    trace = read_trace(path)
    assert (trace.header.experts, trace.header.top_k) == ((6, 6), 3)
    assert [step.tokens for step in trace.steps] == [4, 1, 1, 1]

    model = AutoModelForCausalLM.from_pretrained(talking_source)
    ids = torch.tensor([[5, 6, 7, 8, *json.loads(out)["tokens"]]])
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, output: chosen.append(output[2]))
    with torch.inference_mode():
        model(ids[:, :4])
    assert [layer for layer in trace.steps[0].layers] == [tuple(sorted(set(c.flatten().tolist()))) for c in chosen]

    code, _, err = _run(capsys, talking_packed, *options, "--record-trace", path)
    assert code == 2
    assert "exists already" in err


def test_a_full_disk_ends_the_recording_with_one_line(
    talking_packed: Path, tmp_path: Path, full_disk: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "routing.jsonl"
    full_disk(path)
    options = ["--memory", "8GB", "--prompt-ids", "5 6 7 8", "--max-new-tokens", 4, "--ignore-eos"]
    code, _, err = _run(capsys, talking_packed, *options, "--record-trace", path)
    assert code == 2
    *_, error, hint = err.splitlines()
    assert error == f"error: {str(path)!r} cannot be written: the disk is full; nothing of it was left there"
    assert hint == "hint: free some space, or choose another place"
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_opened_and_checked_once(
    talking_packed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from zipmoe.store.packed_folder import PackedFolder

    opened = []
    check = PackedFolder._check_files
    monkeypatch.setattr(PackedFolder, "_check_files", lambda self: (opened.append(self.path), check(self)))
    options = ["--memory", "8GB", "--prompt-ids", "5 6 7 8", "--max-new-tokens", 2, "--json"]
    code, _, err = _run(capsys, talking_packed, *options)
    assert code == 0, err
    assert opened == [talking_packed]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--cpus", "5000", "cpus 5000: CPU 5000 is not among those that this process may use"),
        ("--cpus", "some", "cpus 'some' is not a list of CPUs"),
        ("--io-threads", 0, "io_threads must be at least 1"),
        ("--io-depth", 4, "io_depth is of the backend uring"),
    ],
)
def test_threads_and_reads_that_cannot_be(
    talking_packed: Path, option: str, value: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = _run(capsys, talking_packed, "--memory", "8GB", "--prompt", "a", option, value)
    assert (code, out) == (2, "")
    error, *hints = err.splitlines()
    assert error.startswith(f"error: {message}")
    assert all(line.startswith("hint: ") for line in hints)
    assert len(hints) <= 1


def test_the_policy_is_chosen_by_name_and_changes_no_token(
    talking_packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--memory", "8GB", "--prompt-ids", "5 6 7 8", "--max-new-tokens", 4, "--ignore-eos", "--json"]
    outputs = []
    for policy, pools in ((None, None), ("fifo", None), ("marking", "F=1,C=2"), ("zipmoe", "C=1")):
        chosen = ["--policy", policy] if policy else []
        chosen += ["--half-life", 8] if policy == "zipmoe" else []
        code, out, err = _run(capsys, talking_packed, *options, *chosen, *(["--pools", pools] if pools else []))
        assert code == 0, err
        value = json.loads(out)
        assert f"; policy {policy or 'auto, now zipmoe with a half-life of 16 steps'}" in value["mode"]
        assert value["statistics"]["policy"].startswith(policy or "zipmoe with a half-life of 16 steps")
        assert value["statistics"]["policy_changes"] == 0
        outputs.append(value["tokens"])
    assert outputs == [outputs[0]] * 4
