"""Settings with which an engine process is started: filled from the command line, sent to the process as JSON."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headway.core.errors import ConfigError
from headway.perf.latency.layout import ParallelLayout

_PREFIX_CACHE_ALONE = (
    "prefix-cache needs an engine without KV groups, and in a cluster no event log: leave out kv-parallel-size or "
    "event-log, or prefix-cache"
)
HOST_TIMEOUT_S = 600.0
"""How long to wait for hosts, at first and when one is lost: a node takes minutes to start."""
RAY_ADDRESS_NEEDED = (
    "several hosts need --ray-address: HOST:PORT of a Ray cluster, or auto on a host that is part of one "
    "(docs/how-to/several-hosts.md)"
)


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine that is an instance of a cluster."""

    number: int
    incarnation: int = 0
    """How many processes had this number before."""
    listen: str
    """Where the engine accepts other instances: `unix:PATH` or `tcp:HOST:0`."""
    secret: str = ""
    """Shared by all instances; may be empty over sockets in a folder that only this user can enter."""
    room_s: float = 30.0
    """Seconds for which a span may wait for free KV blocks."""
    kv_connector: str = "auto"
    """How KV moves to other instances (`runtime.kv_transfer.connector`)."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine."""

    model: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    attention_backend: str = "auto"
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    memory_share: float = 1.0
    """The part of the free memory that this engine may use."""
    block_size: int = 64
    """Tokens in a KV block: a prefix is shared by whole blocks, and a block costs one entry of an index."""
    prefix_cache: bool = False
    """Keep the KV of prompts until memory is needed, and share it with prompts that begin alike."""
    prefix_cache_policy: str = "lru"
    """Order in which cached blocks give way (`kv.eviction.EVICTION_POLICIES`): the least recently used first."""
    threads: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    kv_parallel_size: int = 1
    pipeline_schedule: Literal["stream", "microbatch"] = "stream"
    nnodes: int = 1
    ray_address: str | None = None
    """Where the Ray cluster is whose nodes are the hosts."""
    channel_token: str | None = None
    """Authenticates an engine's connection to its server where that is on another host."""
    max_queued_requests: int = 1024
    mode: Literal["default", "paper"] = "default"
    scheduler: dict[str, Any] = {}
    """The fields of `SchedulerConfig` that differ from its mode's."""
    latency_profile: str = "auto"
    event_log: str | None = None
    live_page: bool = False
    """Whether samples of the iterations are sent to the server."""
    worker_timeout_s: float = 10.0
    engine_timeout_s: float = 1.5
    """Seconds without a heartbeat after which the engine's process counts as stopped, on its server's host."""
    hang_factor: float = 20.0
    """An iteration hangs that takes `worker_timeout_s`, and so many times its predicted time: predictions of an unknown
    model are wrong by a few times, not by twenty."""
    max_restarts: int = 3
    restart_window_s: float = 60.0
    """Seconds of running in which at most `max_restarts` restarts are tried."""
    standby: bool = False
    """Engines are forked from a process that has loaded the model (`runtime.launcher.engine_template`)."""
    measured: str | None = None
    """Path whose beginning is that of files for what an engine measures when it starts, for those that take its place.
    None: each measures."""
    log_level: str = "info"
    log_format: str = "text"
    instance: InstanceConfig | None = None
    """None: the engine is not part of a cluster."""

    @property
    def layout(self) -> ParallelLayout:
        """The degrees of parallelism that the settings ask for."""
        return ParallelLayout(
            tp=self.tensor_parallel_size, stages=self.pipeline_parallel_size, kvp=self.kv_parallel_size
        )

    def __post_init__(self) -> None:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "kv_parallel_size")
        for name in ("max_model_len", "kv_cache_bytes", "threads", *sizes):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, not {value}")
        logged = self.event_log is not None
        if self.prefix_cache and (self.kv_parallel_size > 1 or (logged and self.instance is not None)):
            raise ConfigError(_PREFIX_CACHE_ALONE)
        if self.kv_parallel_size == 1 and "kv_shard_tokens" in self.scheduler:
            raise ConfigError("kv-shard-tokens says how KV groups share a request: it needs kv-parallel-size above 1")
        if self.worker_timeout_s < 1.0:
            raise ConfigError(f"worker-timeout must be at least 1 s, not {self.worker_timeout_s:g}")
        self._check_hosts()
        if self.standby and (self.layout.accelerators > 1 or self.nnodes > 1):
            raise ConfigError(
                "standby keeps the weights of an engine of one process on this host: leave out the parallel sizes and "
                "nnodes, or standby"
            )
        if self.max_restarts < 0:
            raise ConfigError(f"max-restarts must be at least 0, not {self.max_restarts}")
        if self.max_queued_requests < 1:
            raise ConfigError(f"max-queued-requests must be at least 1, not {self.max_queued_requests}")

    def _check_hosts(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"nnodes must be at least 1, not {self.nnodes}")
        if self.nnodes == 1:
            return
        if self.ray_address is None:
            raise ConfigError(RAY_ADDRESS_NEEDED)
        if self.layout.accelerators % self.nnodes:
            raise ConfigError(
                f"{self.layout.name} has {self.layout.accelerators} workers, which cannot be spread evenly over "
                f"nnodes {self.nnodes}"
            )
