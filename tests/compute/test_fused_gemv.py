"""y = W x on packed and raw weights: every kernel gives the bits of the NumPy reference, whatever the values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from zipmoe import _native
from zipmoe.codecs import fx3, fx3_gemv

SETS = _native.instruction_sets()
SPECIAL = np.array(
    [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x8080, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x7F7F, 0xFF7F], np.uint16
)


def gaussian(rows: int, columns: int, seed: int, deviation: float = 0.02) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal((rows, columns), dtype=np.float32) * np.float32(deviation)
    return fx3_gemv.round_to_bfloat16(values)


def random_words(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, (rows, columns), dtype=np.uint16)


def near(rows: int, columns: int, seed: int, exponents: tuple[int, int]) -> np.ndarray:
    """Patterns of both signs and any mantissa whose exponent field is in a half-open range."""
    random = np.random.default_rng(seed)
    exponent = random.integers(*exponents, (rows, columns)).astype(np.uint16) << 7
    return (random_words(rows, columns, seed + 1) & 0x807F) | exponent


def sprinkled(words: np.ndarray, seed: int, share: float) -> np.ndarray:
    random = np.random.default_rng(seed)
    chosen = random.random(words.shape) < share
    return np.where(chosen, random.choice(SPECIAL, words.shape), words)


@dataclass(frozen=True)
class Case:
    weights: np.ndarray
    x: np.ndarray


def ordinary(rows: int, columns: int, tokens: int) -> Case:
    return Case(gaussian(rows, columns, seed=rows + columns), gaussian(tokens, columns, seed=tokens, deviation=1.5))


SHAPES = [(1, 1), (1, 300), (40, 1), (3, 65), (4, 64), (5, 4097), (6, 64 * 67 - 5), (130, 1000), (18, 8256)]
TOKENS = (1, 2, 3, 4, 5, 6, 7, 9, 16, 23)
CASES = {f"{n}x{k}, {t} tokens": ordinary(n, k, t) for n, k in SHAPES for t in TOKENS} | {
    "more tokens than a task multiplies at once": ordinary(21, 330, 101),
    "real shape": ordinary(704, 2048, 3),
    "random words": Case(random_words(33, 700, 1), random_words(3, 700, 2)),
    "special weights": Case(sprinkled(gaussian(40, 900, 3), 4, 0.001), gaussian(3, 900, 5)),
    "special inputs": Case(gaussian(40, 900, 6), sprinkled(gaussian(3, 900, 7), 8, 0.001)),
    "denormal weights": Case(near(40, 900, 9, (0, 3)), near(3, 900, 10, (120, 250))),
    "denormal inputs": Case(near(40, 900, 11, (120, 250)), near(3, 900, 12, (0, 3))),
    "tiny products": Case(near(40, 900, 13, (60, 66)), near(3, 900, 14, (60, 66))),
    "products around the smallest normal number": Case(near(40, 900, 15, (50, 64)), near(3, 900, 16, (58, 70))),
    "huge": Case(near(40, 900, 17, (186, 196)), near(3, 900, 18, (180, 190))),
    "infinite": Case(sprinkled(near(40, 100, 19, (250, 255)), 20, 0.02), near(3, 100, 21, (120, 130))),
    "cancelling": Case(
        np.tile(gaussian(9, 500, 22), 2) ^ np.repeat([0, 0x8000], 500).astype(np.uint16),
        np.tile(gaussian(2, 500, 23, 1.0), 2),
    ),
    "zeros of both signs": Case(random_words(9, 130, 24) & 0x8000, random_words(2, 130, 25) & 0x8000),
    "many escapes": Case(gaussian(64, 512, 26, 1.0) ^ (random_words(64, 512, 27) & 0x0380), gaussian(2, 512, 28, 1.0)),
}
OTHERS = {label for label, case in CASES.items() if "tokens" not in label and len(case.weights) < 100}
CASES |= {
    f"{label}, {count} rows of inputs": Case(CASES[label].weights, np.resize(CASES[label].x, (count, columns)))
    for label, columns in sorted((label, CASES[label].x.shape[1]) for label in OTHERS)
    for count in (5, 11, 23)
}
EXPECTED = {label: fx3_gemv.multiply(case.weights, case.x) for label, case in CASES.items()}


@pytest.fixture(scope="module")
def threads() -> _native.ComputeThreads:
    return _native.ComputeThreads(1)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def some_threads(request: pytest.FixtureRequest) -> Iterator[_native.ComputeThreads]:
    yield _native.ComputeThreads(request.param, 0 if request.param == 3 else 50)


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32) if values.dtype == np.float32 else values


def codes(weights: np.ndarray) -> np.ndarray:
    """The section with codes even where the encoder would prefer the weights as they are."""
    return fx3.encode(weights, raw_fallback=False)


def packed(
    section: np.ndarray,
    case: Case,
    threads: _native.ComputeThreads,
    instruction_set: str = "",
    dtype: type = np.float32,
) -> np.ndarray:
    out = np.full((len(case.x), len(case.weights)), 0x55, dtype)
    _native.fx3_gemv(section, *case.weights.shape, case.x, out, threads, instruction_set=instruction_set)
    return out


def raw(case: Case, threads: _native.ComputeThreads, instruction_set: str = "", dtype: type = np.float32) -> np.ndarray:
    out = np.full((len(case.x), len(case.weights)), 0x55, dtype)
    _native.bfloat16_gemv(case.weights, case.x, out, threads, instruction_set=instruction_set)
    return out


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("label", CASES)
def test_all_kernels_give_the_reference_s_bits(
    label: str, instruction_set: str, threads: _native.ComputeThreads
) -> None:
    case, expected = CASES[label], EXPECTED[label]
    assert np.array_equal(bits(packed(codes(case.weights), case, threads, instruction_set)), bits(expected))
    assert np.array_equal(bits(packed(fx3.encode(case.weights), case, threads, instruction_set)), bits(expected))
    assert np.array_equal(bits(raw(case, threads, instruction_set)), bits(expected))


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("label", ["random words", "special weights", "5x4097, 3 tokens", "tiny products", "huge"])
def test_rounding_to_bfloat16(label: str, instruction_set: str, threads: _native.ComputeThreads) -> None:
    case = CASES[label]
    expected = fx3_gemv.round_to_bfloat16(EXPECTED[label])
    assert np.array_equal(packed(codes(case.weights), case, threads, instruction_set, np.uint16), expected)
    assert np.array_equal(raw(case, threads, instruction_set, np.uint16), expected)
    values = torch.from_numpy(EXPECTED[label]).to(torch.bfloat16)
    finite = ~np.isnan(EXPECTED[label])
    assert np.array_equal(values.view(torch.uint16).numpy()[finite], expected[finite])


BORDERS = (5, 6, 7, 11, 13, 18, 19, 20, 21, 24, 25, 47, 48, 49, 95, 96, 97, 127, 128, 129, 191, 192, 193, 512, 513)
"""Around tiles (6), unpacking (20), turns (48), larger tasks (128), and prompts."""


@pytest.mark.parametrize("instruction_set", [name for name in SETS if name != "scalar"])
@pytest.mark.parametrize("columns", [300, 2048, 4160, 8256])
def test_borders_of_tiles_and_turns(columns: int, instruction_set: str, threads: _native.ComputeThreads) -> None:
    """Matrices of one, two and three panels; rows that fill no group of four."""
    case = ordinary(37, columns, max(BORDERS))
    expected = bits(fx3_gemv.multiply(case.weights, case.x))
    section = codes(case.weights)
    for tokens in BORDERS:
        part = Case(case.weights, case.x[:tokens])
        assert np.array_equal(bits(packed(section, part, threads, instruction_set)), expected[:tokens]), tokens
        assert np.array_equal(bits(raw(part, threads, instruction_set)), expected[:tokens]), tokens


@pytest.mark.parametrize("tokens", [2, 8, 60, 130])
def test_the_number_of_threads_does_not_matter(tokens: int, some_threads: _native.ComputeThreads) -> None:
    for rows, columns in ((1408, 2048), (1001, 4160), (5, 70)):
        case = ordinary(rows, columns, tokens)
        alone = _native.ComputeThreads(1)
        expected = bits(raw(case, alone))
        for _ in range(3):
            assert np.array_equal(bits(packed(codes(case.weights), case, some_threads)), expected)
            assert np.array_equal(bits(raw(case, some_threads)), expected)


@pytest.mark.parametrize("instruction_set", [name for name in SETS if name != "scalar"])
def test_a_row_of_inputs_has_its_result_whatever_others_there_are(
    instruction_set: str, threads: _native.ComputeThreads
) -> None:
    case = ordinary(130, 4800, 100)
    section = codes(case.weights)
    apart = np.concatenate([packed(section, Case(case.weights, x[None]), threads) for x in case.x])
    for begin, end in ((0, 100), (0, 49), (3, 51), (10, 16), (20, 24), (30, 37)):
        part = Case(case.weights, case.x[begin:end])
        assert np.array_equal(bits(packed(section, part, threads, instruction_set)), bits(apart[begin:end]))
        assert np.array_equal(bits(raw(part, threads, instruction_set)), bits(apart[begin:end]))


def test_the_caller_s_floating_point_environment_does_not_matter(threads: _native.ComputeThreads) -> None:
    label = "products around the smallest normal number"
    case = CASES[label]
    for flush in (True, False):
        torch.set_flush_denormal(flush)
        try:
            for instruction_set in SETS:
                found = packed(codes(case.weights), case, threads, instruction_set)
                assert np.array_equal(bits(found), bits(EXPECTED[label]))
        finally:
            torch.set_flush_denormal(False)


def test_the_environment_of_the_caller_is_left_alone(threads: _native.ComputeThreads) -> None:
    smallest = torch.tensor([2.0**-126])
    for instruction_set in SETS:
        packed(codes(CASES["3x65, 1 tokens"].weights), CASES["3x65, 1 tokens"], threads, instruction_set)
        assert (smallest * 0.5).item() == 2.0**-127


def test_a_bias_is_added_before_rounding(threads: _native.ComputeThreads) -> None:
    case = ordinary(37, 200, 3)
    bias = gaussian(1, 37, 40)[0]
    expected = fx3_gemv.multiply(case.weights, case.x) + fx3_gemv.to_float(bias)
    for dtype, rounded in ((np.float32, expected), (np.uint16, fx3_gemv.round_to_bfloat16(expected))):
        out = np.empty((3, 37), dtype)
        _native.fx3_gemv(codes(case.weights), 37, 200, case.x, out, threads, bias=bias)
        assert np.array_equal(bits(out), bits(rounded))


@pytest.mark.parametrize(("rows", "columns"), [(1408, 2048), (2048, 1408), (512, 8192)])
@pytest.mark.parametrize("tokens", [3, 16])
def test_the_error_is_no_larger_than_torch_s(
    tokens: int, rows: int, columns: int, threads: _native.ComputeThreads
) -> None:
    case = ordinary(rows, columns, tokens)
    exact = fx3_gemv.to_float(case.x).astype(np.float64) @ fx3_gemv.to_float(case.weights).astype(np.float64).T
    ours = fx3_gemv.to_float(packed(codes(case.weights), case, threads, dtype=np.uint16))
    weights, x = (torch.from_numpy(words).view(torch.bfloat16) for words in (case.weights, case.x))
    torch_s = torch.nn.functional.linear(x, weights).float().numpy()
    assert np.sqrt(np.mean((ours - exact) ** 2)) <= 1.001 * np.sqrt(np.mean((torch_s - exact) ** 2))
    sums = packed(codes(case.weights), case, threads)
    assert np.abs(sums - exact).max() < 2e-6 * np.sqrt(columns)


@pytest.mark.parametrize("tokens", [2, 4, 9, 50])
def test_damaged_records_stay_inside_the_section(tokens: int, threads: _native.ComputeThreads) -> None:
    case = ordinary(12, 4160, tokens)
    section = codes(case.weights)
    layout = fx3.Layout(12, 4160)
    section[fx3.HEADER.size : layout.exceptions_offset] = 0xFF  # every code an escape, every index beyond the end
    results = [packed(section, case, threads, instruction_set) for instruction_set in SETS]
    for result in results:
        assert result.shape == (tokens, 12)


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 11},
        {"columns": 199},
        {"section": np.zeros(10, np.uint8)},
        {"x": np.zeros((1, 201), np.uint16)},
        {"x": np.zeros((0, 200), np.uint16), "out": np.zeros((0, 12), np.float32)},
        {"out": np.zeros((1, 11), np.float32)},
        {"out": np.zeros((2, 12), np.float32)},
        {"out": np.zeros((1, 12), np.float64)},
        {"out": np.zeros((1, 12), np.int16)},
        {"bias": np.zeros(11, np.uint16)},
        {"instruction_set": "sse9"},
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, object], threads: _native.ComputeThreads) -> None:
    arguments: dict[str, object] = {
        "section": codes(gaussian(12, 200, 1)),
        "rows": 12,
        "columns": 200,
        "x": np.zeros((1, 200), np.uint16),
        "out": np.zeros((1, 12), np.float32),
        "threads": threads,
    }
    _native.fx3_gemv(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        _native.fx3_gemv(**(arguments | change))  # type: ignore[arg-type]


def test_read_only_or_strided_output_is_refused(threads: _native.ComputeThreads) -> None:
    section = codes(gaussian(12, 200, 1))
    x = np.zeros((1, 200), np.uint16)
    read_only = np.zeros((1, 12), np.float32)
    read_only.flags.writeable = False
    for out in (read_only, np.zeros((1, 24), np.float32)[:, ::2]):
        with pytest.raises(TypeError):
            _native.fx3_gemv(section, 12, 200, x, out, threads)


def test_without_threads_there_is_no_computing() -> None:
    with pytest.raises(ValueError):
        _native.ComputeThreads(0)
    assert _native.ComputeThreads(2).threads == 2
