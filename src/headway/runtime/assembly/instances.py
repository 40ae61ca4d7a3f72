"""Starting the instances of a cluster file: native processes, or vLLM servers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.core.errors import RequestError
from headway.core.machine import free_port
from headway.perf.latency.groups import RingLatency
from headway.perf.latency.table import MachineRates, roofline
from headway.policy.placement.registry import PolicyContext
from headway.runtime.assembly.cluster import links, policies_of, shape_of
from headway.runtime.assembly.facts import eos_ids, longest_context, model_name
from headway.runtime.cluster.client import ClusterClient
from headway.runtime.cluster.cluster_file import LARGEST_POOL, ClusterFile, first_of, nodes_of
from headway.runtime.cluster.driver import ClusterRules
from headway.runtime.cluster.http_backend import HttpInstance, HttpInstanceSettings, LearnedLatency
from headway.runtime.cluster.instances import Launch, LiveInstance
from headway.runtime.cluster.kv_events import events_config
from headway.runtime.cluster.server_command import ServerCommand, server_words
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.process import EngineChild, RemoteEngine
from headway.runtime.engine.protocol import EngineInfo
from headway.runtime.launcher.network import ENGINE, new_token
from headway.runtime.launcher.ray_hosts import RayHosts
from headway.runtime.launcher.standby import EngineTemplate, TemplatePool

log = logging.getLogger("headway.cluster")


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
            log.warning("requests of up to %d tokens are served: the instances' lengths are %s", min(lengths), lengths)
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
) -> Launch:
    """Starts processes of instance `number`, one after another. `folder`: of the cluster, short enough for sockets.
    template: what they are forked from; None: each is started anew."""
    own = folder / str(number)

    def launch(config: EngineConfig, incarnation: int) -> EngineChild:
        own.mkdir(exist_ok=True)
        instance = InstanceConfig(
            number=number, incarnation=incarnation, listen=f"unix:{own}/p{incarnation}", kv_connector=kv_connector
        )
        config = msgspec.structs.replace(config, instance=instance, measured=f"{own}/measured")
        return EngineChild(config, module, own, incarnation, template=template)

    return launch


def host_launcher(number: int, folder: Path, hosts: RayHosts, secret: str, kv_connector: str = "auto") -> Launch:
    """The same in a cluster of several hosts: on that one of them which `hosts` has for the number. Instances then
    speak to each other over TCP, and show that they know `secret`."""
    own = folder / str(number)

    def launch(config: EngineConfig, incarnation: int) -> EngineChild | RemoteEngine:
        instance = InstanceConfig(
            number=number,
            incarnation=incarnation,
            listen=f"tcp:{hosts.address}:0",
            secret=secret,
            kv_connector=kv_connector,
        )
        config = msgspec.structs.replace(config, instance=instance)
        if hosts.node_of(number):
            return RemoteEngine(config, number, hosts)
        own.mkdir(exist_ok=True)
        return EngineChild(msgspec.structs.replace(config, measured=f"{own}/measured"), ENGINE, own, incarnation)

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
        connector = self._file.kv_connector
        if self._hosts is None:
            return launcher(number, self._folder, kv_connector=connector, template=self._templates.of(config))
        return host_launcher(number, self._folder, self._hosts, self._secret, connector)


def joining_config(config: EngineConfig, like: int, number: int, incarnation: int) -> EngineConfig:
    """Return the configuration of instance `like` for one that joins, with an event log of its own.

    The log is FILE.NUMBER, or FILE.NUMBER.INCARNATION where an earlier process had the number, whose log is kept.
    """
    if config.event_log is None:
        return config
    log = f"{config.event_log.removesuffix(f'.{like}')}.{number}" + (f".{incarnation}" if incarnation else "")
    return msgspec.structs.replace(config, event_log=log)
