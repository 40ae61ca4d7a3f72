"""A live cluster, made from a cluster file and measured latencies: its rules (the policy and its predictions), the
replay of its decision log, the same cluster for the simulator, and the start of its instances: native processes, or
vLLM servers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from headway.control.log import replay
from headway.core.errors import ConfigError, RequestError
from headway.core.files import read_lines
from headway.core.logs import EventSink
from headway.core.machine import free_port
from headway.perf.hardware import ModelShape, NetworkLink, ParallelLayout, from_config_file
from headway.perf.latency import eq1
from headway.perf.latency.corrected import describe, restore
from headway.perf.latency.fast_sp import FastSpLatency, measured_rates
from headway.perf.latency.groups import GroupLatency, RingLatency, ShardExchangeCost
from headway.perf.latency.table import MachineRates, ServingOverhead, roofline
from headway.perf.utilisation import mean_base
from headway.policy.iteration.groups import GroupedScheduler
from headway.policy.placement.combinations import WHOLE_REQUESTS
from headway.policy.placement.contract import ClusterInstance, ClusterLinks, PlacementPolicy, longest_request
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.runtime.assembly.facts import eos_ids, longest_context, model_name
from headway.runtime.cluster.client import ClusterClient, merged_info
from headway.runtime.cluster.cluster_file import LARGEST_POOL, ClusterFile, first_of, nodes_of
from headway.runtime.cluster.driver import ClusterRules
from headway.runtime.cluster.http_backend import HttpInstance, HttpInstanceSettings, LearnedLatency
from headway.runtime.cluster.instances import Launch, LiveInstance, initial_instance
from headway.runtime.cluster.kv_events import events_config
from headway.runtime.cluster.membership import PlacementChain
from headway.runtime.cluster.server_command import ServerCommand, server_words
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.process import EngineProcess, start_engine, start_engine_elsewhere
from headway.runtime.engine.protocol import EngineInfo
from headway.runtime.launcher.processes import ENGINE, new_token
from headway.runtime.launcher.ray_hosts import RayHosts
from headway.runtime.launcher.standby import EngineTemplate, TemplatePool
from headway.sim.build import hosted, serving_of
from headway.sim.cluster.build import engine_of
from headway.sim.cluster.state import ClusterSpec
from headway.sim.prefix_cache import PrefixCacheSpec
from headway.sim.spec import InstanceSpec

_log = logging.getLogger("headway.cluster")


def links(file: ClusterFile) -> ClusterLinks:
    """Return the links between a cluster's instances: inside a host, and between hosts."""
    host = NetworkLink(
        name="host", bytes_per_s=2e9, latency_s=1e-4, source="assumed: a socket between processes of one host"
    )
    if len(file.hosts) == 1:
        return ClusterLinks(inside=host, across=host)
    # Gbit/s to bytes/s; never above the rate that is assumed within a host.
    rate = min(host.bytes_per_s, file.network_gbit_s * 1e9 / 8)
    network = NetworkLink(name="network", bytes_per_s=rate, latency_s=2e-4, source="network_gbit_s of the cluster file")
    return ClusterLinks(inside=host, across=network)


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


def live_rules(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: EventSink | None) -> ClusterRules:
    """Return `rules_of` started instances, after `check_moves`; warn once of unused and of small pools."""
    check_moves(file, infos)
    for warning in (*file.combination.idle_pools(), *_shortened(file, infos)):
        _log.warning("%s", warning)
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


def rules_of(file: ClusterFile, model: str, infos: Sequence[EngineInfo], log: EventSink | None = None) -> ClusterRules:
    """Return the policy and latencies that a cluster decides by.

    Spans are predicted with the latencies of the first instance that prefills. log: of decisions, if any.
    """
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
        log=log,
        about=about,
    )


def policies_of(file: ClusterFile, context: PolicyContext) -> Callable[[], PlacementPolicy]:
    """Return a function that makes the policy; called at the start and whenever instances join or leave."""
    return lambda: make_placement(file.placement, context, file.options)


def policy_context(file: ClusterFile, model: str, about: Mapping[str, Any]) -> PolicyContext:
    """Return a policy's context: the model's sizes, the links, and latencies.

    about: an instance's `latency` (as `perf.latency.corrected.describe` writes it) and `layout`; `group_times`: the
    coefficients of Eq. (1) by SP size, if groups were measured. Otherwise a ring step costs the longer of what the
    instance computes in it and what its link takes (no constant of another machine); for `pecsched`, which chooses
    between forms of sequence parallelism, a group costs what fast SP's formulas say at the instance's own rates.
    """
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
    cluster: ClusterSpec


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
    engines, network = [engine for _, engine in measured], links(file)
    cluster = ClusterSpec(
        instances=instances,
        engine=partial(engine_of, engines, network, rules.shape.layers, False),
        spans=rules.latency,
        shape=rules.shape,
        serving=engines[0].serving,
        links=network,
        backends=file.backends,
        # A live scheduler's prompt leaves when it is complete.
        sends_layers=False,
        pads_heads=False,
        copies_prefixes=False,
        rows=rules.rows,
        whole_prompts=file.combination.whole_prompts,
        longest=merged_info([info for info, _ in measured], rules.longest(instances)).max_model_len,
        utilisation_base=mean_base([info.utilisation for info, _ in measured]),
    )
    return ClusterPlan(rules, cluster)


def instance_settings(file: ClusterFile, model: str, folder: Path) -> list[HttpInstanceSettings]:
    """Return where each instance is, by number. folder: for the output of servers that the cluster starts."""
    found: list[HttpInstanceSettings] = []
    # Those that prefill come last: policies see the others, whose numbers have no gaps.
    for i, pool in sorted(enumerate(file.pools), key=lambda item: item[1].role == "prefill"):
        events = pool.kv_events or (None,) * len(pool.urls)
        found += [HttpInstanceSettings(i, url, None, pool.role, at) for url, at in zip(pool.urls, events, strict=True)]
        for _ in range(0 if pool.urls else pool.count):
            number, port = len(found), free_port()
            config, address = events_config(folder.resolve() / f"kv-{number}")
            words = server_words(pool.command, model, number, port, config)
            process = ServerCommand(words, port, folder / f"instance-{number}.log")
            at = address if any(config in word for word in words) else None
            found.append(HttpInstanceSettings(i, process.url, process, pool.role, at))
    return found


def http_cluster(
    file: ClusterFile, model: str, folder: Path, rates: MachineRates, api_key: str | None = None
) -> ClusterClient:
    """Return a cluster of servers with vLLM's HTTP API. folder: see `instance_settings`. rates: where predictions start
    from. api_key: sent to the servers."""
    shape, between = shape_of(model), links(file)
    source = f"roofline of {rates.name}"
    base = RingLatency(roofline(shape, rates), shape, between.inside, between.across, source=source)
    latency = LearnedLatency(base)
    context = PolicyContext(
        latency=latency,
        shape=shape,
        rows=file.span_rows,
        copies_prefixes=False,
        whole_prompts=True,
        relative_s=latency.relative,
    )
    facts = EngineInfo(
        model=model_name(model),
        architecture="decoder",
        dtype="their own precision",
        device="http",
        max_model_len=longest_context(Path(model)),
        context_tokens=longest_context(Path(model)),
        vocab_size=shape.vocab,
        kv_tokens_total=0,
        kv_block_tokens=0,
        policy=file.placement,
        chunking="the servers' own",
        mode="placement",
        t_target_s=0.0,
        max_num_seqs=0,
        max_queued_requests=0,
        parameters=shape.parameters,
        weights_bytes=0,
        kv_bytes=0,
        eos_token_ids=eos_ids(Path(model)),
        layout="server",
        profile=latency.source,
    )
    rules = ClusterRules(policy=policies_of(file, context), latency=latency, shape=shape)

    def made(infos: Sequence[EngineInfo]) -> ClusterRules:
        lengths = [info.max_model_len for info in infos]
        if len(set(lengths)) > 1:
            _log.warning("requests of up to %d tokens are served: the instances' lengths are %s", min(lengths), lengths)
        return rules

    def another(number: int, pool: int, incarnation: int, kv_bytes: int | None) -> LiveInstance:
        raise RequestError("instances of backend vllm are those of the cluster file: add it there, and restart", "pool")

    instances = [
        HttpInstance(number, settings, latency, facts, shape.kv_bytes_per_token, api_key)
        for number, settings in enumerate(instance_settings(file, model, folder))
    ]
    return ClusterClient(instances, between, made, placement=file.placement, another=another)


def launcher(
    number: int,
    folder: Path,
    module: str = ENGINE,
    kv_connector: str = "auto",
    template: EngineTemplate | None = None,
    hosts: RayHosts | None = None,
    secret: str = "",
) -> Launch:
    """Return what starts the processes of instance `number`, one after another.

    folder: of the cluster, short enough for sockets. template: what they are forked from; None: each is started anew.
    hosts: where the cluster is on several hosts; the process starts on that one which `hosts` has for the number.
    Instances then speak to each other over TCP, and show that they know `secret`.
    """
    own = folder / str(number)

    def launch(config: EngineConfig, incarnation: int) -> EngineProcess:
        listen = f"unix:{own}/p{incarnation}" if hosts is None else f"tcp:{hosts.address}:0"
        instance = InstanceConfig(
            number=number, incarnation=incarnation, listen=listen, secret=secret, kv_connector=kv_connector
        )
        config = msgspec.structs.replace(config, instance=instance)
        if hosts is not None and hosts.node_of(number):
            return start_engine_elsewhere(config, number, hosts, module)
        own.mkdir(exist_ok=True)
        return start_engine(
            msgspec.structs.replace(config, measured=f"{own}/measured"), module, own, incarnation, template
        )

    return launch


class InstanceFactory:
    """Starts the instances of a cluster, and others that join it later."""

    def __init__(
        self,
        file: ClusterFile,
        configs: Sequence[EngineConfig],
        folder: Path,
        host_of: dict[int, int],
        hosts: RayHosts | None = None,
    ) -> None:
        """Prepare to start instances.

        configs: of each instance, in the order of the pools; folder: for sockets; host_of: filled with the host of each
        instance number; hosts: None where all instances run on this one.
        """
        self._file, self._configs, self._folder = file, configs, folder
        self._first, self._nodes = first_of(file), nodes_of(file)
        self._host_of, self._hosts = host_of, hosts
        self._secret = new_token()
        """Known to the instances of several hosts alone."""
        self._templates = TemplatePool()
        # The newest instance of each number, those that have left included.
        self._started: dict[int, LiveInstance] = {}

    def start_all(self) -> list[LiveInstance]:
        """Start all instances of the file; return them by number. They load concurrently."""
        pools = [i for i, pool in enumerate(self._file.pools) for _ in range(pool.count)]
        return [
            self._start(number, pool, node, config, 0)
            for number, (pool, node, config) in enumerate(zip(pools, self._nodes, self._configs, strict=True))
        ]

    def start_another(self, number: int, pool: int, incarnation: int, kv_bytes: int | None) -> LiveInstance:
        """Start an instance that joins `pool`; see `runtime.cluster.client.Another`. Raises RequestError."""
        if not 0 <= pool < len(self._file.pools):
            raise RequestError(f"pool must be between 0 and {len(self._file.pools) - 1}, not {pool}", "pool")
        # An instance that joins in place of its predecessor does not count twice.
        others = (each for i, each in self._started.items() if i != number and each.pool == pool)
        if sum(each.state != "left" for each in others) >= LARGEST_POOL:
            raise RequestError(f"pool {pool} has {LARGEST_POOL} instances, which is as many as a pool may have", "pool")
        # A joining instance is a copy of its pool's first one: same settings, host and node.
        first = self._first[pool]
        config = joining_config(self._configs[first], first, number, incarnation)
        if config.kv_cache_bytes is None:  # as large a pool as the others', whatever is free now
            config = msgspec.structs.replace(config, kv_cache_bytes=kv_bytes)
        return self._start(number, pool, self._nodes[first], config, incarnation)

    def _start(self, number: int, pool: int, node: int, config: EngineConfig, incarnation: int) -> LiveInstance:
        host = self._host_of[number] = self._file.pools[pool].host
        role = self._file.pools[pool].role
        instance = LiveInstance(number, role, node, pool, config, self._launcher(number, config), incarnation, host)
        self._started[number] = instance
        return instance

    def close(self) -> None:
        """End what is kept for instances to come. Their own processes are ended by the caller."""
        self._templates.close()

    def _launcher(self, number: int, config: EngineConfig) -> Launch:
        connector, hosts = self._file.kv_connector, self._hosts
        if hosts is None:
            return launcher(number, self._folder, ENGINE, connector, self._templates.of(config))
        return launcher(number, self._folder, ENGINE, connector, hosts=hosts, secret=self._secret)


def joining_config(config: EngineConfig, like: int, number: int, incarnation: int) -> EngineConfig:
    """Return the configuration of instance `like` for one that joins, with an event log of its own.

    The log is FILE.NUMBER, or FILE.NUMBER.INCARNATION where an earlier process had the number, whose log is kept.
    """
    if config.event_log is None:
        return config
    log = f"{config.event_log.removesuffix(f'.{like}')}.{number}" + (f".{incarnation}" if incarnation else "")
    return msgspec.structs.replace(config, event_log=log)
