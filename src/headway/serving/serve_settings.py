"""Settings of `headway serve`, named as in vLLM where vLLM has them, and of each engine of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from pydantic import Field, create_model

from headway.core.errors import ConfigError
from headway.core.file_sections import LEAST_AIM_S, MOST_AIM_S, parsed_by
from headway.core.machine import CORES
from headway.core.settings import (
    ByteSize,
    Flag,
    Milliseconds,
    Seconds,
    SettingsModel,
    Text,
    TokenCount,
    WholeNumber,
    overlay,
    resolve,
)
from headway.perf.device import check, has_driver
from headway.policy.iteration.config import FOLLOWS_FROM_LAYOUT, SchedulerConfig
from headway.policy.placement.combinations import PoolShape
from headway.runtime.cluster.cluster_file import ClusterFile, InstancePool
from headway.runtime.engine.config import EngineConfig
from headway.runtime.model.config import check_dtype
from headway.serving.settings import EndpointSettings, ServerSettings


def _shown_as(metavar: str) -> dict[str, Any]:
    """Set the placeholder of the value in `--help`, where the last word of the name is not a good one."""
    return {"metavar": metavar}


class EngineSettings(SettingsModel):
    """What an operator may set about the engine: model, memory, layout, hosts, restarts, logs."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16"], parsed_by(check_dtype)] = Field(
        "auto", description="type of weights and KV: auto (the checkpoint's), float32 or bfloat16"
    )
    device: Annotated[str, parsed_by(check)] = Field(
        "auto",
        description="where to compute: cpu, cuda, cuda:N (the first worker's device), or auto (cuda if there is a "
        "device for each worker, else cpu); CUDA is experimental: this version has not been run on a GPU",
    )
    max_model_len: TokenCount | None = Field(
        None,
        description="longest prompt plus output, in tokens; 128k is 128,000, 128K is 131,072",
        json_schema_extra=_shown_as("LEN"),
    )
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="memory for keys and values, e.g. 4G; default: half of what is free, at most two full "
        "contexts and 256K tokens in each KV group",
        json_schema_extra=_shown_as("SIZE"),
    )
    prefix_cache: Flag | None = Field(
        None,
        description="keep the KV of prompts and answers until memory is needed, and reuse it for prompts that begin "
        "alike; default: true, but false with KV groups or --event-log, where it is not possible",
    )
    threads: WholeNumber | None = Field(
        None,
        description="compute threads of each worker; default: one worker uses the number that a measurement at start "
        "finds fastest, and a single thread while other processes keep the cores busy; several share the cores",
        json_schema_extra=_shown_as("N"),
    )
    tensor_parallel_size: WholeNumber = Field(
        1,
        description="workers that every layer is split over, by attention heads and MLP width",
        json_schema_extra=_shown_as("T"),
    )
    pipeline_parallel_size: WholeNumber = Field(
        1,
        description="stages that the layers are split into; each worker computes one",
        json_schema_extra=_shown_as("S"),
    )
    kv_parallel_size: WholeNumber = Field(
        1,
        description="KV groups: copies of the model, each with requests of its own, that together hold the KV cache of "
        "a long request",
        json_schema_extra=_shown_as("K"),
    )
    kv_shard_tokens: TokenCount | None = Field(
        None,
        description="tokens of one request that a KV group holds before the next group takes more; default: as many as "
        "a decode can read within --t-target-ms",
        json_schema_extra=_shown_as("TOKENS"),
    )
    nnodes: WholeNumber = Field(
        1,
        description="hosts that the workers are spread over: this one, and nodes of the Ray cluster at --ray-address",
        json_schema_extra=_shown_as("N"),
    )
    ray_address: Text | None = Field(
        None,
        description="HOST:PORT of the Ray cluster whose nodes are the hosts, or auto; not needed for one host",
        json_schema_extra=_shown_as("ADDRESS"),
    )
    max_queued_requests: WholeNumber = Field(
        1024, description="requests that may wait before new ones get 429", json_schema_extra=_shown_as("N")
    )
    latency_profile: Text = Field(
        "auto",
        description="where predicted times come from: auto (a cached profile, else quick), quick (measured at start in "
        "less than a second), or a FILE that `headway profile` wrote",
        json_schema_extra=_shown_as("FILE"),
    )
    worker_timeout: Seconds = Field(
        10.0,
        description="seconds without a heartbeat after which a worker or an engine on another host counts as lost "
        "and is started again; an iteration may take this long, or 20 times its prediction if that is more",
        json_schema_extra=_shown_as("SECONDS"),
    )
    standby: Flag | None = Field(
        None,
        description="keep a spare process with the weights loaded: when an engine's process dies, a new one is forked "
        "from it, without loading the model again; default: true for engines of one process on the CPU, all on one "
        "host, where it is possible",
    )
    max_restarts: WholeNumber = Field(
        3,
        description="restarts of lost workers or engines within 60 s of running; after one more loss the server ends",
        json_schema_extra=_shown_as("N"),
    )
    event_log: Text | None = Field(
        None,
        description="write each decision of the scheduler, and what it was based on, to this JSON-lines file, which "
        "`headway why`, `trace` and `watch` read; an older file is renamed to FILE.until-TIME",
        json_schema_extra=_shown_as("FILE"),
    )


_MILLISECONDS = {"t_target_s": "t_target_ms"}
"""`SchedulerConfig` fields in seconds that users write in milliseconds."""
_MILLISECOND_LIMITS = {"t_target_s": {"ge": 1000 * LEAST_AIM_S, "le": 1000 * MOST_AIM_S}}
_SCHEDULER_NAMES = {"policy": "scheduling_policy", **_MILLISECONDS}
"""Settings whose names differ from those of their `SchedulerConfig` fields."""
_SCHEDULER_INTERNAL = FOLLOWS_FROM_LAYOUT | {"pipeline_schedule", "medha"}
"""Fields of `SchedulerConfig` that are no settings of a server."""


def _scheduler_fields() -> dict[str, Any]:
    """Return a setting for each field of `SchedulerConfig`; help texts and limits are those of the field."""
    made: dict[str, Any] = {}
    for field in fields(SchedulerConfig):
        if field.name in _SCHEDULER_INTERNAL:
            continue
        default, text = field.default, str(field.metadata["help"])
        if field.name in _MILLISECONDS:
            text = text.replace("seconds", "milliseconds")
        kind: Any = Text
        if field.name in _MILLISECONDS:
            kind = Milliseconds
        elif isinstance(default, int):
            kind = WholeNumber
        # Checked here too, so that an error has the setting's name and unit.
        limits: dict[str, Any] = _MILLISECOND_LIMITS.get(field.name, {})
        made[_SCHEDULER_NAMES.get(field.name, field.name)] = (kind, Field(default, description=text, **limits))
    made["mode"] = (
        Text,
        Field("default", description="default, or paper: the scheduler of the Medha paper, as printed there"),
    )
    return made


if TYPE_CHECKING:

    class SchedulerSettings(SettingsModel):
        """What an operator may set about the scheduler: the fields of `SchedulerConfig`."""

        mode: Literal["default", "paper"]

else:
    SchedulerSettings = create_model("SchedulerSettings", __base__=SettingsModel, **_scheduler_fields())


_GROUPS = {
    "address and keys": ("host", "port", "api_key", "admin_key", "allowed_hosts", "allowed_origins"),
    "model": (
        "model", "revision", "download_dir", "served_model_name", "chat_template", "dtype", "device", "max_model_len",
    ),
    "memory": ("kv_cache_memory", "prefix_cache"),
    "processes and hosts": (
        "threads", "tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size", "kv_shard_tokens", "nnodes",
        "ray_address",
    ),
    "limits": ("max_queued_requests", "max_body_bytes", "request_timeout_s"),
    "failures": ("standby", "worker_timeout", "max_restarts", "journal", "drain_timeout_s"),
    "logs and traces": ("event_log", "live_page", "otlp_traces_endpoint", "log_level", "log_format"),
}  # fmt: skip


def group_of(name: str) -> str:
    """Return the title under which `--help` shows a setting; "scheduling" for one in no list."""
    return next((title for title, names in _GROUPS.items() if name in names), "scheduling")


class ServeSettings(EndpointSettings, SchedulerSettings, EngineSettings):
    """Every setting of `headway serve`."""

    @property
    def scheduler(self) -> dict[str, Any]:
        """Return the fields of `SchedulerConfig` that were given; the mode decides the others."""
        given: dict[str, Any] = {}
        for field in fields(SchedulerConfig):
            name = _SCHEDULER_NAMES.get(field.name, field.name)
            # Only given values: defaults of these settings are not those of the mode.
            if name in self.model_fields_set:
                value = getattr(self, name)
                given[field.name] = value / 1000.0 if field.name in _MILLISECONDS and value is not None else value
        return given

    def effective(self) -> dict[str, Any]:
        """Return all values, with the mode's defaults for scheduler settings that were not given."""
        scheduler = SchedulerConfig.named(self.mode, **self.scheduler)
        shown = self.model_dump()
        for field in fields(SchedulerConfig):
            name = _SCHEDULER_NAMES.get(field.name, field.name)
            if name in shown:
                value = getattr(scheduler, field.name)
                shown[name] = round(value * 1000.0, 6) if field.name in _MILLISECONDS and value is not None else value
        return shown

    @property
    def caches_prefixes(self) -> bool:
        """Return whether prefixes are cached: as asked for, else where it is possible."""
        possible = self.kv_parallel_size == 1 and self.event_log is None
        return possible if self.prefix_cache is None else self.prefix_cache

    @property
    def keeps_standby(self) -> bool:
        """Return whether engines are forked from a standby process: as asked for, else where it is possible."""
        workers = self.tensor_parallel_size * self.pipeline_parallel_size * self.kv_parallel_size
        on_cpu = self.device == "cpu" or (self.device == "auto" and not has_driver())
        return (workers == 1 and self.nnodes == 1 and on_cpu) if self.standby is None else self.standby

    def engine_config(self, model: str) -> EngineConfig:
        """Return the configuration of an engine for the checkpoint in folder `model`.

        Raises ConfigError for scheduler settings that contradict each other.
        """
        SchedulerConfig.named(self.mode, **self.scheduler)
        same = {name: getattr(self, name) for name in EngineConfig.__struct_fields__ if name in type(self).model_fields}
        different = {
            "model": model,
            # Bytes; None: sized to the memory that is free.
            "kv_cache_bytes": self.kv_cache_memory,
            "prefix_cache": self.caches_prefixes,
            "scheduler": self.scheduler,
            "worker_timeout_s": self.worker_timeout,
            "standby": self.keeps_standby,
        }
        return EngineConfig(**{**same, **different})

    def server_settings(self) -> ServerSettings:
        """Return the HTTP server's settings."""
        return ServerSettings(**{name: getattr(self, name) for name in EndpointSettings.model_fields})


_CLUSTER_WIDE = frozenset(("nnodes", "ray_address")).union(EndpointSettings.model_fields)
"""Settings of the whole cluster that a pool cannot override: the hosts, and the endpoint."""


def instance_configs(
    file: ClusterFile, where: str, model: str, settings: ServeSettings, cores: Sequence[int] = ()
) -> list[EngineConfig]:
    """Return the engine configuration of each instance, in the order of the pools.

    settings: of the whole cluster; cores: number of cores of each host, by default that of this host. Threads
    and memory that the settings do not give are equal shares of the host's. Raises ConfigError.
    """
    configs: list[EngineConfig] = []
    shapes: list[PoolShape] = []
    for i, pool in enumerate(file.pools):
        engine = _pool_config(file, pool, f"{where}: pools[{i}]", model, settings)
        cut = engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.kv_parallel_size
        shapes.append(PoolShape(pool.role, pool.count, *cut))
        on_host = sum(other.count for other in file.pools if other.host == pool.host)
        host_cores = cores[pool.host] if cores else len(CORES)
        threads = engine.threads or max(1, host_cores // (on_host * _workers(engine)))
        for _ in range(pool.count):
            # One log per instance: FILE.0, FILE.1, ... in the order of the pools.
            log = engine.event_log and f"{engine.event_log}.{len(configs)}"
            configs.append(msgspec.structs.replace(engine, threads=threads, memory_share=1.0 / on_host, event_log=log))
    if (refusal := replace(file.combination, pools=shapes).refusal()) is not None:
        raise ConfigError(f"{where}: {refusal}")
    return configs


def shared_cores(file: ClusterFile, configs: Sequence[EngineConfig]) -> list[str]:
    """Return a sentence where this host's instances (those of host 0) have more threads than it has cores; else
    nothing. The cores of other hosts are not known here."""
    hosts = [pool.host for pool in file.pools for _ in range(pool.count)]
    here = [config for where, config in zip(hosts, configs, strict=True) if where == 0]
    threads = sum((config.threads or 1) * _workers(config) for config in here)
    if threads <= len(CORES):
        return []
    words = f"{len(here)} instances of host 0 have {threads} threads on {len(CORES)} cores: they take turns, and "
    words += (
        f"compute up to {threads / len(CORES):.3g} times as slowly as one alone, which predictions take no account of"
    )
    return [words]


def too_many_threads(config: EngineConfig) -> list[str]:
    """Return a sentence where one host's workers have more threads than it has cores; else nothing."""
    threads = (config.threads or 1) * _workers(config)
    if threads <= len(CORES) or config.nnodes > 1:
        return []
    return [f"{threads} threads on {len(CORES)} cores take turns, which is slower: give fewer, or leave threads out"]


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
    return merged.engine_config(model)


def _workers(engine: EngineConfig) -> int:
    return engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.kv_parallel_size
