"""A plan for a packed folder: its layers' costs on a measured machine, and the popularity of its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zipmoe.codecs.registry import get_codec
from zipmoe.engine.pool_memory_plan import PoolMemoryPlan
from zipmoe.engine.pool_slots import PoolSettings, PoolSlots
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile
from zipmoe.planning.layer_costs import LayerCosts, TensorBytes
from zipmoe.planning.packed_products import ALL_PRODUCTS, PackedProducts
from zipmoe.planning.partition import CodecCapabilities, ExpertBytes, ExpertState, PoolPlan
from zipmoe.planning.plan_report import PlanReport
from zipmoe.planning.planner import DEFAULT_RUNNER_UPS, plan_pools
from zipmoe.planning.trace import RoutingTrace
from zipmoe.planning.workload import Workload
from zipmoe.store.manifest import Manifest


def workload_of(manifest: Manifest, top_k: int, trace: RoutingTrace | None, half_life_steps: float) -> Workload:
    """What the plan is made for: a recorded trace's decoding steps, or, without one, experts that are all alike.

    Args:
        manifest: of the folder.
        top_k: experts per token, for the case without a trace.
        trace: recorded with this model.
        half_life_steps: of the counts that rank the experts while the model runs.

    Raises:
        InvalidArgumentError: layers with different numbers of experts, or a trace of another model.
    """
    experts = tuple(len(group.records) for group in manifest.expert_groups)
    if len(set(experts)) != 1:
        raise InvalidArgumentError(
            f"the sparse layers have different numbers of experts: {sorted(set(experts))}",
            hint="such a model runs with its single pool: leave out --pools",
        )
    if trace is None:
        return Workload.uniform(len(experts), experts[0], top_k)
    check_trace(trace, manifest)
    steps = trace.decode_steps()
    if len(steps.steps) < 4:
        raise InvalidArgumentError(
            f"the trace has {len(steps.steps)} steps of one token", hint="record a longer run: --max-new-tokens 200"
        )
    return Workload.running(steps, half_life_steps, int(min(len(steps.steps) // 2, half_life_steps)))


def check_trace(trace: RoutingTrace, manifest: Manifest) -> None:
    """InvalidArgumentError unless a trace has the layers and experts of this folder's model."""
    experts = tuple(len(group.records) for group in manifest.expert_groups)
    if trace.header.experts != experts:
        raise InvalidArgumentError(
            f"the trace has layers of {list(trace.header.experts)} experts, the model {list(experts)}",
            hint="record one with this model: zipmoe run DST --record-trace FILE",
        )


@dataclass(frozen=True)
class FolderCosts:
    """What the planner needs to know about a folder's experts on a machine."""

    costs: LayerCosts
    expert: ExpertBytes
    capabilities: CodecCapabilities

    @classmethod
    def of(cls, manifest: Manifest, profile: DeviceProfile, products: PackedProducts = ALL_PRODUCTS) -> FolderCosts:
        """Costs and bytes of the largest expert of the folder.

        Args:
            manifest: of the folder.
            profile: of this machine.
            products: of the run.

        Raises:
            InvalidArgumentError: the machine was not measured with the folder's codec.
        """
        codec = get_codec(manifest.codec.name)
        capabilities = CodecCapabilities(codec.separable, codec.fused)
        records = [record for group in manifest.expert_groups for record in group.records]
        largest = max(records, key=lambda record: record.length)
        costs = LayerCosts.from_profile(
            profile,
            manifest.codec.name,
            capabilities,
            TensorBytes.of_record(largest),
            manifest.codec.shards,
            fast=products.experts,
        )
        return cls(costs, _slot_bytes(manifest, separable=codec.separable), capabilities)


def _slot_bytes(manifest: Manifest, *, separable: bool) -> ExpertBytes:
    """Bytes of the engine's slots, which are whole pages: what they hold is also what is read."""
    shapes = PoolMemoryPlan.of(manifest.expert_groups, PoolSettings(PoolSlots()), separable=separable).classes
    exponent, *sign_mantissa = (max(lengths) for lengths in zip(*(shape.part_bytes for shape in shapes), strict=True))
    return ExpertBytes(max(shape.full_bytes for shape in shapes), exponent, sum(sign_mantissa))


def plan_folder(
    manifest: Manifest,
    profile: DeviceProfile,
    workload: Workload,
    layer_budget_bytes: int,
    pools: tuple[ExpertState, ...] | None = None,
    *,
    products: PackedProducts = ALL_PRODUCTS,
    other_seconds: float = 0.0,
    asked: Sequence[PoolPlan] = (),
    runner_ups: int = DEFAULT_RUNNER_UPS,
) -> PlanReport:
    """Divide the pool memory of each sparse layer of a folder.

    Args:
        manifest: of the folder.
        profile: of this machine.
        workload: see ``workload_of``.
        layer_budget_bytes: memory for all pools of one layer.
        pools: restrict the pools; None: all that the codec has.
        products: of the run.
        other_seconds: of a step outside of the experts (``step_costs``).
        asked: partitions to tell the price of.
        runner_ups: how many to report.
    """
    folder = FolderCosts.of(manifest, profile, products)
    return plan_pools(
        workload,
        folder.costs,
        folder.expert,
        layer_budget_bytes,
        capabilities=folder.capabilities,
        pools=pools,
        other_seconds=other_seconds,
        asked=asked,
        runner_ups=runner_ups,
    )
