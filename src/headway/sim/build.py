"""Compile a validated scenario to the arguments of `simulate`: hardware, model shape, latencies, memory, requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.core.event_log import EventSink
from headway.perf.hardware.accelerators import AcceleratorSpec, accelerator
from headway.perf.hardware.links import link
from headway.perf.hardware.models import model
from headway.perf.hardware.shapes import ModelShape
from headway.perf.hardware.utilisation import UtilisationBase
from headway.perf.latency import store
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.layout import ParallelLayout, cut
from headway.perf.latency.roofline import MachineRates, roofline
from headway.perf.latency.serving_overhead import HostedLatency, ServingOverhead
from headway.perf.latency.shard_exchange import ShardExchangeCost, between_groups
from headway.perf.latency.table_latency import TableLatency
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.event_loop import OnProgress
from headway.sim.memory import plan_memory
from headway.sim.metrics import SloTargets
from headway.sim.noise import NoiseSpec
from headway.sim.pipeline import StageLink
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.requests import classes_of, requests_of
from headway.sim.result import SimResult
from headway.sim.scenario import ClusterSection, LatencySection, ModelSection, PoolSection, Scenario
from headway.sim.simulation import simulate
from headway.sim.spec import InstanceSpec, RunSpec
from headway.sim.vllm.section import VllmSection
from headway.sim.vllm.spec import VllmSpec, stock_flags
from headway.sim.workload import TraceRequest
from headway.sim.workload.classes import check_classes

if TYPE_CHECKING:
    from headway.sim.cluster.measured import MeasuredCluster
    from headway.sim.cluster.result import ClusterResult


class RunDetail(NamedTuple):
    """Optional outputs of a run, for traces and pictures."""

    iterations: bool = False
    """One row an iteration (not of clusters)."""
    bars: bool = False
    """Bars of a cluster's instances over time."""
    event_log: EventSink | None = None
    """Receives the event log of the one engine (not of clusters)."""


@dataclass(frozen=True)
class ScenarioRun:
    """One simulated seed of a scenario."""

    sim: SimResult
    cluster: ClusterResult | None = None
    """The cluster's part of it, where the scenario has a placement."""


def run_scenario(
    scenario: Scenario,
    seed: int,
    *,
    detail: RunDetail = RunDetail(),  # noqa: B008 - immutable
    on_progress: OnProgress | None = None,
    stopwatch: Callable[[], float] | None = None,
    measured: MeasuredCluster | None = None,
) -> ScenarioRun:
    """Simulate one seed of a scenario. measured: instances in place of those that `scenario.cluster` describes."""
    if scenario.cluster.placement is not None:
        # imported late: `cluster.build` imports this module
        from headway.sim.cluster.build import run_cluster

        cluster = run_cluster(
            scenario, seed, keep_bars=detail.bars, on_progress=on_progress, stopwatch=stopwatch, measured=measured
        )
        return ScenarioRun(cluster.sim, cluster)
    requests = workload_of(scenario, seed)
    run = run_of(scenario, seed, detail.iterations)
    spec = instance_of(scenario, requests)
    return ScenarioRun(
        simulate(spec, requests, run, on_progress=on_progress, stopwatch=stopwatch, log=detail.event_log)
    )


def workload_of(scenario: Scenario, seed: int) -> list[TraceRequest]:
    """Return the requests of one seed. What is cached of their prompts is the simulated cache's to say, if any.

    Raises ConfigError for an SLO of a class that the workload does not have."""
    requests = requests_of(scenario.workload, scenario.run.window_s, seed)
    check_classes("slo.", scenario.slo, requests, partial(classes_of, scenario.workload))
    return requests if scenario.prefix_cache is None else [replace(each, cached_tokens=0) for each in requests]


def prefix_cache_of(scenario: Scenario, shape: ModelShape) -> PrefixCacheSpec | None:
    """Return the prefix cache of each instance."""
    section = scenario.prefix_cache
    if section is None:
        return None
    return PrefixCacheSpec(tokens=section.tokens(shape.kv_bytes_per_token), eviction=section.eviction)


def config_of(scenario: Scenario) -> SchedulerConfig:
    """Return the scheduler's settings. Raises ConfigError on an impossible value."""
    # fields that are not given keep the defaults of the mode
    given: dict[str, Any] = scenario.policy.model_dump(exclude_none=True)
    mode = given.pop("mode", "default")
    try:
        layout = scenario.layout
        return SchedulerConfig.named(
            mode, **given, stages=layout.stages, kv_parallel=layout.kvp, kv_shard_tokens=layout.shard_tokens
        )
    except ConfigError as error:
        raise ConfigError(f"policy: {error}") from None


def serving_of(latency: LatencyModel) -> ServingOverhead | None:
    """Return what a server adds to the iterations of a measured table; None: the model knows of none."""
    return latency.source.serving if isinstance(latency, TableLatency) else None


def hosted(latency: LatencyModel, serving: ServingOverhead | None) -> LatencyModel | None:
    """Return what iterations take, where it is more than policies predict."""
    return None if serving is None else HostedLatency(latency, serving.iteration_s)


def instance_of(scenario: Scenario, requests: list[TraceRequest]) -> InstanceSpec:
    """Return one instance, with the KV cache that memory leaves. Raises InfeasibleError when it does not fit."""
    config = vllm_config_of(scenario) if scenario.engine == "vllm" else config_of(scenario)
    device, shape = named(scenario)
    layout = layout_of(scenario)
    kv_tokens = scenario.memory.kv_tokens
    if kv_tokens is None:
        # (longest prompt, longest request): the first bounds activations, the second KV
        longest = (max(r.prompt_tokens for r in requests), max(r.prompt_tokens + r.output_tokens for r in requests))
        kv_tokens = plan_memory(device, shape, layout, config, longest, scenario.memory.utilisation).kv_tokens
    between = link(scenario.layout.link) if scenario.layout.link else layout.stage_link(device)
    devices = layout.accelerators
    latency = latency_of(scenario.latency, device, shape, layout)
    serving = serving_of(latency)
    return InstanceSpec(
        config=config,
        latency=latency,
        actual_latency=hosted(latency, serving),
        serving=serving or ServingOverhead(),
        kv_tokens=kv_tokens,
        block_tokens=scenario.memory.block_tokens,
        prefix_cache=prefix_cache_of(scenario, shape),
        link=StageLink(
            between.latency_s,
            # each rank sends 1 / tp of a row's activations over its own link
            shape.hidden * shape.dtype_bytes / layout.tp / (between.bytes_per_s * between.efficiency),
        ),
        # one KV group exchanges nothing
        exchange=between_groups(device, shape, layout) if layout.kvp > 1 else ShardExchangeCost(),
        learns=scenario.latency.learns,
        utilisation_base=UtilisationBase(
            shape=shape, peak_flops=device.flops * devices, peak_bandwidth=device.bandwidth * devices
        ),
        vllm=vllm_of(scenario.vllm, kv_tokens, config) if scenario.engine == "vllm" else None,
    )


def vllm_config_of(scenario: Scenario) -> SchedulerConfig:
    """Return the plugged policy's settings, by which memory is planned. Raises ConfigError on an impossible value."""
    section = scenario.vllm
    try:
        return section.headway.scheduler_config(
            section.max_num_seqs, section.max_num_batched_tokens, 1, scenario.layout.stages
        )
    except ConfigError as error:
        raise ConfigError(f"vllm.headway: {error}") from None


def vllm_of(section: VllmSection, kv_tokens: int, config: SchedulerConfig) -> VllmSpec:
    """Return vLLM's settings with the blocks of a KV cache of `kv_tokens`. `config`: the policy's, where it is plugged.

    Raises ConfigError for a cache that is too small."""
    same = ("block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "async_scheduling",
            "enable_prefix_caching", "long_prefill_token_threshold_adaptive", "scheduler_reserve_full_isl", "watermark",
            "priorities")  # fmt: skip
    by_priority, threshold = stock_flags(section.scheduler)
    return VllmSpec(
        num_blocks=kv_tokens // section.block_size,
        by_priority=by_priority,
        long_prefill_token_threshold=threshold,
        plugged=config if section.scheduler == "plugged" else None,
        **{name: getattr(section, name) for name in same},
    )


def run_of(scenario: Scenario, seed: int, keep_iterations: bool = False) -> RunSpec:
    run = scenario.run
    return RunSpec(
        replicas=scenario.cluster.replicas,
        seed=seed,
        targets={klass: SloTargets(**slo.model_dump()) for klass, slo in scenario.slo.items()},
        send_slo=run.send_slo,
        refuse_late=run.refuse_late,
        deadline_is_target=run.deadline_is_target,
        max_output=run.max_output,
        noise=NoiseSpec(**run.noise.model_dump()),
        window_s=run.window_s,
        timeout_s=run.timeout_s,
        patience_s=run.patience_s,
        fast_forward=run.fast_forward,
        keep_iterations=keep_iterations,
    )


def lead_pool(cluster: ClusterSection) -> PoolSection:
    """Return the first of a cluster's pools that prefills, or the first one: its layout is that of spans."""
    return next((pool for pool in cluster.pools if pool.role != "decode"), cluster.pools[0])


def layout_of(scenario: Scenario) -> ParallelLayout:
    """Return the layout of a scenario's instance; of a cluster with pools, that of its `lead_pool`."""
    if scenario.cluster.pools:
        lead = lead_pool(scenario.cluster)
        return ParallelLayout(tp=lead.tp, stages=lead.stages)
    return ParallelLayout(tp=scenario.layout.tp, stages=scenario.layout.stages, kvp=scenario.layout.kvp)


def latency_of(
    section: LatencySection, device: AcceleratorSpec, shape: ModelShape, layout: ParallelLayout
) -> LatencyModel:
    """Return the latency model of one pipeline stage: a table, a fit, or a roofline."""
    if section.source == "table":
        return TableLatency(store.load(Path(str(section.file)), None))
    if section.source == "fitted":
        from headway.perf.latency.fitted import EngineAssumptions, fitted

        assumptions = EngineAssumptions(batched_prefill=section.batched_prefill)
        return fitted(device, shape, layout, layout.stages - 1, assumptions=assumptions)
    return stage_roofline(section, device, shape, layout)


def stage_roofline(
    section: LatencySection, device: AcceleratorSpec, shape: ModelShape, layout: ParallelLayout
) -> TableLatency:
    """Return the roofline of the slowest stage's rank, with two all-reduces a layer under tensor parallelism.

    All-reduce as a ring: each rank sends and receives 2 (tp - 1) / tp of the activations.
    """
    # the last stage has the LM head
    rank, rates = cut(shape, layout, layout.stages - 1), section.roofline
    share = ModelShape(
        layers=rank.layers,
        hidden=rank.hidden,
        q_heads=rank.q_heads,
        kv_heads=rank.kv_heads,
        head_dim=rank.head_dim,
        mlp=rank.mlp,
        vocab=rank.vocab,
        dtype_bytes=rank.dtype_bytes,
        mlp_matrices=rank.mlp_matrices,
    )
    machine = MachineRates(
        linear_flops=device.flops * rates.linear,
        attention_flops=device.flops * rates.attention,
        bandwidth=device.bandwidth * rates.bandwidth,
        fixed_s=rates.fixed_s + rates.per_layer_s * rank.layers,
        per_decode_s=rates.per_decode_s,
        name=f"{device.name}, {layout.name}",
    )
    source = roofline(share, machine).source
    if layout.tp > 1:
        inside = layout.inside_link(device)
        size = 2.0 * (layout.tp - 1) / layout.tp * rank.hidden * rank.dtype_bytes
        row_s = 2 * rank.layers * size / (inside.bytes_per_s * inside.efficiency)
        # an iteration without rows has no all-reduce, and none of its latency either
        once_s = 2 * rank.layers * inside.latency_s
        rows = np.array([r for r, _ in source.tokens])
        seconds = np.array([s for _, s in source.tokens]) + np.where(rows > 0, once_s + row_s * rows, 0.0)
        source = msgspec.structs.replace(
            source, tokens=tuple((int(r), float(s)) for r, s in zip(rows, seconds, strict=True))
        )
    return TableLatency(source)


def named(scenario: Scenario) -> tuple[AcceleratorSpec, ModelShape]:
    try:
        device = accelerator(scenario.cluster.accelerator)
    except ConfigError as error:
        raise ConfigError(f"cluster.accelerator: {error}") from None
    if isinstance(scenario.model, ModelSection):
        return device, ModelShape(**scenario.model.model_dump())
    try:
        return device, model(scenario.model)
    except ConfigError as error:
        raise ConfigError(f"model: {error}") from None
