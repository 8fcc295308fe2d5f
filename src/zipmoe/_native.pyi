"""Types of the native core (native/bindings)."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_Words = npt.NDArray[np.uint16]  # patterns of BF16 values

# -- - codecs(native / bindings / codec_bindings.cpp) -- -

class CodecDescription:
    @property
    def name(self) -> str: ...
    @property
    def separable(self) -> bool: ...
    @property
    def fused(self) -> bool: ...
    @property
    def section_kinds(self) -> list[str]: ...
    @property
    def unavailable_reason(self) -> str: ...

def instruction_sets() -> list[str]: ...
def best_instruction_set() -> str: ...
def codecs() -> list[CodecDescription]: ...
def encode(
    codec: str, weights: _Words, level: int = 0, huffman_only: bool = False, shards: int = 1
) -> tuple[list[tuple[str, npt.NDArray[np.uint8]]], list[int]]: ...
def validate(
    codec: str, rows: int, columns: int, sections: Sequence[npt.NDArray[np.uint8]], shard_bytes: Sequence[int]
) -> None: ...
def decode(
    codec: str,
    rows: int,
    columns: int,
    sections: Sequence[npt.NDArray[np.uint8]],
    shard_bytes: Sequence[int],
    row_begin: int,
    row_end: int,
    out: _Words,
    instruction_set: str = "",
) -> None: ...
def split(weights: _Words) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]: ...
def recombine(
    exponent: npt.NDArray[np.uint8], sign_mantissa: npt.NDArray[np.uint8], out: _Words, instruction_set: str = ""
) -> None: ...
def xxh3_64(bytes: npt.NDArray[np.uint8]) -> int: ...

# -- - computing(native / bindings / compute_bindings.cpp) -- -

GEMV_TOKENS_MAX: int

def gemv_instruction_set(instruction_set: str = "") -> str: ...

class ComputeThreads:
    def __init__(self, threads: int, spin_microseconds: int = 50) -> None: ...
    @property
    def threads(self) -> int: ...

class GatedActivation:
    def __init__(
        self,
        function: str,
        layout: str,
        *,
        sigmoid_scale: float = 1.0,
        limit: float = ...,
        limit_activated: bool = False,
        up_offset: float = 0.0,
        rounds_between: bool = True,
    ) -> None: ...
    def apply(self, values: _Words, out: _Words) -> None: ...
    def evaluate(self, values: _Words, out: npt.NDArray[np.float32]) -> None: ...

def activate(function: str, sigmoid_scale: float, values: npt.NDArray[np.float32]) -> None: ...
def fx3_gemv(
    section: npt.NDArray[np.uint8],
    rows: int,
    columns: int,
    x: _Words,
    out: npt.NDArray[np.float32] | _Words,
    threads: ComputeThreads,
    *,
    bias: _Words | None = None,
    instruction_set: str = "",
) -> None: ...
def bfloat16_gemv(
    weights: _Words,
    x: _Words,
    out: npt.NDArray[np.float32] | _Words,
    threads: ComputeThreads,
    *,
    bias: _Words | None = None,
    instruction_set: str = "",
) -> None: ...
def compute_experts(
    experts: Sequence[
        tuple[
            Sequence[tuple[npt.NDArray[np.uint8] | _Words, int, int, _Words | None]],
            _Words,
            npt.NDArray[np.float32] | _Words,
        ]
    ],
    activation: GatedActivation,
    threads: ComputeThreads,
    *,
    instruction_set: str = "",
) -> None: ...

# -- - engine(native / bindings / engine_bindings.cpp) -- -

class RecordError(Exception):
    """args: fault ("read_failed", "truncated", "checksum_mismatch", "invalid_encoding"), record number, message."""

class RecordTable:
    def __init__(self, codec: str) -> None: ...
    def add_file(self, path: str) -> int: ...
    def add_record(
        self,
        name: str,
        file: int,
        offset: int,
        length: int,
        extents: Sequence[tuple[int, int, int]],
        matrices: Sequence[tuple[int, int, Sequence[tuple[int, int]], Sequence[int]]],
    ) -> int: ...
    def rows_on_demand_bytes(self, records: Sequence[int]) -> int: ...
    def row_details_bytes(self, records: Sequence[int]) -> int: ...
    def __len__(self) -> int: ...

class ExpertNetwork:
    def __init__(self, first: int, down: int, activation: GatedActivation, up: int | None = None) -> None: ...

class DenseProjection:
    def __init__(self, blocks: Sequence[int], bias: _Words | None = None) -> None: ...

class RmsNorm:
    def __init__(self, weight: _Words | None = None, epsilon: float = 0.0) -> None: ...

class AttentionLayer:
    def __init__(
        self,
        query: DenseProjection,
        key: DenseProjection,
        value: DenseProjection,
        output: DenseProjection,
        heads: Sequence[int],
        scale: float,
        query_norm: RmsNorm,
        key_norm: RmsNorm,
    ) -> None: ...

class DenseNetwork:
    def __init__(
        self, gate: DenseProjection, up: DenseProjection, down: DenseProjection, activation: GatedActivation
    ) -> None: ...

class RouterFormula:
    def __init__(self, score: str, top_k: int, normalised: bool) -> None: ...
    @property
    def top_k(self) -> int: ...

def attention_step(
    engine: Engine,
    layer: AttentionLayer,
    x: _Words,
    cosines: _Words | None,
    sines: _Words | None,
    keys: _Words,
    values: _Words,
    length: int,
    out: _Words,
) -> None: ...

class LayerNorms:
    def __init__(self, before_attention: RmsNorm, before_feed_forward: RmsNorm) -> None: ...

class SharedExpert:
    def __init__(
        self, network: DenseNetwork, gate: _Words | None = None, gate_function: _Words | None = None
    ) -> None: ...

class SparseBlock:
    def __init__(
        self,
        formula: RouterFormula,
        router: _Words,
        rounded_weights: bool,
        experts: Sequence[int],
        network: ExpertNetwork,
        shared: SharedExpert | None = None,
    ) -> None: ...

def attention_in_layer(
    engine: Engine,
    norms: LayerNorms,
    attention: AttentionLayer,
    x: _Words,
    cosines: _Words,
    sines: _Words,
    keys: _Words,
    values: _Words,
    length: int,
    sum: _Words,
    normed: _Words,
) -> None: ...
def layers_step(
    engine: Engine,
    layers: Sequence[tuple[LayerNorms, AttentionLayer, DenseNetwork | SparseBlock, _Words, _Words, int]],
    x: _Words,
    cosines: _Words,
    sines: _Words,
    outs: _Words,
) -> None: ...
def attends_prompts(instruction_set: str = "") -> bool: ...
def attend_prompt(
    queries: _Words,
    keys: _Words,
    values: _Words,
    scale: float,
    cached_keys: _Words,
    cached_values: _Words,
    out: _Words,
    threads: ComputeThreads,
    *,
    cosines: _Words | None = None,
    sines: _Words | None = None,
    instruction_set: str = "",
) -> None: ...
def feed_forward_step(engine: Engine, network: DenseNetwork, x: _Words, out: _Words) -> None: ...
def route(
    formula: RouterFormula,
    x: _Words,
    matrix: _Words,
    logits: _Words,
    weights: npt.NDArray[np.float32],
    experts: npt.NDArray[np.int64],
) -> None: ...
def holds(entries: tuple[tuple[dict[str, Any] | type, str, Any], ...]) -> bool: ...
def all_empty(dicts: tuple[Mapping[Any, Any], ...]) -> bool: ...
def small_linear(weights: _Words, x: _Words, out: _Words, bias: _Words | None = None) -> None: ...
def rms_norm(x: _Words, weight: _Words, epsilon: float, out: _Words) -> None: ...

norm_values_for_threads: int

def rms_norm_on_threads(engine: Engine, x: _Words, weight: _Words, epsilon: float, out: _Words) -> None: ...

class Engine:
    def __init__(
        self,
        table: RecordTable,
        *,
        verify: str,
        io_threads: int,
        io_depth: int,
        decode_threads: int,
        io_mode: str,
        io_backend: str,
        instruction_set: str,
        size_classes: Sequence[tuple[int, int]],
        class_of_record: Sequence[int],
        scratch_bytes: Sequence[int],
        policy: str = "zipmoe",
        half_life_steps: float = 16.0,
        requests_per_step: int = 1,
        seed: int = 0,
        pools: tuple[
            Sequence[tuple[int, Sequence[int], int, int, int]],
            Sequence[tuple[int, Sequence[int], Sequence[int]]],
            float | None,
            str,
        ]
        | None = None,
        rows_on_demand: Sequence[int] = (),
        keep_row_details: bool = False,
        candidates: Sequence[tuple[str, float]] = (),
    ) -> None: ...
    @property
    def size_classes(self) -> list[tuple[int, int]]: ...
    @property
    def fixed_bytes(self) -> int: ...
    @property
    def pool_bytes(self) -> int: ...
    @property
    def io_mode(self) -> str: ...
    @property
    def fallback_reason(self) -> str: ...
    @property
    def io_backend(self) -> str: ...
    @property
    def uring_refusal(self) -> str: ...
    def load_dense(self) -> tuple[int, int]: ...
    def begin_request(self, records: Sequence[int], ascending: bool, tokens: Sequence[int] = ...) -> None: ...
    def next_expert(self) -> int | None: ...
    def end_request(self) -> None: ...
    def abandon_request(self) -> None: ...
    def enable_look_ahead(self, slots: int) -> None: ...
    def predict(self, records: Sequence[int]) -> None: ...
    def predict_next(self, records: Sequence[int], of_pass: bool = False) -> list[int]: ...
    def predict_sweep(self, records: Sequence[int]) -> None: ...
    def decode(self, record: int, matrix: int, row_begin: int, row_end: int, out: _Words) -> None: ...
    def decode_to_scratch(self, record: int, matrix: int, row_begin: int, row_end: int, scratch: int) -> None: ...
    def gather(self, blocks: Sequence[int], rows: npt.NDArray[np.int64], out: _Words) -> None: ...
    def multiply(self, blocks: Sequence[int], x: _Words, out: _Words, bias: _Words | None = None) -> None: ...
    def feed_forward(self, record: int, network: ExpertNetwork, x: _Words, out: _Words) -> None: ...
    def feed_forward_request(
        self,
        records: Sequence[int],
        tokens: Sequence[int],
        network: ExpertNetwork,
        x: _Words,
        out: _Words,
        begun: bool = False,
    ) -> None: ...
    def sparse_step(
        self,
        records: Sequence[int],
        tokens: Sequence[int],
        network: ExpertNetwork,
        x: _Words,
        positions: npt.NDArray[np.int64],
        weights: npt.NDArray[np.float32],
        out: _Words,
        begun: bool = False,
    ) -> None: ...
    def scratch(self, index: int) -> _Words: ...
    def resize_pool(self, size_class: int, slots: int) -> None: ...
    def resize_pools(self, slots: Sequence[Sequence[int]]) -> None: ...
    @property
    def pool_slots(self) -> list[list[int]]: ...
    @property
    def pool_occupancy(self) -> list[list[int]]: ...
    def decoded_offset(self, record: int, matrix: int) -> int | None: ...
    def arena(self) -> _Words: ...
    def residency(self, record: int) -> int: ...
    def resident(self, record: int) -> bool: ...
    def counters(self) -> dict[str, int | float]: ...
    def policy(self) -> str: ...
    def close(self) -> None: ...

# -- - cache policies(native / bindings / cache_bindings.cpp) -- -

def cache_policies() -> list[str]: ...
def default_candidates() -> list[tuple[str, float]]: ...

class ReplayedPools:
    def __init__(
        self,
        pools: Sequence[tuple[int, tuple[int, int, int, int], Sequence[float]]],
        *,
        candidates: Sequence[tuple[str, float]],
        requests_per_step: int,
        tolerance: float | None = None,
        seed: int = 0,
        window_steps: int = 96,
        least_steps: int = 8,
        margin: float = 0.01,
        standard_errors: float = 1.0,
    ) -> None: ...
    def access(self, pool: int, experts: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int]]]: ...
    def residencies(self, pool: int) -> list[int]: ...
    @property
    def policy(self) -> str: ...
    @property
    def policy_changes(self) -> int: ...
    @property
    def mean_costs(self) -> list[float]: ...

class LayerPools:
    def __init__(
        self,
        experts: int,
        slots: tuple[int, int, int, int],
        policy: str = "zipmoe",
        *,
        tolerance: float | None = None,
        half_life_steps: float = 16.0,
        requests_per_step: int = 1,
        seed: int = 0,
        staging: int | None = None,
    ) -> None: ...
    def resize(self, slots: tuple[int, int, int, int]) -> list[tuple[int, int, int]]: ...
    def access(self, experts: Sequence[int]) -> tuple[list[int], list[tuple[int, int, int]]]: ...
    @property
    def residencies(self) -> list[int]: ...
    @property
    def tolerance(self) -> float: ...

# -- - profiler(native / bindings / profile_bindings.cpp) -- -

class TimedReads:
    def __init__(self, paths: Sequence[str], mode: str, depth: int) -> None: ...
    @property
    def depth(self) -> int: ...
    @property
    def fallback_reason(self) -> str: ...
    def read(
        self, places: Sequence[tuple[int, int]], block_bytes: int, memory: npt.NDArray[np.uint8]
    ) -> tuple[float, int, int]: ...

class TimedReader:
    def __init__(
        self,
        paths: Sequence[str],
        backend: str,
        *,
        parallel: int,
        block_bytes: int,
        least_block_bytes: int = 0,
        completion_threads: int = 1,
        memory: npt.NDArray[np.uint8] | None = None,
    ) -> None: ...
    def read(
        self, places: Sequence[tuple[int, int]], length: int, memory: npt.NDArray[np.uint8], checksums: bool
    ) -> tuple[float, int, int]: ...

class TimedWork:
    def __init__(self, workers: int) -> None: ...
    @property
    def workers(self) -> int: ...
    def decompress(
        self,
        codec: str,
        shards: Sequence[tuple[npt.NDArray[np.uint8], int]],
        units: int,
        scratch: npt.NDArray[np.uint8],
    ) -> float: ...
    def recombine(
        self,
        planes: Sequence[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]],
        units: int,
        scratch: npt.NDArray[np.uint8],
    ) -> float: ...
    def read_memory(self, memory: npt.NDArray[np.uint8], units: int) -> float: ...
    def copy_memory(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], units: int) -> float: ...

class TimedDecoder:
    def __init__(self, codec: str, workers: int) -> None: ...
    @property
    def workers(self) -> int: ...
    def decode(
        self,
        matrices: Sequence[tuple[int, int, Sequence[npt.NDArray[np.uint8]], Sequence[int]]],
        units: int,
        out: _Words,
    ) -> float: ...

def uring_refusal() -> str: ...
def drop_cached_pages(path: str, ranges: Sequence[tuple[int, int]]) -> None: ...
def cached_bytes(path: str, offset: int, length: int) -> int: ...
def library_version(codec: str) -> str: ...

# -- - scheduler(native / bindings / schedule_bindings.cpp, docs / scheduling.md) -- -

class LayerSchedule:
    """A layer's schedule on the machine model; tasks by position in the arguments; times in seconds."""

    @property
    def io(self) -> list[tuple[int, str, int]]:
        """Reads in order: (task, "E" | "SM" | "packed" (a fused codec's section), shard; 0 unless "E")."""

    @property
    def io_times(self) -> list[tuple[float, float]]:
        """(start, end) of each read of ``io``."""

    @property
    def decompressions(self) -> list[tuple[int, int]]:
        """(task, shard), highest priority first."""

    @property
    def decompression_times(self) -> list[tuple[int, float, float]]:
        """(worker, start, end) of each entry of ``decompressions``."""

    @property
    def recombination_times(self) -> list[tuple[float, float]]:
        """(start, end) per task; of length 0 where nothing is recombined."""

    @property
    def execution_times(self) -> list[tuple[float, float]]:
        """(start, end) per expert position."""

    @property
    def execution_end(self) -> list[float]: ...
    @property
    def block_of_task(self) -> list[int]:
        """Block per task, -1 for tasks without work."""

    @property
    def task_order(self) -> list[int]:
        """The tasks that have work, block after block."""

    @property
    def makespan(self) -> float: ...
    @property
    def io_end(self) -> float: ...
    @property
    def io_seconds(self) -> float: ...
    @property
    def lower_bound(self) -> float: ...

def schedule_layer(
    expert: Sequence[int],
    tensor: Sequence[int],
    state: Sequence[int],
    read_sign_mantissa_seconds: Sequence[float],
    read_shard_seconds: Sequence[float],
    decompress_seconds: Sequence[float],
    recombine_seconds: Sequence[float],
    execute_seconds: Sequence[float],
    shards: int,
    workers: int,
    order: str = "cache_affinity",
) -> LayerSchedule: ...
def layer_makespan(
    states: npt.NDArray[np.uint8],
    tensors: int,
    read_sign_mantissa_seconds: Sequence[float],
    read_shard_seconds: Sequence[float],
    decompress_seconds: Sequence[float],
    recombine_seconds: Sequence[float],
    execute_seconds: npt.NDArray[np.float64],
    shards: int,
    workers: int,
    order: str = "cache_affinity",
) -> float: ...
def reconstruction_dag(state: int, shards: int) -> list[tuple[str, int, list[int]]]:
    """Operations of a tensor in topological order: (kind, shard, positions of predecessors); the last is "execute"."""
