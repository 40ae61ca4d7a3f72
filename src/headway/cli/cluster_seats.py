"""Instances of a cluster file, each on the host and with the settings that the file says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.cli import serve_options
from headway.cli.options import combine
from headway.core.cpu_affinity import CORES
from headway.core.errors import ConfigError, RequestError
from headway.runtime.cluster.cluster_file import LARGEST_POOL, ClusterFile, computes_alone, moves_kv, nodes_of
from headway.runtime.cluster.launch import host_launcher, launcher
from headway.runtime.cluster.live_instance import Launch, LiveInstance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.launcher.host_coordinator import HostCoordinator
from headway.runtime.launcher.secret import peers_secret

_MEETING = frozenset(("nnodes", "node_rank", "rdzv_endpoint", "rdzv_token", "rdzv_timeout"))
_OF_ALL = _MEETING.union(option.name for option in serve_options.server_options())
"""What there is once: how hosts meet, and the endpoint."""


class InstanceFactory:
    """Starts instances. `folder`: for sockets. host_of: filled with the host of each number, for `meeting`, which there
    is where there are several hosts, whose token is `token`."""

    def __init__(
        self,
        file: ClusterFile,
        configs: Sequence[EngineConfig],
        folder: Path,
        host_of: dict[int, int],
        meeting: HostCoordinator | None = None,
        token: str = "",
    ) -> None:
        self._file, self._configs, self._folder = file, configs, folder
        self._first, self._nodes = first_of(file), nodes_of(file)
        self._host_of, self._meeting, self._token = host_of, meeting, token
        self._made: dict[int, LiveInstance] = {}

    def all(self) -> list[LiveInstance]:
        """Those of the file."""
        pools = [i for i, pool in enumerate(self._file.pools) for _ in range(pool.count)]
        return [
            self._start(number, pool, node, config, 0)
            for number, (pool, node, config) in enumerate(zip(pools, self._nodes, self._configs, strict=True))
        ]

    def another(self, number: int, pool: int, incarnation: int, kv_bytes: int | None) -> LiveInstance:
        """See `runtime.cluster.membership.Another`."""
        if not 0 <= pool < len(self._file.pools):
            raise RequestError(f"pool must be between 0 and {len(self._file.pools) - 1}, not {pool}", "pool")
        others = (each for i, each in self._made.items() if i != number and each.pool == pool)
        if sum(each.state != "left" for each in others) >= LARGEST_POOL:
            raise RequestError(f"pool {pool} has {LARGEST_POOL} instances, which is as many as a pool may have", "pool")
        like = self._first[pool]
        config = joining(self._configs[like], like, number, incarnation)
        if config.kv_cache_bytes is None:  # the same room, however little is free now
            config = msgspec.structs.replace(config, kv_cache_bytes=kv_bytes)
        return self._start(number, pool, self._nodes[like], config, incarnation)

    def _start(self, number: int, pool: int, node: int, config: EngineConfig, incarnation: int) -> LiveInstance:
        host = self._host_of[number] = self._file.pools[pool].host
        role = self._file.pools[pool].role
        launch = self._launcher(number)
        made = LiveInstance(number, role, node, pool, config, launch, incarnation, host)
        self._made[number] = made
        return made

    def _launcher(self, number: int) -> Launch:
        connector = self._file.kv_connector
        if self._meeting is None:
            return launcher(number, self._folder, kv_connector=connector)
        return host_launcher(number, self._folder, self._meeting, peers_secret(self._token), connector)


def first_of(file: ClusterFile) -> list[int]:
    """The number of each pool's first instance."""
    counts = [pool.count for pool in file.pools]
    return [sum(counts[:i]) for i in range(len(counts))]


def instance_configs(
    file: ClusterFile, where: str, model: str, values: dict[str, Any], given: set[str], cores: Sequence[int] = ()
) -> list[EngineConfig]:
    """One engine's settings for each instance. A host's cores and memory that nobody has shared out are shared equally.
    cores: of each host; left out: as many as this one has."""
    configs: list[EngineConfig] = []
    sizes: dict[int, int] = {}
    for i, pool in enumerate(file.pools):
        own, named = combine(serve_options.ALL, argparse.Namespace(), {}, pool.serve, f"{where}: pools[{i}].serve")
        for name in pool.serve:
            if name.replace("-", "_") in _OF_ALL:
                raise ConfigError(f"{where}: pools[{i}].serve.{name}: say that for all of the cluster, in its serve:")
        mine = {**values, **{name: own[name] for name in named}}
        made = serve_options.engine_config(model, mine, given | named)
        made = msgspec.structs.replace(made, nnodes=1, rdzv_endpoint=None, rdzv_token=None)
        workers = made.tensor_parallel_size * made.pipeline_parallel_size * made.kv_parallel_size
        if workers > made.tensor_parallel_size and (moves_kv(file) or pool.role != "mixed"):
            raise ConfigError(
                f"{where}: pools[{i}] is of instances with pipeline stages or KV groups (pipeline- or kv-parallel-size "
                "above 1): these serve whole requests, of role mixed, under jsq, or under fifo, priority or "
                "reservation with `long_sp: 1`"
            )
        if pool.role != "decode":
            sizes.setdefault(made.tensor_parallel_size, i)
        beside = sum(other.count for other in file.pools if other.host == pool.host)
        threads = made.threads or max(1, (cores[pool.host] if cores else len(CORES)) // (beside * workers))
        for _ in range(pool.count):
            log = made.event_log and f"{made.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(made, threads=threads, memory_share=1.0 / beside, event_log=log))
    if len(sizes) > 1 and not computes_alone(file):
        (one, first), (other, second), *_ = sizes.items()
        raise ConfigError(
            f"{where}: tensor-parallel-size is {one} in pools[{first}] and {other} in pools[{second}]: instances that "
            "compute a prompt together must be of the same. Others go under jsq, under fifo, priority or reservation "
            "with `long_sp: 1`, under fixed-sp with `sp: 1`, and under tetris or weave with `sizes: [1]`"
        )
    return configs


def joining(config: EngineConfig, like: int, number: int, incarnation: int) -> EngineConfig:
    """The settings of instance `like` for one that joins: its log is its own, and those before it keep theirs."""
    if config.event_log is None:
        return config
    log = f"{config.event_log.removesuffix(f'.{like}')}.{number}" + (f".{incarnation}" if incarnation else "")
    return msgspec.structs.replace(config, event_log=log)
