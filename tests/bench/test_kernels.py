"""Kernel benchmarks: what is computed from times, what is measured at all, and what people read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from zipmoe import _native
from zipmoe.bench.kernels.decode_rates import DecodeRates, measure_decoding
from zipmoe.bench.kernels.kernel_plot import plot_kernels
from zipmoe.bench.kernels.kernel_result import KernelPlan, KernelResult, run_kernels
from zipmoe.bench.kernels.kernel_tables import kernel_markdown, kernel_tables
from zipmoe.bench.kernels.product_methods import Form, Method, calls, default_tokens, inputs, instruction_sets, methods
from zipmoe.bench.kernels.product_rates import ProductRates, ProductTimes, measure_shape
from zipmoe.bench.kernels.rotating_weights import lay_out, memory_bytes
from zipmoe.cli.main import main
from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.errors import InvalidArgumentError
from zipmoe.profiling.touched_memory import TouchedMemory

SHAPE = (64, 128)


def _rates(threads: int = 1, tokens: int = 1, scale: float = 1.0) -> ProductRates:
    """Three rounds on a machine that is twice as slow in the second one."""
    rounds = [scale, 2 * scale, scale]
    times = [
        ProductTimes(Method(Form.FUSED, "avx2"), 700.0, [1.0 * r for r in rounds]),
        ProductTimes(Method(Form.RAW, "avx2"), 1000.0, [1.5 * r for r in rounds]),
        ProductTimes(Method(Form.TORCH), 1000.0, [3.0 * r for r in rounds]),
    ]
    return ProductRates(20, 25, tokens, threads, 4, times, [1000.0 / r for r in rounds])


def test_ratios_are_taken_within_a_round() -> None:
    rates = _rates()
    fused, raw, others = rates.times
    assert (fused.median_seconds, fused.bytes_per_second) == (1.0, 700.0)
    assert (fused.faster_than(raw), fused.faster_than(others)) == (1.5, 3.0)
    # 700 bytes at 1000 bytes/s are 0.7 s, in the slow round 1.4 s
    assert rates.achieved_over_floor(fused) == pytest.approx(1 / 0.7)
    assert rates.achieved_over_floor(raw) == 1.5
    rates.read_bytes_per_second = [600.0, 300.0, 600.0]  # a slow loop: raw weights came faster than it reads
    assert rates.memory_bytes_per_second == pytest.approx([700.0, 350.0, 700.0])
    assert rates.achieved_over_floor(fused) == pytest.approx(1.0)
    assert rates.of(Form.RAW, "avx2") is raw
    assert rates.of(Form.RAW, "scalar") is None


@pytest.fixture
def result() -> KernelResult:
    plan = KernelPlan(((20, 25),), (1,), 1, 3, 2)
    decoding = DecodeRates(
        "fx3", CodecSettings("fx3", None, 1), 2_000_000_000, 1_400_000_000, {"avx2": [1.0, 4.0, 2.0]}, 2, [0.5, 0.5, 1]
    )
    return KernelResult(plan, ("avx2",), (_rates(), _rates(2, scale=0.5)), (decoding,), 0.25)


def test_tables(result: KernelResult) -> None:
    summary, products, decoding = kernel_tables(result)
    assert summary.rows[0] == ("1", "1", "avx2", "1.50", "3.00", "1.43", "1.50")
    assert [row[:4] for row in products.rows] == [("20 x 25", "1", "1", "avx2"), ("20 x 25", "1", "2", "avx2")]
    assert products.rows[0][4:7] == ("1000000 (0.0)", "1500000 (0.0)", "3000000 (0.0)")
    assert decoding.headings == ("codec", "size / BF16", "avx2, one core", "best, 2 cores")
    assert decoding.rows == (("fx3", "0.7000", "1.00", "4.00"),)
    text = kernel_markdown(result)
    assert text.startswith("# zipmoe bench --kernels\n")
    assert "memory    gave 0.0 (one core), 0.0 (2 cores) GB/s" in text
    assert "kept 0.2 cores busy" in text
    assert result.memory_bytes_per_second(2) == 2000.0


def test_json_has_every_round_and_the_ratios(result: KernelResult) -> None:
    raw = json.loads(json.dumps(result.to_json()))
    fused, _, others = raw["products"][0]["methods"]
    assert fused["seconds"] == [1.0, 2.0, 1.0]
    assert (fused["faster_than_raw"], fused["faster_than_torch"]) == (1.5, 3.0)
    assert others["faster_than_raw"] is None  # torch has no raw product on an instruction set of its own
    assert others["achieved_over_floor"] == 3.0
    assert raw["decoding"][0]["one_core_bytes_per_second"] == {"avx2": 1e9}
    assert raw["settings"]["shapes"] == [[20, 25]]


def test_methods_are_those_that_take_so_many_tokens() -> None:
    names = ("avx2", "scalar")
    few = methods(1, names)
    assert [method.label for method in few] == ["fused avx2", "raw avx2", "fused scalar", "raw scalar", "torch"]
    assert set(range(1, _native.GEMV_TOKENS_MAX + 1)) <= set(default_tokens())
    many = methods(10**4, names)  # what the native core has no product for is left out, torch never is
    assert many[-1] == Method(Form.TORCH)
    assert (Method(Form.RAW, "avx2") in many) == Method(Form.RAW, "avx2").takes(10**4)
    assert set(instruction_sets()) <= set(_native.instruction_sets())
    assert instruction_sets()[0] == _native.gemv_instruction_set()


def test_all_methods_compute_the_same_product() -> None:
    memory = TouchedMemory(memory_bytes([SHAPE], 1))
    weights = lay_out(*SHAPE, 1, memory)
    assert len(weights.raw) == len(weights.sections) == -(-1_000_000 // (2 * 64 * 128))
    assert weights.bfloat16_bytes == 2 * 64 * 128
    assert 0 < weights.packed_bytes < weights.bfloat16_bytes
    tokens = 2
    threads = _native.ComputeThreads(1)
    found = calls(weights, methods(tokens, instruction_sets()), tokens, threads)
    x = torch.from_numpy(inputs(tokens, SHAPE[1]).view(np.int16)).view(torch.bfloat16)
    product = found[Method(Form.TORCH)](3)
    assert isinstance(product, torch.Tensor)
    torch.testing.assert_close(product, torch.nn.functional.linear(x, weights.tensors[3]))
    assert not torch.equal(product, torch.nn.functional.linear(x, weights.tensors[2]))


def test_products_that_disagree_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = lay_out(*SHAPE, 1, TouchedMemory(memory_bytes([SHAPE], 1)))
    weights.raw[0][0, 0] ^= 0x4000
    with pytest.raises(ArithmeticError, match="raw"):
        calls(weights, methods(1, instruction_sets()), 1, _native.ComputeThreads(1))


def test_a_slow_method_goes_on_where_it_stopped() -> None:
    """Every reading of the clock is a second after the last: passes are as short as they can be."""
    memory = TouchedMemory(memory_bytes([SHAPE], 1))
    weights = lay_out(*SHAPE, 1, memory)
    now = iter(range(10**6))
    rates = measure_shape(
        weights,
        np.ones(1 << 20, np.uint8),
        tokens=(1, 3),
        thread_counts=(1,),
        names=("scalar",),
        rounds=2,
        clock=lambda: float(next(now)),
    )
    assert [(each.tokens, each.threads, len(each.read_bytes_per_second)) for each in rates] == [(1, 1, 2), (3, 1, 2)]
    assert all(times.seconds == [1.0, 1.0] for each in rates for times in each.times)  # one product a pass


def test_every_codec_decodes_on_every_instruction_set() -> None:
    names = _native.instruction_sets()
    found = measure_decoding(names, 1, 2, shape=SHAPE, matrices=2)
    available = {codec.name for codec in _native.codecs() if not codec.unavailable_reason}
    assert {rates.settings.name for rates in found} == available
    for rates in found:
        assert set(rates.one_core_seconds) == set(names)
        assert all(len(seconds) == 2 for seconds in rates.one_core_seconds.values())
        assert rates.bfloat16_bytes == 2 * 2 * 64 * 128
        assert rates.all_cores_bytes_per_second > 0
    assert len({rates.key for rates in found}) == len(found)


def test_the_command_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--json", str(tmp_path / "k.json"), "--markdown", str(tmp_path / "k.md")]
    small = ["--shapes", "64x128", "--tokens", "1", "--megabytes", "1", "--rounds", "1", "--threads", "1"]
    assert main(["bench", "--kernels", *small, *files]) == 0
    raw = json.loads((tmp_path / "k.json").read_text())
    labels = {(method["form"], method["instruction_set"]) for method in raw["products"][0]["methods"]}
    assert labels == {("torch", "")} | {(form, name) for form in ("fused", "raw") for name in instruction_sets()}
    assert raw["decoding"]
    assert "Decoding: GB/s of BF16" in capsys.readouterr().out
    assert "## Products: medians over the shapes" in (tmp_path / "k.md").read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--shapes", "64"],
        ["--shapes", "0x64"],
        ["--tokens", "one"],
        ["--tokens", "0"],
        ["--megabytes", "0"],
        ["--rounds", "0"],
        ["folder"],
    ],
)
def test_wrong_options_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--kernels", *wrong]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "ignored",
    [
        ["--memory", "4GB"],
        ["--source", "nowhere"],
        ["--batch", "1"],  # the default, but somebody asked for it
        ["--python", "llama.cpp=python"],
        ["--no-limit"],
        ["--topic", "3", "--prompts", "2"],
    ],
)
def test_options_of_the_comparison_are_refused_with_kernels(
    ignored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--kernels", *ignored]) == 2
    message = capsys.readouterr().err.splitlines()[0]
    assert all(option in message.split(": ")[1] for option in ignored if option.startswith("--"))
    assert message.endswith("of the comparison of engines, not of --kernels")


@pytest.mark.parametrize(
    "ignored",
    [["--shapes", "64x128"], ["--tokens", "1"], ["--megabytes", "420"], ["--tokens", "1", "--megabytes", "9"]],
)
def test_options_of_the_kernels_are_refused_without_them(
    ignored: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "folder", *ignored]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith(f"error: {', '.join(option for option in ignored if option.startswith('--'))}: ")
    assert error.endswith(" of --kernels") and hint.endswith("or add --kernels")


def test_without_kernels_a_folder_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert "no packed folder" in capsys.readouterr().err


def test_a_plan_checks_itself() -> None:
    with pytest.raises(InvalidArgumentError, match="--threads 0"):
        KernelPlan(threads=0)
    assert KernelPlan().megabytes >= 400


def test_codecs_can_be_left_out() -> None:
    found = run_kernels(KernelPlan((SHAPE,), (1,), 1, 1, 1, codecs=False))
    assert found.decoding == ()
    assert len(kernel_tables(found)) == 2


def test_the_plot(result: KernelResult, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_kernels(result, tmp_path / "k.png")
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
