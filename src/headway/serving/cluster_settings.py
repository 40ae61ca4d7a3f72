"""The settings of each engine of a cluster: the file's, with the pool's own on top, and its share of the host."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.core.cpu_affinity import CORES
from headway.core.errors import ConfigError
from headway.core.settings import overlay, resolve
from headway.runtime.cluster.cluster_file import ClusterFile, InstancePool, computes_alone, moves_kv
from headway.runtime.engine.config import EngineConfig
from headway.serving.serve_settings import ServeSettings
from headway.serving.settings import EndpointSettings

_MEETING = frozenset(("nnodes", "node_rank", "rdzv_endpoint", "rdzv_token", "rdzv_timeout"))
_CLUSTER_WIDE = _MEETING.union(EndpointSettings.model_fields)
"""Settings that a cluster has once, not a pool each: how hosts meet, and the endpoint."""


def instance_configs(
    file: ClusterFile, where: str, model: str, settings: ServeSettings, cores: Sequence[int] = ()
) -> list[EngineConfig]:
    """Return one engine's settings for each instance, in the order of the pools.

    settings: of the whole cluster; cores: of each host, left out: as many as this one has. A host's cores and memory
    are shared equally by its instances, where the settings do not share them. Raises ConfigError.
    """
    configs: list[EngineConfig] = []
    prefill_sizes: dict[int, int] = {}
    """By tensor-parallel size, the first pool of that size that prefills."""
    for i, pool in enumerate(file.pools):
        engine = _pool_config(file, pool, f"{where}: pools[{i}]", model, settings)
        if pool.role != "decode":
            prefill_sizes.setdefault(engine.tensor_parallel_size, i)
        on_host = sum(other.count for other in file.pools if other.host == pool.host)
        host_cores = cores[pool.host] if cores else len(CORES)
        threads = engine.threads or max(1, host_cores // (on_host * _workers(engine)))
        for _ in range(pool.count):
            log = engine.event_log and f"{engine.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(engine, threads=threads, memory_share=1.0 / on_host, event_log=log))
    if len(prefill_sizes) > 1 and not computes_alone(file):
        (one, first), (other, second), *_ = prefill_sizes.items()
        raise ConfigError(
            f"{where}: tensor-parallel-size is {one} in pools[{first}] and {other} in pools[{second}]: instances that "
            "compute a prompt together must be of the same. Others go under jsq, under fifo, priority or reservation "
            "with `long_sp: 1`, under fixed-sp with `sp: 1`, and under tetris or weave with `sizes: [1]`"
        )
    return configs


def _pool_config(
    file: ClusterFile, pool: InstancePool, where: str, model: str, settings: ServeSettings
) -> EngineConfig:
    """The settings of one engine of a pool, before it has its share of a host."""
    own = resolve(ServeSettings, file=pool.serve, origin=f"{where}.serve")
    for name in pool.serve:
        if name.replace("-", "_") in _CLUSTER_WIDE:
            raise ConfigError(f"{where}.serve.{name}: say that for all of the cluster, in its serve:")
    engine = overlay(settings, own).engine_config(model)
    # An instance is of one host: `nnodes` is the cluster's.
    engine = msgspec.structs.replace(engine, nnodes=1, rdzv_endpoint=None, rdzv_token=None)
    if _workers(engine) > engine.tensor_parallel_size and (moves_kv(file) or pool.role != "mixed"):
        raise ConfigError(
            f"{where} is of instances with pipeline stages or KV groups (pipeline- or kv-parallel-size above 1): these "
            "serve whole requests, of role mixed, under jsq, or under fifo, priority or reservation with `long_sp: 1`"
        )
    return engine


def _workers(engine: EngineConfig) -> int:
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.kv_parallel_size
