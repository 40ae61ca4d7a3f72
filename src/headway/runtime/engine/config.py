"""Settings with which an engine process is started, limits of its restarts, and counters that survive them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from headway.core.errors import ConfigError, HeadwayError
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.protocol import EngineStats

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

    def rank_address(self, rank: int) -> str:
        """Return the address on which a rank listens: the same port, or a socket of its own."""
        return f"{self.listen}.{rank}" if self.listen.startswith("unix:") else self.listen


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
    """Order in which cached blocks give way (`kv.prefix_index.EVICTION_POLICIES`): the least recently used first."""
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
    """Engines are forked from a process that has loaded the model (`runtime.launcher.standby`)."""
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


NUMERICS = {
    # Threads that wait for each other spin for some tenths of a millisecond, then sleep. Spinning on, the
    # default, makes a prefill up to three times slower as soon as one other process is busy on two cores; not
    # spinning at all doubles the time of a decode step on an idle machine. A tenth of this adds 15% and more to
    # it (reference checkpoint in fp32, Xeon with AVX-512); beside a busy process it takes a tenth off, and adds
    # 7% to a pass of 256 rows.
    "GOMP_SPINCOUNT": "10000",
    # oneDNN keeps about 1.6 MB a shape of matrix product, for 1,024 shapes; chunks have any number of rows.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    "LRU_CACHE_CAPACITY": "64",
    # Weights and KV lie in pages of 2 MiB, where the system gives them out on request: a prefill of 2,048 rows takes
    # 4 to 7% less time, attention of a decode at 16K tokens 10% less.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Environment variables of a process that computes. They only work when set before torch is imported."""


def settle() -> None:
    """Apply `NUMERICS` to this process, for commands that compute in their own."""
    for name, value in NUMERICS.items():
        os.environ.setdefault(name, value)


class GaveUpError(HeadwayError):
    """The limit of restarts was reached: the caller must not retry."""


class RestartLimit:
    """Allows `limit` restarts within `window_s` seconds in which the component was up.

    The duration of restarts, which may be long, does not count: a component that loads for minutes and dies at once
    reaches the limit too. what: names the component in the error.
    """

    def __init__(self, limit: int, what: str, window_s: float = 60.0) -> None:
        self.limit = limit
        self.window_s = window_s
        self._what = what
        self._losses: deque[float] = deque()
        """When restarts were counted, in seconds that the component had been up by then since its first restart."""
        self._uptime_s = 0.0
        self._up_s: float | None = None

    def record_up(self, now: float) -> None:
        """Note that a restart is complete."""
        self._up_s = now

    def spend(self, now: float, why: str) -> None:
        """Count one more restart. Raises GaveUpError, with the reason `why` of this loss, when it is one too many."""
        if self._up_s is not None:
            self._uptime_s += now - self._up_s
        self._up_s = None
        while self._losses and self._uptime_s - self._losses[0] > self.window_s:
            self._losses.popleft()
        if len(self._losses) >= self.limit:
            raise GaveUpError(
                f"{why}; {self._what} started again {self.limit} times within {self.window_s:g} s of running, which is "
                "the limit"
            )
        self._losses.append(self._uptime_s)


class PoisonRequestTracker:
    """Counts for each request the losses of workers at which it lost KV.

    A request that was being computed at every loss may be their cause, however long it takes to do harm.
    """

    def __init__(self) -> None:
        self._losses: dict[str, int] = {}

    def record_loss(self, requests: Iterable[str], live: Iterable[str], limit: int) -> list[str]:
        """Count a loss of workers at which `requests` lost KV. Returns the live requests with more than `limit` losses.

        These should not be started again.
        """
        # Counts of ended requests are dropped, so the table does not grow.
        alive = set(live)
        counted = {name: self._losses.get(name, 0) for name in alive}
        for name in alive.intersection(requests):
            counted[name] += 1
        self._losses = {name: count for name, count in counted.items() if count}
        return sorted(name for name, count in self._losses.items() if count > limit)


_COUNTERS = tuple(
    name for name in EngineStats.__struct_fields__ if name.endswith("_total") and name != "kv_tokens_total"
)
_NOTHING = EngineStats()


def accumulate_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return `now` with the counters of `before` added. Gauges are those of `now`."""
    # The common case, without a restart: no copy for each message.
    if before == _NOTHING:
        return now
    totals = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    busy = {(group, stage): seconds for group, stage, seconds in before.stage_busy_s}
    for group, stage, seconds in now.stage_busy_s:
        busy[group, stage] = busy.get((group, stage), 0.0) + seconds
    stages = tuple((*key, seconds) for key, seconds in sorted(busy.items()))
    return msgspec.structs.replace(now, **totals, stage_busy_s=stages)
