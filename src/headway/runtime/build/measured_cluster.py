"""A cluster file and one loaded instance of each pool, as the cluster that the simulator takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headway.perf.hardware.utilisation import mean_base
from headway.perf.latency.recorded import describe, restore
from headway.perf.latency.shard_exchange import ShardExchangeCost
from headway.policy.iteration.grouped_scheduler import GroupedScheduler
from headway.runtime.build.cluster_rules import links, rules_of
from headway.runtime.cluster.client import ClusterRules
from headway.runtime.cluster.cluster_file import ClusterFile, nodes_of
from headway.runtime.cluster.live_instance import initial_instance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import EngineInfo
from headway.sim.cluster.measured import MeasuredCluster, MeasuredEngine
from headway.sim.prefix_cache import PrefixCacheSpec


class InstanceMeasurement(NamedTuple):
    """What stays of a loaded engine."""

    info: EngineInfo
    """As a started instance reports it, with its latency model."""
    engine: MeasuredEngine


class ClusterPlan(NamedTuple):
    """A described cluster whose instances are not started."""

    rules: ClusterRules
    cluster: MeasuredCluster


def measurement(core: EngineCore, config: EngineConfig) -> InstanceMeasurement:
    """Return what an engine that was loaded by its configuration (`dry_run.loaded`) tells of its pool's instances."""
    scheduler = core.scheduler
    info = msgspec.structs.replace(core.info, latency=describe(scheduler.latency))
    exchange = scheduler.exchange if isinstance(scheduler, GroupedScheduler) else ShardExchangeCost()
    engine = MeasuredEngine(
        config=scheduler.config,
        latency=restore(info.latency)[0],
        block_tokens=info.kv_block_tokens,
        max_model_len=info.max_model_len,
        exchange=exchange,
        prefix_cache=PrefixCacheSpec(eviction=config.prefix_cache_policy) if config.prefix_cache else None,
    )
    return InstanceMeasurement(info, engine)


def cluster_plan(
    file: ClusterFile, model: str, configs: Sequence[EngineConfig], measured: Sequence[InstanceMeasurement]
) -> ClusterPlan:
    """Return the cluster. configs and measured: of each instance, in the order of the pools; model: the checkpoint's
    folder."""
    roles = [pool.role for pool in file.pools for _ in range(pool.count)]
    each = zip(nodes_of(file), roles, configs, measured, strict=True)
    instances = tuple(
        initial_instance(i, node, role, config, info.kv_tokens_total)
        for i, (node, role, config, (info, _)) in enumerate(each)
    )
    rules = rules_of(file, model, [info for info, _ in measured])
    cluster = MeasuredCluster(
        instances=instances,
        engines=tuple(engine for _, engine in measured),
        spans=rules.latency,
        shape=rules.shape,
        links=links(file),
        backends=file.backends,
        rows=rules.rows,
        utilisation_base=mean_base([info.utilisation for info, _ in measured]),
    )
    return ClusterPlan(rules, cluster)
