"""Starting the instances of a cluster file, each on the host that the file names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.core.errors import RequestError
from headway.runtime.cluster.cluster_file import LARGEST_POOL, ClusterFile, first_of, nodes_of
from headway.runtime.cluster.launch import host_launcher, launcher
from headway.runtime.cluster.live_instance import Launch, LiveInstance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher.engine_template import TemplatePool
from headway.runtime.launcher.ray_hosts import RayHosts
from headway.runtime.launcher.secret import new_token


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
        """Start an instance that joins `pool`; see `runtime.cluster.instance_roster.Another`. Raises RequestError."""
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
