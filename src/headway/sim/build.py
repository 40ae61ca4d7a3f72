"""Compile a validated scenario to the arguments of `simulate`: hardware, model shape, latencies, memory, requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.core.logs import EventSink
from headway.perf.device import gib
from headway.perf.hardware import AcceleratorSpec, ModelShape, ParallelLayout, accelerator, link, model, rank_shape
from headway.perf.latency import table
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.groups import ShardExchangeCost, between_groups
from headway.perf.latency.table import HostedLatency, MachineRates, ServingOverhead, TableLatency, roofline
from headway.perf.utilisation import UtilisationBase
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.calibration import is_event_log, recorded_trace
from headway.sim.loop import simulate
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.result import SimResult
from headway.sim.scenario import (
    ClusterSection,
    LatencySection,
    ModelSection,
    PoolSection,
    Scenario,
    SessionsSection,
    WorkloadSection,
)
from headway.sim.spec import InstanceSpec, RunSpec, StageLink, VllmSection, VllmSpec, stock_flags
from headway.sim.workload import TraceRequest, transforms
from headway.sim.workload.generate import (
    ArrivalProcess,
    MixPart,
    WorkloadPreset,
    arrivals,
    check_classes,
    final_classes,
    parse_lengths,
    preset,
)
from headway.sim.workload.traces import MOST_REQUESTS, RequestTrace, read_trace
from headway.sim.workload.transforms import rewrite

if TYPE_CHECKING:
    from headway.sim.cluster.state import ClusterResult, ClusterSpec


# Memory plan of an instance: weights, activations and KV of the fullest rank against the device's memory.
#
# Activations are those of one layer at its widest for the largest iteration: `max_num_batched_tokens` rows with chunked
# prefill, the longest prompt with `whole` (for which whole-prompt prefill runs out of memory).


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank, in bytes."""

    usable: int
    """Device memory × the share that may be used."""
    weights: int
    activations: int
    kv_bytes_per_token: int
    """This rank's share of a token's KV."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of whole requests that the KV cache of this rank's group holds; each rank stores its share of them."""
        return max(0, self.usable - self.weights - self.activations) // self.kv_bytes_per_token


class InfeasibleError(ConfigError):
    """Raised for a layout that does not fit in memory. Sweeps report it as a point without runs instead of stopping."""


def plan_memory(
    device: AcceleratorSpec,
    shape: ModelShape,
    layout: ParallelLayout,
    config: SchedulerConfig,
    longest: tuple[int, int],
    utilisation: float,
) -> MemoryPlan:
    """Return the plan of the fullest rank. `longest`: (tokens of the longest prompt, tokens of the longest request).

    Raises InfeasibleError, with the numbers, where the longest request does not fit.
    """
    ranks = [rank_shape(shape, layout, stage) for stage in {0, layout.stages - 1}]
    rank = max(ranks, key=lambda r: r.weight_bytes)
    rows = longest[0] if config.chunking == "whole" else min(config.max_num_batched_tokens, _static(config))
    # residual and normalised input, plus the wider of attention (QKV and its output) and MLP (up and down input)
    widest = 2 * rank.hidden + max(rank.qkv[1] + rank.out[0], rank.up[1] + rank.mlp)
    # one row of logits for each sequence, in float32
    logits = config.max_num_seqs * rank.vocab * 4
    plan = MemoryPlan(
        usable=int(device.capacity * utilisation),
        weights=rank.weight_bytes,
        activations=rows * widest * rank.dtype_bytes + logits,
        # stages may hold different numbers of layers: the one with most layers limits the tokens
        kv_bytes_per_token=max(r.kv_bytes_per_token for r in ranks),
    )
    # KV groups share one request, so together they must hold the longest
    if plan.kv_tokens * layout.kvp < longest[1]:
        raise InfeasibleError(
            f"{layout.name} on {device.name}: of {gib(plan.usable)} usable a device, weights take {gib(plan.weights)} "
            f"and activations of {rows:,} rows {gib(plan.activations)}; that leaves KV for {plan.kv_tokens:,} tokens "
            f"({plan.kv_bytes_per_token:,} bytes a token and rank) and the longest request has {longest[1]:,}"
        )
    return plan


def _static(config: SchedulerConfig) -> int:
    kind, _, tokens = config.chunking.partition(":")
    return int(tokens) if kind == "static" else config.max_num_batched_tokens


# Compile a scenario's workload section to requests: draws, traces, cuts. All randomness comes from the run's seed.

DEFAULT_REQUESTS = 1000


def requests_of(section: WorkloadSection, window_s: float | None, seed: int) -> list[TraceRequest]:
    """Return the workload of one run, by arrival, each request with a class. Raises ConfigError when none is left, and
    for a negative seed."""
    if seed < 0:
        raise ConfigError(f"seed {seed}: seeds are whole numbers from 0")
    # a stream of its own: noise and patience are seeded apart, so that they do not change the requests
    rng = np.random.default_rng([seed, 1])
    if section.sessions is not None:
        requests = _sessions(section, section.sessions, rng)
    else:
        requests = _traced(section, rng) if section.trace else _drawn(section, window_s, rng)
    if section.long_rule is not None:
        requests = rewrite(requests, section.long_rule, rng)
    if section.long_share is not None:
        requests = _with_longs(requests, section, rng)
    # lengths are cut after the long ones are put in, so that max_prompt bounds those too
    requests = transforms.clip_lengths(requests, section.max_prompt, section.max_output)
    requests = transforms.classify(requests[: section.requests], section.long_threshold)
    if section.concurrency is not None:
        requests = transforms.close_loop(requests, section.concurrency)
    if window_s is not None:
        requests = [request for request in requests if request.arrival_s < window_s or request.waits]
    if not requests:
        raise ConfigError("workload: no request is left after slicing and cutting")
    return requests


def classes_of(section: WorkloadSection) -> set[str]:
    """Return the classes that the workload's requests may have, drawn or not. Reads the trace, if it is one."""
    if section.long_rule is not None:
        return {"short", "long"}
    if section.trace:
        names = {request.klass for trace in _read(section) for request in trace.requests}
    else:
        parts = preset(section.preset).parts if section.preset else section.mix or ()
        names = {part.klass for part in parts}
    return final_classes(names) | ({"long"} if section.long_share is not None else set())


def _drawn(section: WorkloadSection, window_s: float | None, rng: np.random.Generator) -> list[TraceRequest]:
    mix = preset(section.preset) if section.preset else _mix(section)
    return mix.draw(rng, _arrivals(section, section.qps or 1.0), draws_of(section, window_s))


def draws_of(section: WorkloadSection, window_s: float | None) -> int:
    """Return how many requests are drawn for a window, which then cuts those that arrive later."""
    if section.draws is not None:
        return section.draws
    rate = section.qps or 1.0
    if section.concurrency is not None:
        return section.requests or max(DEFAULT_REQUESTS, 10 * section.concurrency)
    if section.requests is None and window_s is not None:
        # expected arrivals, six standard deviations more (cv scales them), and 50 for short windows
        count = window_s * rate + 6 * (window_s * rate) ** 0.5 * max(1.0, section.cv) + 50
        if count > MOST_REQUESTS:
            raise ConfigError(
                f"{rate:g} requests a second for {window_s:g} s are more than {MOST_REQUESTS:,} requests: give fewer "
                "(workload.qps, run.window_s)"
            )
        return int(count)
    return section.requests or DEFAULT_REQUESTS


def _mix(section: WorkloadSection) -> WorkloadPreset:
    parts = tuple(
        MixPart(part.share, part.klass, parse_lengths(part.prompt), parse_lengths(part.output, "output"))
        for part in section.mix or ()
    )
    return WorkloadPreset("given", "given", parts)


class _AtOnce:
    """Arrival process with every request at time 0."""

    def times(self, rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.zeros(count)


def _arrivals(section: WorkloadSection, rate: float) -> ArrivalProcess:
    if section.arrivals == "at-once" or section.concurrency is not None:
        return _AtOnce()
    return arrivals(section.arrivals or "poisson", rate, section.cv)


def _traced(section: WorkloadSection, rng: np.random.Generator) -> list[TraceRequest]:
    traces = _read(section)
    for trace in traces:
        if trace.session_clock:
            raise ConfigError(f"{trace.name}: its sessions have no common clock: give workload.sessions")
    requests = transforms.rebase(request for trace in traces for request in trace.requests)
    if section.slice:
        requests = transforms.slice_by(requests, section.slice)
    # files of lengths only get Poisson arrivals unless the scenario names others
    timeless = next((trace for trace in traces if not trace.has_arrivals), None)
    kind = "at-once" if section.concurrency else section.arrivals or ("poisson" if timeless else "trace")
    if kind != "trace":
        return transforms.with_arrivals(requests, _arrivals(section, section.qps or 1.0), rng)
    if timeless:
        raise ConfigError(f"workload.arrivals: {timeless.name} holds no arrival times; choose poisson and a qps")
    return requests if section.qps is None else transforms.rescale_to_rate(requests, section.qps)


def _read(section: WorkloadSection) -> list[RequestTrace]:
    """Read the traces. Texts of different ones share nothing."""
    assert section.trace is not None
    names = (section.trace,) if isinstance(section.trace, str) else section.trace
    traces = [recorded_trace(Path(name)) if is_event_log(Path(name)) else read_trace(name) for name in names]
    return [traces[0], *(transforms.in_namespace(trace, n) for n, trace in enumerate(traces[1:], start=1))]


def _sessions(section: WorkloadSection, sessions: SessionsSection, rng: np.random.Generator) -> list[TraceRequest]:
    """Return the requests of closed sessions, which start at random."""
    requests = [request for trace in _read(section) for request in trace.requests]
    if not all(request.session for request in requests):
        raise ConfigError("workload.sessions: the trace has requests without a session")
    return transforms.close_sessions(
        requests, _arrivals(section, section.qps or 1.0), rng,
        count=sessions.count, turns=sessions.turns, think=sessions.think, max_think_s=sessions.max_think_s,
    )  # fmt: skip


def _with_longs(requests: list[TraceRequest], section: WorkloadSection, rng: np.random.Generator) -> list[TraceRequest]:
    """Replace a random share of the requests by draws of the long preset; arrival times stay."""
    assert section.long_share is not None
    # drawn for every request, used or not, so that another share keeps the same lengths
    longs = preset(section.long_preset).draw(rng, _AtOnce(), len(requests))
    chosen = rng.random(len(requests)) < section.long_share
    return [
        TraceRequest(old.arrival_s, new.prompt_tokens, new.output_tokens, klass="long") if pick else old
        for old, new, pick in zip(requests, longs, chosen.tolist(), strict=True)
    ]


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
    stopwatch: Callable[[], float] | None = None,
    measured: ClusterSpec | None = None,
) -> ScenarioRun:
    """Simulate one seed of a scenario. measured: instances in place of those that `scenario.cluster` describes."""
    if scenario.cluster.placement is not None:
        # imported late: `cluster.build` imports this module
        from headway.sim.cluster.build import run_cluster

        cluster = run_cluster(scenario, seed, keep_bars=detail.bars, stopwatch=stopwatch, measured=measured)
        return ScenarioRun(cluster.sim, cluster)
    requests = workload_of(scenario, seed)
    run = run_of(scenario, seed, detail.iterations)
    spec = instance_of(scenario, requests)
    return ScenarioRun(simulate(spec, requests, run, stopwatch=stopwatch, log=detail.event_log))


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
    """Return the scheduler's settings; of vLLM, the plugged policy's, by which memory is planned. Raises ConfigError on
    an impossible value."""
    if scenario.engine == "vllm":
        return _vllm_config_of(scenario)
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
    return HostedLatency(latency, serving.iteration_s) if serving is not None and serving.iteration_s else None


def instance_of(scenario: Scenario, requests: list[TraceRequest]) -> InstanceSpec:
    """Return one instance, with the KV cache that memory leaves. Raises InfeasibleError when it does not fit."""
    config = config_of(scenario)
    device, shape = named(scenario)
    layout = layout_of(scenario)
    kv_tokens = scenario.memory.kv_tokens
    if kv_tokens is None:
        # (longest prompt, longest request): the first bounds activations, the second KV
        longest = (max(r.prompt_tokens for r in requests), max(r.prompt_tokens + r.output_tokens for r in requests))
        kv_tokens = plan_memory(device, shape, layout, config, longest, scenario.memory.utilisation).kv_tokens
    return shaped_instance(scenario, config, layout, kv_tokens)


def shaped_instance(
    scenario: Scenario, config: SchedulerConfig, layout: ParallelLayout, kv_tokens: int
) -> InstanceSpec:
    """Return an instance of a layout, alone or of a cluster. kv_tokens: of each of its KV groups."""
    device, shape = named(scenario)
    between = link(scenario.layout.link) if scenario.layout.link else layout.stage_link(device)
    devices = layout.accelerators
    latency = latency_of(scenario.latency, device, shape, layout, scenario.engine)
    serving = serving_of(latency)
    return InstanceSpec(
        config=replace(config, stages=layout.stages, kv_parallel=layout.kvp),
        latency=latency,
        actual_latency=hosted(latency, serving),
        serving=serving or ServingOverhead(),
        kv_tokens=kv_tokens,
        block_tokens=scenario.memory.block_tokens,
        # instances of several KV groups cache no prefixes
        prefix_cache=prefix_cache_of(scenario, shape) if layout.kvp == 1 else None,
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


def _vllm_config_of(scenario: Scenario) -> SchedulerConfig:
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
    by_priority, threshold = stock_flags(section.scheduler)
    return VllmSpec(
        **dict(section),
        num_blocks=kv_tokens // section.block_size,
        by_priority=by_priority,
        long_prefill_token_threshold=threshold,
        plugged=config if section.scheduler == "plugged" else None,
    )


def run_of(scenario: Scenario, seed: int, keep_iterations: bool = False) -> RunSpec:
    return RunSpec(
        **dict(scenario.run),
        replicas=scenario.cluster.replicas,
        seed=seed,
        targets=scenario.slo,
        keep_iterations=keep_iterations,
    )


def lead_pool(cluster: ClusterSection) -> PoolSection:
    """Return the first of a cluster's pools that prefills: its layout is that of spans."""
    return next(pool for pool in cluster.pools if pool.role != "decode")


def layout_of(scenario: Scenario) -> ParallelLayout:
    """Return the layout of a scenario's instance; of a cluster with pools, that of its `lead_pool`."""
    if scenario.cluster.pools:
        return lead_pool(scenario.cluster).layout
    return ParallelLayout(tp=scenario.layout.tp, stages=scenario.layout.stages, kvp=scenario.layout.kvp)


def latency_of(
    section: LatencySection,
    device: AcceleratorSpec,
    shape: ModelShape,
    layout: ParallelLayout,
    engine: Literal["headway", "vllm"] = "headway",
) -> LatencyModel:
    """Return the latency model of one pipeline stage: a table, a fit (with the engine's libraries), or a roofline."""
    if section.source == "table":
        return TableLatency(table.load(Path(str(section.file)), None))
    if section.source == "fitted":
        from headway.perf.latency.device_fit import EngineAssumptions
        from headway.perf.latency.fitted import FRONT, fitted_source

        assumptions = EngineAssumptions(engine=section.engine or engine)
        source = fitted_source(device, shape, layout, layout.stages - 1, assumptions=assumptions)
        front = FRONT if assumptions.engine == "vllm" else None
        if section.front is not None:
            front = ServingOverhead().with_way_of(table.load(Path(section.front), None).serving or ServingOverhead())
        return TableLatency(msgspec.structs.replace(source, serving=front))
    return stage_roofline(section, device, shape, layout)


def stage_roofline(
    section: LatencySection, device: AcceleratorSpec, shape: ModelShape, layout: ParallelLayout
) -> TableLatency:
    """Return the roofline of the slowest stage's rank, with two all-reduces a layer under tensor parallelism.

    All-reduce as a ring: each rank sends and receives 2 (tp - 1) / tp of the activations.
    """
    # the last stage has the LM head
    rank, rates = rank_shape(shape, layout, layout.stages - 1), section.roofline
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
