"""Amounts, limits, the ledger, the floor."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packed_model import EXPERTS, GROUPS, PackedModel, build

from zipmoe.codecs.codec_settings import CodecSettings
from zipmoe.engine.budget import (
    DENSE,
    EXPERT_POOL,
    KV_CACHE,
    LARGEST_DEFAULT_RESERVE_BYTES,
    PROCESS,
    SCRATCH,
    SMALLEST_DEFAULT_RESERVE_BYTES,
    WORKSPACE,
    WORKSPACE_BYTES,
    MemoryBudget,
    MemoryLimit,
    budget_bytes,
    default_budget_bytes,
    format_bytes,
    parse_bytes,
    plan_budget,
    workspace_bytes,
)
from zipmoe.engine.engine import Engine
from zipmoe.engine.kv_cache import kv_cache_bytes, kv_cache_bytes_per_token, recurrent_state_bytes
from zipmoe.engine.limits import detect_limits
from zipmoe.engine.memory_usage import control_group_peak_bytes, peak_resident_bytes, resident_bytes
from zipmoe.engine.pool_plan import SizeClass, distribute_slots, floor_bytes, plan_size_classes
from zipmoe.errors import BudgetExceededError, BudgetTooSmallError, InvalidArgumentError, UnsupportedOperationError

GIB = 1 << 30


# --- amounts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4GB", 4_000_000_000),
        ("4GiB", 4 * GIB),
        ("2.2 GB", 2_200_000_000),
        (" 512m ", 512 << 20),
        ("512MiB", 512 << 20),
        ("3K", 3072),
        ("3kb", 3000),
        ("1T", 1 << 40),
        ("1.5TiB", 3 << 39),
        ("1TB", 10**12),
        ("1000", 1000),
        ("7 B", 7),
        (".5G", GIB // 2),
        ("4.G", 4 * GIB),
        (12345, 12345),
        ("0.1GB", 100_000_000),
    ],
)
def test_parse_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    ["4 apples", "", "GB", "-4GB", "4GBs", "4 G B", "1e9", "4,5GB", "0", "0.0001 B", "inf", "nan", 0, -1, True, 2.5],
)
def test_parse_bytes_refuses_with_a_hint(text: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_bytes(text)  # type: ignore[arg-type]
    assert repr(text) in str(caught.value)
    assert "4GB" in (caught.value.hint or "")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (64000000, "64.0 MB"),
        (2199999999, "2.20 GB"),
        (999600, "1.00 MB"),
        (402000000, "402 MB"),
        (5 * 10**12, "5.00 TB"),
    ],
)
def test_format_bytes(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


# --- limits


def machine(root: Path, memory_kib: int, groups: str, mounts: list[str], files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:  {memory_kib} kB\nMemFree: 5 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text("\n".join(mounts) + "\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "33 25 0:29 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "34 25 0:30 / /sys/fs/cgroup/cpu rw,nosuid shared:9 - cgroup cgroup rw,cpu"
UNLIMITED_V1 = "9223372036854771712"


def test_version_2_limits_up_the_tree(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        16 << 20,
        "0::/user.slice/job\n",
        [V2_MOUNT],
        {
            "sys/fs/cgroup/user.slice/job/memory.max": "max",
            "sys/fs/cgroup/user.slice/job/memory.high": str(6 * GIB),
            "sys/fs/cgroup/user.slice/memory.max": str(5 * GIB),
            "sys/fs/cgroup/user.slice/job/memory.peak": "777",
        },
    )
    limits = detect_limits(root)
    assert [limit.bytes for limit in limits] == [5 * GIB, 6 * GIB, 16 * GIB]
    assert "memory.max" in limits[0].source and limits[0].source.endswith("user.slice")
    assert "memory.high" in limits[1].source
    assert limits[2].source == "physical memory"
    assert control_group_peak_bytes(root) == 777


def test_version_1_limits_up_the_tree(tmp_path: Path) -> None:
    base = "sys/fs/cgroup/memory"
    root = machine(
        tmp_path,
        8 << 20,
        "5:cpu:/\n4:memory:/a/b\n0::/\n",
        [V1_CPU_MOUNT, V1_MOUNT],
        {
            f"{base}/memory.limit_in_bytes": UNLIMITED_V1,
            f"{base}/a/memory.limit_in_bytes": str(3 * GIB),
            f"{base}/a/b/memory.limit_in_bytes": UNLIMITED_V1,
            f"{base}/a/b/memory.stat": f"cache 5\nhierarchical_memory_limit {2 * GIB}\ntotal_rss 1",
            f"{base}/a/b/memory.max_usage_in_bytes": "888",
        },
    )
    assert [limit.bytes for limit in detect_limits(root)] == [2 * GIB, 3 * GIB, 8 * GIB]
    assert control_group_peak_bytes(root) == 888


def test_both_versions_mounted(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        8 << 20,
        "4:memory:/job\n0::/unified\n",
        [V1_MOUNT, V2_MOUNT.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")],
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(4 * GIB),
            "sys/fs/cgroup/unified/unified/cgroup.procs": "1",
        },
    )
    assert [limit.bytes for limit in detect_limits(root)] == [4 * GIB, 8 * GIB]


@pytest.mark.parametrize(
    ("mounted_part", "group"),
    [
        ("/docker/abc", "/docker/abc/inner"),
        ("/docker/abc", "/docker/abc"),
        ("/docker/abc", "/elsewhere"),
        ("/", "/../x"),
    ],
)
def test_inside_a_container_only_a_part_of_the_tree_is_visible(tmp_path: Path, mounted_part: str, group: str) -> None:
    root = machine(
        tmp_path,
        8 << 20,
        f"4:memory:{group}\n",
        [V1_MOUNT.replace(" / /sys", f" {mounted_part} /sys")],
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/inner/memory.limit_in_bytes": str(2 * GIB),
        },
    )
    expected = [GIB, 2 * GIB, 8 * GIB] if group.endswith("inner") else [GIB, 8 * GIB]
    assert [limit.bytes for limit in detect_limits(root)] == expected


def test_without_control_groups_or_proc(tmp_path: Path) -> None:
    assert [limit.bytes for limit in detect_limits(machine(tmp_path / "a", 4 << 20, "", [], {}))] == [4 * GIB]
    assert detect_limits(tmp_path / "nothing") == []
    assert control_group_peak_bytes(tmp_path / "nothing") is None
    assert resident_bytes(tmp_path / "nothing") == 0


def test_this_machine_has_limits_and_memory_in_use() -> None:
    limits = detect_limits()
    assert limits and limits[0].bytes <= limits[-1].bytes
    assert 10_000_000 < resident_bytes() <= peak_resident_bytes() + 10_000_000


def test_the_default_leaves_a_reserve() -> None:
    def default(count: int) -> int:
        return default_budget_bytes([MemoryLimit("a", count), MemoryLimit("b", 900 * GIB)])

    assert default(20 * GIB) == 18 * GIB
    assert default(1 * GIB) == GIB - SMALLEST_DEFAULT_RESERVE_BYTES
    assert default(512 * GIB) == 512 * GIB - LARGEST_DEFAULT_RESERVE_BYTES
    assert default(100 << 20) == 50 << 20
    with pytest.raises(InvalidArgumentError, match="does not tell"):
        default_budget_bytes([])


def test_a_budget_beyond_the_limits_is_refused() -> None:
    limits = [MemoryLimit("memory.max of control group x", 4_000_000_000), MemoryLimit("physical memory", 16 * GIB)]
    assert budget_bytes("4GB", limits) == 4_000_000_000
    with pytest.raises(
        InvalidArgumentError, match=r"5\.00 GB was asked for, but memory.max of control group x is 4\.00"
    ):
        budget_bytes("5GB", limits)
    in_whole_pages = [MemoryLimit("memory.limit_in_bytes", 4_000_000_000 // 4096 * 4096)]
    assert budget_bytes("4GB", in_whole_pages) == in_whole_pages[0].bytes


# --- key-value cache and workspace


def test_key_value_cache_of_real_configs() -> None:
    from transformers import (
        DbrxConfig,
        DeepseekV3Config,
        Gemma3Config,
        JambaConfig,
        JetMoeConfig,
        MixtralConfig,
        Qwen2MoeConfig,
        SwitchTransformersConfig,
    )

    qwen = Qwen2MoeConfig(num_hidden_layers=6, num_key_value_heads=16, num_attention_heads=16, hidden_size=2048)
    assert kv_cache_bytes_per_token(qwen) == 6 * 2 * 16 * 128 * kv_dtype_bytes(qwen)
    assert kv_cache_bytes(qwen, 1000) == 1000 * kv_cache_bytes_per_token(qwen)
    mixtral = MixtralConfig(
        num_hidden_layers=32, num_key_value_heads=8, num_attention_heads=32, hidden_size=4096, dtype="bfloat16"
    )
    assert kv_cache_bytes_per_token(mixtral) == 32 * 2 * 8 * 128 * 2
    deepseek = DeepseekV3Config(num_hidden_layers=61, dtype="bfloat16")
    assert kv_cache_bytes_per_token(deepseek) == 61 * (512 + 64) * 2  # latent vector and rotary key
    switch = SwitchTransformersConfig(num_layers=12, num_decoder_layers=10, num_heads=12, d_kv=64, dtype="bfloat16")
    assert kv_cache_bytes_per_token(switch) == 2 * 10 * 2 * 12 * 64 * 2
    dbrx = DbrxConfig(d_model=64, n_heads=4, n_layers=3, attn_config={"kv_n_heads": 2}, dtype="bfloat16")
    assert kv_cache_bytes_per_token(dbrx) == 3 * 2 * 2 * 16 * 2
    jetmoe = JetMoeConfig(num_hidden_layers=2, num_key_value_heads=16, kv_channels=128, dtype="bfloat16")
    assert kv_cache_bytes_per_token(jetmoe) >= 2 * 2 * 16 * 128 * 2
    nested = Gemma3Config()
    assert kv_cache_bytes_per_token(nested) == kv_cache_bytes_per_token(nested.get_text_config())
    jamba = JambaConfig(num_hidden_layers=32, hidden_size=4096, mamba_d_state=16, mamba_expand=2, dtype="bfloat16")
    assert recurrent_state_bytes(jamba) == 32 * 16 * 2 * 4096 * 4
    assert recurrent_state_bytes(mixtral) == 0
    assert kv_cache_bytes(jamba, 0, sequences=3) == 3 * kv_cache_bytes(jamba, 256)


FAMILIES_WITH_UNUSUAL_CACHES = [
    "deepseek_v2",
    "deepseek_v32",
    "deepseek_v4",
    "gemma4",
    "glm5_next",
    "gpt_oss",
    "jamba",
    "kimi_linear",
    "llama4",
    "longcat_flash",
    "minimax",
    "nemotron_h",
    "qwen3_next",
    "zaya",
]


@pytest.mark.parametrize("family", FAMILIES_WITH_UNUSUAL_CACHES)
def test_the_estimate_covers_the_cache_that_transformers_builds(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "families"))
    from tiny_models import tiny_inputs, tiny_model

    from zipmoe.hf.budget_watch import cache_bytes

    model = tiny_model(family).eval()
    inputs = tiny_inputs(family, batch=2, tokens=40)
    with torch.inference_mode():
        cache = model(**inputs, use_cache=True).past_key_values
    assert 0 < cache_bytes(cache) <= kv_cache_bytes(model.config, 80, sequences=2)


def kv_dtype_bytes(config: object) -> int:
    return 2 if getattr(config, "dtype", None) is None or "16" in str(config.dtype) else 4  # type: ignore[attr-defined]


def test_key_value_cache_of_configs_that_nobody_knows() -> None:
    assert (
        kv_cache_bytes_per_token(SimpleNamespace(hidden_size=64, num_hidden_layers=3, dtype="bfloat16"))
        == 3 * 2 * 64 * 2
    )
    assert kv_cache_bytes_per_token({"d_model": 64, "n_layer": 2, "dtype": "float32"}) == 2 * 2 * 64 * 4
    per_layer = SimpleNamespace(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=[2, 4], head_dim=16
    )
    assert kv_cache_bytes_per_token(per_layer) == 2 * 2 * 4 * 16 * 2
    assert kv_cache_bytes(per_layer, 0) > 0  # recurrent states do not shrink with the context


def test_workspace_grows_with_the_step() -> None:
    config = SimpleNamespace(hidden_size=100, intermediate_size=1000, vocab_size=500)
    one = workspace_bytes(config, 1)
    assert one > WORKSPACE_BYTES == workspace_bytes(None, 999)
    assert workspace_bytes(config, 11) - one == 10 * 2 * ((52 + 2) * 100 + 6 * 1000)
    assert workspace_bytes(config, 1, logit_rows=4) - one == 3 * 500 * 8


# --- ledger


def test_ledger() -> None:
    budget = MemoryBudget(1000, {"a": 300})
    budget.reserve("b", 200)
    budget.reserve("b", 100)
    assert budget.ledger == {"a": 300, "b": 300}
    assert (budget.reserved_bytes, budget.free_bytes, budget.reserved("c")) == (600, 400, 0)
    with pytest.raises(
        BudgetExceededError, match=r"c needs 401 B more, but only 400 B of the 1\.00 kB budget are left"
    ) as caught:
        budget.reserve("c", 401)
    assert "a 300 B, b 300 B" in str(caught.value)
    assert budget.reserved("c") == 0
    budget.reserve("c", 400)
    budget.set_reservation("c", 10)
    budget.release("a")
    budget.release("never made")
    assert budget.itemise() == "b 300 B, c 10 B"
    with pytest.raises(InvalidArgumentError):
        budget.set_reservation("c", -1)
    with pytest.raises(InvalidArgumentError):
        MemoryBudget(0)
    overdrawn = MemoryBudget(10, {"a": 20})
    assert overdrawn.free_bytes == -10
    overdrawn.set_reservation("a", 15)  # shrinking is always possible


def test_plan_budget_reserves_what_is_known() -> None:
    config = SimpleNamespace(
        hidden_size=64, num_hidden_layers=2, vocab_size=10, intermediate_size=128, dtype="bfloat16"
    )
    limits = [MemoryLimit("physical memory", 8 * GIB)]
    budget = plan_budget("4GB", config=config, unpacked_bytes=5, context_tokens=300, batch=2, limits=limits)
    assert budget.total_bytes == 4_000_000_000
    assert budget.reserved("unpacked tensors") == 5
    assert budget.reserved(KV_CACHE) == 600 * 2 * 2 * 64 * 2
    assert budget.reserved(WORKSPACE) == workspace_bytes(config, 600, logit_rows=2)
    long_prompt = plan_budget("4GB", config=config, context_tokens=4000, step_tokens=3000, limits=limits)
    assert long_prompt.reserved(WORKSPACE) == workspace_bytes(config, 3000)
    assert budget.reserved(PROCESS) > 10_000_000
    short = SimpleNamespace(**vars(config), max_position_embeddings=512)
    assert plan_budget(None, config=short, limits=limits).reserved(KV_CACHE) == 512 * 2 * 2 * 64 * 2


# --- pool


def test_size_classes(tmp_path: Path) -> None:
    same = build(tmp_path / "same").folder.manifest.expert_groups
    assert [(c.records, c.groups) for c in plan_size_classes(same)] == [(2 * EXPERTS, (0, 1))]
    different = build(tmp_path / "different", second_layer_scale=4).folder.manifest.expert_groups
    classes = plan_size_classes(different)
    assert [(c.records, c.groups) for c in classes] == [(EXPERTS, (1,)), (EXPERTS, (0,))]
    assert classes[0].slot_bytes == max(record.length for record in different[1].records)
    assert plan_size_classes([]) == []


def test_slots_are_shared_out_by_need() -> None:
    classes = [SizeClass(40960, 10, (0,)), SizeClass(4096, 100, (1,))]
    assert floor_bytes(classes) == 2 * 45056
    assert distribute_slots(classes, floor_bytes(classes)) == [2, 2]
    half = distribute_slots(classes, (40960 * 10 + 4096 * 100) // 2)
    assert half == [5, 50]
    assert distribute_slots(classes, 1 << 40) == [10, 100]
    assert distribute_slots([SizeClass(4096, 1, (0,))], 1 << 20) == [1]
    with pytest.raises(ValueError, match="floor"):
        distribute_slots(classes, floor_bytes(classes) - 1)
    for pool in range(floor_bytes(classes), 900_000, 7919):
        slots = distribute_slots(classes, pool)
        used = sum(c.slot_bytes * n for c, n in zip(classes, slots, strict=True))
        assert used <= pool
        assert pool - used < 40960 or slots == [10, 100]


def test_engine_with_two_size_classes(tmp_path: Path) -> None:
    model = build(tmp_path, second_layer_scale=4)
    with model.engine(2) as engine:
        sizes = engine._native.size_classes
        assert [slots for _, slots in sizes] == [2, 2]
        assert sizes[0][0] > 2 * sizes[1][0]
        for group in GROUPS:
            handle = engine.group(group)
            with engine.request(handle, [0, 1, 2, 3]) as request:
                assert sorted(request) == [0, 1, 2, 3]
        assert engine.statistics.counters().evictions == 4  # neither layer took slots from the other


# --- the engine's reservations


def test_the_pool_gets_what_is_left_and_at_most_all_experts(model: PackedModel) -> None:
    with model.engine(5) as engine:
        assert engine._native.size_classes[0][1] == 5
        assert engine.budget.free_bytes == 0
        # The plan and the native engine agree about the arena.
        assert engine.budget.reserved(DENSE) + engine.budget.reserved(SCRATCH) == engine._native.fixed_bytes
    with model.engine(5, io_mode="buffered") as engine:
        assert engine._native.pool_bytes <= engine.budget.reserved(EXPERT_POOL)
    budget = MemoryBudget(8 * GIB)
    with Engine(model.folder, budget) as engine:
        assert engine._native.size_classes[0][1] == 2 * EXPERTS
        assert budget.free_bytes > 7 * GIB - resident_bytes()
        assert budget.reserved(PROCESS) > 10_000_000
        assert budget.reserved(WORKSPACE) == WORKSPACE_BYTES


@pytest.mark.parametrize("codec", [CodecSettings("fx3", None, 1), CodecSettings("zstd", 3, 2)], ids=lambda c: c.name)
def test_below_the_floor_the_engine_refuses_and_itemises(tmp_path: Path, codec: CodecSettings) -> None:
    model = build(tmp_path, codec)
    floor = model.budget(2).total_bytes
    with Engine(model.folder, model.budget(2), decode_threads=2) as engine:
        assert engine._native.size_classes[0][1] == 2
    ledger = model.budget(2).ledger
    with pytest.raises(BudgetTooSmallError) as caught:
        Engine(model.folder, MemoryBudget(floor - 1, ledger), decode_threads=2)
    message = str(caught.value)
    assert f"floor of {format_bytes(floor)}" in message
    for item in (PROCESS, WORKSPACE, DENSE, SCRATCH, EXPERT_POOL):
        assert item in message
    advised = re.search(r"at least (\S+?),", caught.value.hint or "")
    assert advised is not None
    with Engine(model.folder, MemoryBudget(parse_bytes(advised[1]), ledger), decode_threads=2):
        pass
    with pytest.raises(BudgetTooSmallError):
        Engine(model.folder, MemoryBudget(1000, ledger))


def test_account_takes_from_the_pool_and_gives_back(model: PackedModel) -> None:
    slot_bytes = model.plan().size_classes[0].slot_bytes
    with model.engine(6) as engine:
        handle = engine.group(GROUPS[0])
        with engine.request(handle, [0, 1, 2, 3, 4, 5]) as request:
            assert len(list(request)) == 6
        with engine.request(handle, [2, 0, 5]) as request:
            list(request)
        engine.account(KV_CACHE, 1)
        assert engine._native.size_classes[0][1] == 5
        engine.account(KV_CACHE, slot_bytes)
        assert engine._native.size_classes[0][1] == 5
        engine.account(KV_CACHE, 3 * slot_bytes)
        assert engine._native.size_classes[0][1] == 3
        assert engine.budget.reserved_bytes <= engine.budget.total_bytes
        hits = engine.statistics.counters().hits
        with engine.request(handle, [0, 2, 5]) as request:  # the most recently used survived, moved and intact
            assert list(request) == [0, 2, 5]
        assert engine.statistics.counters().hits == hits + 3
        before = engine.budget.ledger
        with pytest.raises(BudgetExceededError, match="key-value cache needs"):
            engine.account(KV_CACHE, 5 * slot_bytes)
        assert engine.budget.ledger == before
        engine.account(KV_CACHE, 4 * slot_bytes)
        assert engine._native.size_classes[0][1] == 2
        engine.account(KV_CACHE, 0)
        assert engine._native.size_classes[0][1] == 6
        with engine.request(handle, [1, 3, 4, 6, 7, 0]) as request:
            next(request)
            with pytest.raises(UnsupportedOperationError, match="during a request"):
                engine.account(KV_CACHE, 2 * slot_bytes)
            engine.account("nothing", 0)
