"""Compile a scenario with a placement to a `ClusterSpec`, and simulate it, or one whose engines were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from headway.core.errors import ConfigError
from headway.perf.hardware import AcceleratorSpec, ModelShape, link
from headway.perf.latency.groups import GroupLatency, RingLatency, ShardedDecode
from headway.perf.utilisation import mean_base
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.placement.contract import (
    ALL_CAPABILITIES,
    HTTP_CAPABILITIES,
    ClusterInstance,
    ClusterLinks,
    PlacementPolicy,
    longest_request,
)
from headway.policy.placement.registry import make_placement
from headway.sim.build import (
    InfeasibleError,
    config_of,
    hosted,
    lead_pool,
    named,
    plan_memory,
    run_of,
    serving_of,
    shaped_instance,
    workload_of,
)
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.cluster.state import ClusterResult, ClusterSpec
from headway.sim.scenario import PoolSection, Scenario
from headway.sim.spec import InstanceSpec
from headway.sim.workload import TraceRequest


def run_cluster(
    scenario: Scenario,
    seed: int,
    *,
    keep_bars: bool = False,
    stopwatch: Callable[[], float] | None = None,
    measured: ClusterSpec | None = None,
) -> ClusterResult:
    """Simulate one seed of a scenario with a placement. measured: instances in place of the described ones."""
    requests = workload_of(scenario, seed)
    if measured is not None:
        _check_lengths(measured, requests)
    spec = cluster_of(scenario, requests) if measured is None else measured
    placement = placement_of(scenario, spec)
    return simulate_cluster(
        spec,
        placement,
        requests,
        run_of(scenario, seed),
        keep_bars=keep_bars,
        stopwatch=stopwatch,
    )


def _check_lengths(spec: ClusterSpec, requests: Sequence[TraceRequest]) -> None:
    """Raise InfeasibleError when a request is longer than the instances serve: a live cluster refuses it."""
    longest = max(request.prompt_tokens + request.output_tokens for request in requests)
    if longest > spec.longest:
        raise InfeasibleError(
            f"the longest request has {longest:,} tokens, and the instances serve up to {spec.longest:,} "
            "(max_model_len): set workload.max_prompt, or serve.max_model_len"
        )


def placement_of(scenario: Scenario, spec: ClusterSpec) -> PlacementPolicy:
    """Return the placement policy that the scenario names. It predicts spans with the simulator's own model."""
    name = scenario.cluster.placement
    if name is None:
        raise ConfigError("cluster.placement is missing: it names the policy")
    return make_placement(name, spec.policy_context, scenario.cluster.options)


def cluster_of(scenario: Scenario, requests: Sequence[TraceRequest]) -> ClusterSpec:
    """Return the cluster that a scenario describes. Raises InfeasibleError where an instance's memory is too small."""
    device, shape = named(scenario)
    cluster, combination = scenario.cluster, scenario.combination
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    config = config_of(scenario)
    kv_tokens = [pool.kv_tokens or _kv_tokens(scenario, device, shape, pool, config, longest) for pool in cluster.pools]
    each = zip(cluster.pools, kv_tokens, strict=True)
    pools = [shaped_instance(scenario, config, pool.layout, tokens) for pool, tokens in each]
    specs = [spec for pool, spec in zip(cluster.pools, pools, strict=True) for _ in range(pool.count)]
    # spans run on instances that prefill: the first such pool sets the span's layout
    lead = lead_pool(cluster)
    lead_spec = pools[cluster.pools.index(lead)]
    links = ClusterLinks(inside=device.inside, across=link(cluster.network) if cluster.network else device.across)
    ring = RingLatency(lead_spec.latency, shape, links.inside, links.across, lead.tp)

    instances = tuple(_instances(cluster.pools, kv_tokens, device))
    return ClusterSpec(
        instances=instances,
        longest=longest_request(combination.placement, combination.options, combination.whole_prompts, instances),
        engine=partial(engine_of, specs, links, shape.layers, cluster.masters == "all"),
        spans=_spans(scenario, ring, device, shape, lead),
        serving=lead_spec.serving,
        shape=shape,
        links=links,
        backends=cluster.backends,
        sends_layers=cluster.sends_layers,
        rows=cluster.span_rows,
        # servers have their own blocks, and move none
        kv_reservations=cluster.kv_reservations and not combination.over_http,
        capabilities=HTTP_CAPABILITIES if combination.over_http else ALL_CAPABILITIES,
        whole_prompts=combination.whole_prompts,
        utilisation_base=mean_base([spec.utilisation_base for spec in specs]),
    )


def engine_of(
    alone: Sequence[InstanceSpec], links: ClusterLinks, layers: int, all_masters: bool, group: Sequence[ClusterInstance]
) -> InstanceSpec:
    """Return the engine of an instance, or of a group. alone: of each instance. all_masters: all members of a group
    compute layers outside attention, as LoongServe has it, and not one of them all."""
    spec = alone[group[0].id]
    if len(group) == 1:
        return spec
    # a group across nodes exchanges over the slower link
    link = links.inside if len({instance.node for instance in group}) == 1 else links.across
    latency = ShardedDecode(spec.latency, len(group), layers, link, len(group) if all_masters else 1)
    kv_tokens = sum(instance.capacity for instance in group)
    return replace(spec, latency=latency, actual_latency=hosted(latency, serving_of(spec.latency)), kv_tokens=kv_tokens)


def _instances(
    pools: Sequence[PoolSection], kv_tokens: Sequence[int], device: AcceleratorSpec
) -> Iterator[ClusterInstance]:
    """Yield the instances of all pools, on nodes that no two pools share. kv_tokens: of each pool's instances."""
    count, node = 0, 0
    for pool, capacity in zip(pools, kv_tokens, strict=True):
        each = pool.per_node or max(1, device.per_node // pool.layout.accelerators)
        for number in range(pool.count):
            # a node is full
            if number and number % each == 0:
                node += 1
            yield ClusterInstance(
                id=count, node=node, role=pool.role, tp=pool.tp, stages=pool.stages, capacity=capacity * pool.kvp
            )
            count += 1
        node += 1


def _spans(
    scenario: Scenario, ring: RingLatency, device: AcceleratorSpec, shape: ModelShape, lead: PoolSection
) -> GroupLatency:
    section = scenario.cluster.spans
    if section.source == "ring":
        return ring
    if section.source == "fast-sp":
        from headway.perf.latency.fast_sp import FastSpLatency, SpRates

        reached = scenario.latency.roofline
        rates = SpRates.of(device, section.node_gbit_s, reached.linear, reached.attention, reached.bandwidth)
        return FastSpLatency(ring, shape, msgspec.structs.replace(rates, ring_loss=section.ring_loss), lead.tp)
    from headway.perf.latency import eq1

    return eq1.tetris_table1() if section.source == "tetris-table1" else eq1.load(Path(str(section.file)))


def _kv_tokens(
    scenario: Scenario,
    device: AcceleratorSpec,
    shape: ModelShape,
    pool: PoolSection,
    config: SchedulerConfig,
    longest: int,
) -> int:
    """Return the KV tokens that fit beside the weights and the activations of one chunk."""
    if scenario.memory.kv_tokens is not None:
        return scenario.memory.kv_tokens
    # a whole prompt is spread over a group as spans, so no instance holds activations of all its rows
    chunked = replace(config, chunking="static:8192") if config.chunking == "whole" else config
    # only a decode instance must hold the longest request alone
    needed = longest if pool.role == "decode" else 1
    return plan_memory(device, shape, pool.layout, chunked, (1, needed), scenario.memory.utilisation).kv_tokens
