"""The rules of a live cluster, made from a cluster file and measured latencies: its policy, the replay of its decision
log, and the same cluster for the simulator.

Used for serving, for replay of a recorded run (`runtime.assembly.cluster`), and by benchmarks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headway.control.log import replay
from headway.core.errors import ConfigError
from headway.core.files import read_lines
from headway.core.logs import LineWriter
from headway.perf.latency.corrected import describe, restore
from headway.perf.latency.groups import ShardExchangeCost
from headway.perf.latency.table import ServingOverhead
from headway.perf.utilisation import mean_base
from headway.policy.iteration.groups import GroupedScheduler
from headway.policy.placement.combinations import WHOLE_REQUESTS
from headway.policy.placement.contract import ClusterInstance, longest_request
from headway.runtime.cluster.client import merged_info
from headway.runtime.cluster.cluster_file import ClusterFile, first_of, nodes_of
from headway.runtime.cluster.driver import ClusterRules
from headway.runtime.cluster.instances import initial_instance
from headway.runtime.cluster.membership import PlacementChain
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import EngineInfo
from headway.sim.build import hosted, serving_of
from headway.sim.cluster.build import MeasuredCluster
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.spec import InstanceSpec

if TYPE_CHECKING:
    from headway.perf.hardware import ModelShape
    from headway.policy.placement.contract import ClusterLinks, PlacementPolicy
    from headway.policy.placement.registry import PolicyContext


def links(file: ClusterFile) -> ClusterLinks:
    """Return the links between a cluster's instances: inside a host, and between hosts."""
    from headway.perf.hardware import NetworkLink
    from headway.policy.placement.contract import ClusterLinks

    host = NetworkLink(
        name="host", bytes_per_s=2e9, latency_s=1e-4, source="assumed: a socket between processes of one host"
    )
    if len(file.hosts) == 1:
        return ClusterLinks(inside=host, across=host)
    # Gbit/s to bytes/s; never above the rate that is assumed within a host.
    rate = min(host.bytes_per_s, file.network_gbit_s * 1e9 / 8)
    network = NetworkLink(name="network", bytes_per_s=rate, latency_s=2e-4, source="network_gbit_s of the cluster file")
    return ClusterLinks(inside=host, across=network)


def open_log(path: str | None) -> LineWriter | None:
    """Open the log of the controller's decisions. Instances write their own logs to FILE.0, FILE.1 and so on."""
    return None if path is None else LineWriter(path)


def sink(log: LineWriter) -> Callable[[bytes], None]:
    """Return a writer of lines. A disk that fails costs no decision; lines wait in memory until it is well again."""

    def write(line: bytes) -> None:
        log.add(line.removesuffix(b"\n"))
        log.flush()

    return write


def check_moves(file: ClusterFile, infos: Sequence[EngineInfo]) -> None:
    """Raise ConfigError when the policy moves KV and a started instance cannot."""
    if not file.combination.moves_kv:
        return
    for number, info in enumerate(infos):
        if info.peer_address is None:
            raise ConfigError(
                f"instance {number} computes on {info.device}: KV moves between pools in host memory only, so that "
                f"such instances {WHOLE_REQUESTS}"
            )


def live_rules(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: LineWriter | None) -> ClusterRules:
    """Return `rules_of` started instances, after `check_moves`; warn once of unused and of small pools."""
    check_moves(file, infos)
    for warning in (*file.combination.idle_pools(), *_shortened(file, infos)):
        logging.getLogger("headway.cluster").warning("%s", warning)
    return rules_of(file, model, infos, log)


def _shortened(file: ClusterFile, infos: Sequence[EngineInfo]) -> list[str]:
    """Return a sentence where the KV pools hold less than the model's context."""
    roles = [pool.role for pool in file.pools for _ in range(pool.count)]
    pools = [info.kv_tokens_total for info in infos]
    each = zip(range(len(infos)), roles, pools, strict=True)
    instances = [ClusterInstance(id=i, node=0, role=role, capacity=tokens) for i, role, tokens in each]
    longest = longest_request(file.placement, file.options, file.combination.whole_prompts, instances)
    served = merged_info(infos, longest)
    if served.max_model_len == served.context_tokens:
        return []
    held = ", ".join(f"pools[{i}] {pools[first]:,}" for i, first in enumerate(first_of(file)))
    said = f"requests of up to {served.max_model_len:,} tokens are served, output included"
    return [f"{said}, not of the model's {served.context_tokens:,}: an instance's KV pool holds {held}"]


def rules_of(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: LineWriter | None = None) -> ClusterRules:
    """Return the policy and latencies that a cluster decides by.

    Spans are predicted with the latencies of the first instance that prefills. log: of decisions, if any.
    """
    from headway.perf.latency import eq1
    from headway.runtime.cluster.driver import DecisionLog

    measured = {}
    if file.group_times is not None:
        measured = {"group_times": msgspec.to_builtins(eq1.load(Path(file.group_times)).sizes)}

    def context_of(info: EngineInfo) -> PolicyContext:
        return policy_context(file, model, {"latency": info.latency, "layout": info.layout} | measured)

    lead = infos[next(first for pool, first in zip(file.pools, first_of(file), strict=True) if pool.role != "decode")]
    about = {"placement": file.placement, "options": file.options, "latency": lead.latency, "layout": lead.layout}
    about |= measured
    context = context_of(lead)
    return ClusterRules(
        policy=policies_of(file, context),
        latency=context.latency,
        latency_of=lambda info: context.latency if info is None or info.latency is None else context_of(info).latency,
        shape=context.shape,
        longest=partial(longest_request, file.placement, file.options, file.combination.whole_prompts),
        rows=file.span_rows,
        log=None if log is None else DecisionLog(sink(log), about),
    )


def policies_of(file: ClusterFile, context: PolicyContext) -> Callable[[], PlacementPolicy]:
    """Return a function that makes the policy; called at the start and whenever instances join or leave."""
    from headway.policy.placement.registry import make_placement

    return lambda: make_placement(file.placement, context, file.options)


def policy_context(file: ClusterFile, model: str, about: Mapping[str, Any]) -> PolicyContext:
    """Return a policy's context: the model's sizes, the links, and latencies.

    about: an instance's `latency` (as `perf.latency.corrected.describe` writes it) and `layout`; `group_times`: the
    coefficients of Eq. (1) by SP size, if groups were measured. Otherwise a ring step costs the longer of what the
    instance computes in it and what its link takes (no constant of another machine); for `pecsched`, which chooses
    between forms of sequence parallelism, a group costs what fast SP's formulas say at the instance's own rates.
    """
    from headway.perf.hardware import ParallelLayout
    from headway.perf.latency import eq1
    from headway.perf.latency.corrected import restore
    from headway.perf.latency.fast_sp import FastSpLatency, measured_rates
    from headway.perf.latency.groups import GroupLatency, RingLatency
    from headway.policy.placement.registry import PolicyContext

    shape, between = shape_of(model), links(file)
    table, _ = restore(about["latency"])
    tp = ParallelLayout.named(about["layout"]).tp
    spans: GroupLatency = RingLatency(table, shape, between.inside, between.across, tp, step_s=0.0)
    measured = about.get("group_times")
    if measured is not None:
        found = eq1.Eq1Latency(msgspec.convert(measured, dict[int, eq1.Eq1Coefficients], strict=False), "measured")
        spans = eq1.completed(found, spans, sum(pool.count for pool in file.pools if pool.role != "decode"))
    elif file.placement == "pecsched":
        rates = measured_rates(table, shape, between.inside, between.across, tp)
        spans = FastSpLatency(spans, shape, rates, tp)
    return PolicyContext(
        latency=spans,
        shape=shape,
        rows=file.span_rows,
        pads_heads=False,
        copies_prefixes=False,
        whole_prompts=file.combination.whole_prompts,
    )


def shape_of(model: str) -> ModelShape:
    """Return the sizes of the checkpoint in folder `model`."""
    from headway.perf.hardware import from_config_file

    return from_config_file(Path(model))


def replay_log(file: ClusterFile, model: str, path: Path) -> tuple[str, bool]:
    """Drive the file's policy from a log; return a summary, and whether all decisions are equal.

    model: the checkpoint's folder. Raises ConfigError for a log of another policy, and for a file that is not a log.
    """

    def make(about: dict[str, Any]) -> PlacementChain:
        # The log's first line has the policy; another one would differ at its first decision.
        if (about.get("placement"), about.get("options")) != (file.placement, file.options):
            raise ConfigError(f"it is of placement {about.get('placement')!r} with options {about.get('options')}")
        return PlacementChain(policies_of(file, policy_context(file, model, about)))

    try:
        decisions, difference = replay(read_lines(path), make)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"replay: {path}: {getattr(error, 'strerror', None) or error}") from error
    if difference is None:
        return f"{decisions} decisions, all as recorded", True
    at_s, recorded, replayed = difference
    return f"decision {decisions} at {at_s:.6f} s: recorded {recorded}, replayed {replayed}", False


class InstanceMeasurement(NamedTuple):
    """What stays of a loaded engine."""

    info: EngineInfo
    """As a started instance reports it, with its latency model."""
    engine: InstanceSpec


class ClusterPlan(NamedTuple):
    """A described cluster whose instances are not started."""

    rules: ClusterRules
    cluster: MeasuredCluster


def measurement(core: EngineCore, config: EngineConfig) -> InstanceMeasurement:
    """Return what an engine that was loaded by its configuration (`dry_run.loaded`) tells of its pool's instances."""
    scheduler = core.scheduler
    info = msgspec.structs.replace(core.info, latency=describe(scheduler.latency))
    exchange = scheduler.exchange if isinstance(scheduler, GroupedScheduler) else ShardExchangeCost()
    latency = restore(info.latency)[0]
    serving = serving_of(latency)
    engine = InstanceSpec(
        config=scheduler.config,
        latency=latency,
        actual_latency=hosted(latency, serving),
        serving=serving or ServingOverhead(),
        # the capacity is that of all KV groups
        kv_tokens=info.kv_tokens_total // scheduler.config.kv_parallel,
        block_tokens=info.kv_block_tokens,
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
        whole_prompts=file.combination.whole_prompts,
        longest=merged_info([info for info, _ in measured], rules.longest(instances)).max_model_len,
        utilisation_base=mean_base([info.utilisation for info, _ in measured]),
    )
    return ClusterPlan(rules, cluster)
