"""Settings of each engine of a cluster: the file's, overridden by the pool's, with a share of the host's resources."""

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

_CLUSTER_WIDE = frozenset(("nnodes", "ray_address")).union(EndpointSettings.model_fields)
"""Settings of the whole cluster that a pool cannot override: the hosts, and the endpoint."""


def instance_configs(
    file: ClusterFile, where: str, model: str, settings: ServeSettings, cores: Sequence[int] = ()
) -> list[EngineConfig]:
    """Return one engine's settings for each instance, in the order of the pools.

    settings: of the whole cluster; cores: number of cores of each host, by default that of this host. A host's cores
    and memory are divided equally among its instances, where the settings do not divide them. Raises ConfigError.
    """
    configs: list[EngineConfig] = []
    prefill_sizes: dict[int, int] = {}
    """First pool that prefills, by tensor-parallel size."""
    for i, pool in enumerate(file.pools):
        engine = _pool_config(file, pool, f"{where}: pools[{i}]", model, settings)
        if pool.role != "decode":
            prefill_sizes.setdefault(engine.tensor_parallel_size, i)
        on_host = sum(other.count for other in file.pools if other.host == pool.host)
        host_cores = cores[pool.host] if cores else len(CORES)
        threads = engine.threads or max(1, host_cores // (on_host * _workers(engine)))
        for _ in range(pool.count):
            # One log per instance: FILE.0, FILE.1, ... in the order of the pools.
            log = engine.event_log and f"{engine.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(engine, threads=threads, memory_share=1.0 / on_host, event_log=log))
    if len(prefill_sizes) > 1 and not computes_alone(file):
        (one, first), (other, second), *_ = prefill_sizes.items()
        raise ConfigError(
            f"{where}: tensor-parallel-size is {one} in pools[{first}] and {other} in pools[{second}]: instances that "
            "compute a prompt together must be of the same. Others go under jsq, under fifo, priority or reservation "
            "with `long_sp: 1`, under fixed-sp with `sp: 1`, and under tetris with `sizes: [1]`"
        )
    return configs


def shared_cores(file: ClusterFile, configs: Sequence[EngineConfig], host: int = 0) -> list[str]:
    """Return a sentence where the host's instances have more threads than it has cores; else nothing."""
    hosts = [pool.host for pool in file.pools for _ in range(pool.count)]
    here = [config for where, config in zip(hosts, configs, strict=True) if where == host]
    threads = sum((config.threads or 1) * _workers(config) for config in here)
    if threads <= len(CORES):
        return []
    words = f"{len(here)} instances of host {host} have {threads} threads on {len(CORES)} cores: they take turns, and "
    words += (
        f"compute up to {threads / len(CORES):.3g} times as slowly as one alone, which predictions take no account of"
    )
    return [words]


def _pool_config(
    file: ClusterFile, pool: InstancePool, where: str, model: str, settings: ServeSettings
) -> EngineConfig:
    """Return the configuration of one engine of a pool, without its share of the host."""
    own = resolve(ServeSettings, file=pool.serve, origin=f"{where}.serve")
    for name in pool.serve:
        if name.replace("-", "_") in _CLUSTER_WIDE:
            raise ConfigError(f"{where}.serve.{name}: say that for all of the cluster, in its serve:")
    merged = overlay(settings, own)
    if merged.standby and file.hosts != {0}:
        raise ConfigError(f"{where}: standby is for instances that are all on one host: leave it out")
    engine = merged.engine_config(model)
    # KV moves between instances whose ranks are cut by heads only.
    if _workers(engine) > engine.tensor_parallel_size and (moves_kv(file) or pool.role != "mixed"):
        raise ConfigError(
            f"{where} is of instances with pipeline stages or KV groups (pipeline- or kv-parallel-size above 1): these "
            "serve whole requests, of role mixed, under jsq, or under fifo, priority or reservation with `long_sp: 1`"
        )
    return engine


def _workers(engine: EngineConfig) -> int:
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.kv_parallel_size
