"""Composition root of an engine: from settings to a ready `EngineCore`, with measurements that later processes reuse.

The model runs in this process (`single_process`) or in several, on one or several hosts; then this one needs no torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from headway.core.batch import ClockProtocol, Executor
from headway.core.errors import CheckpointError, ConfigError
from headway.core.files import read_input, read_json
from headway.core.logs import EventSink, LogSink
from headway.core.machine import CORES
from headway.kv.block_manager import BlockManager
from headway.kv.prefix_cache import PrefixCache
from headway.perf.device import DeviceAssignment, available_bytes, choose, gib, processor_name
from headway.perf.hardware import ParallelLayout
from headway.perf.latency import table
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import CorrectedLatency, describe
from headway.perf.latency.groups import exchange_of
from headway.perf.latency.table import TableLatency, TableSource
from headway.perf.utilisation import UtilisationBase, utilisation_base
from headway.policy.iteration.admission import make_prefix_cache
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.iteration.config import LONG_TOKENS, SchedulerConfig
from headway.policy.iteration.groups import make_scheduler
from headway.runtime.assembly.facts import eos_ids, model_name
from headway.runtime.engine.config import HOST_TIMEOUT_S, EngineConfig, RestartLimit
from headway.runtime.engine.core import EngineCore, IterationSampler
from headway.runtime.engine.liveness import IterationDeadline
from headway.runtime.engine.protocol import EngineInfo
from headway.runtime.executor import profiling
from headway.runtime.executor.multi_process import MultiProcessExecutor, ProcessTransport
from headway.runtime.executor.plans import RankConfig
from headway.runtime.executor.profiling import check_memory, check_shape, look_apart, need, parameters
from headway.runtime.launcher.processes import warm
from headway.runtime.launcher.ray_hosts import RayHosts, join_ray, node_of
from headway.runtime.model.config import DecoderConfig, read_config

if TYPE_CHECKING:
    from headway.runtime.assembly.single_process import LoadedDecoder


T = TypeVar("T")


def remembered(file: str | None, kind: type[T], measure: Callable[[], T]) -> T:
    """Return what an earlier process has written to `file`; without that, `measure()`, which is then written there.

    file: None, measure each time. A file that cannot be read or written changes nothing but the time.
    """
    if file is None:
        return measure()
    path = Path(file)
    with suppress(OSError, msgspec.MsgspecError, RecursionError):
        return msgspec.json.decode(read_input(path), type=kind)
    made = measure()
    with suppress(OSError):
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(made))
        scratch.replace(path)
    return made


log = logging.getLogger("headway.engine")


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its executor. Sizes are totals over all ranks unless a field says otherwise."""

    executor: Executor
    measure: profiling.MeasureFunction
    """Times batches of given sizes, for latency profiles."""
    shape: DecoderConfig
    dtype: str
    mark: str
    """Fingerprint of the model, part of a profile's."""
    threads: int
    """Computing threads of each rank."""
    kv_tokens: int
    """Capacity of one KV group."""
    kv_bytes: int
    parameters: int
    weights_bytes: int
    device: str = "cpu"
    """cpu or cuda."""
    processor: str | None = None
    """Name of the device; None: this host's CPU."""
    kernels: str = ""
    """See `EngineInfo.kernels`."""
    thread_choice: str = ""
    """See `EngineInfo.threads`."""


def build(
    config: EngineConfig, wanted: Callable[[], bool] = lambda: True, loaded: LoadedDecoder | None = None
) -> LoadedModel:
    """Load the model and make its KV pool, sized to the available memory. Raises ConfigError when it does not fit.

    wanted: polled while waiting for other hosts; False ends the wait. loaded: the model, where it is loaded already.
    """
    if config.layout.accelerators > 1:
        return build_many(config, config.layout, wanted)
    from headway.runtime.assembly.single_process import build_one

    return build_one(config, loaded)


def assemble(
    config: EngineConfig,
    clock: ClockProtocol,
    wanted: Callable[[], bool] = lambda: True,
    loaded: LoadedDecoder | None = None,
) -> EngineCore:
    """Make an engine: load the model, find or measure its latency, make scheduler and core.

    Takes as long as loading the model, plus about 0.3 s of measuring when there is no cached profile of this model on
    this host. wanted, loaded: see `build`. Raises ConfigError.
    """
    layout = config.layout
    fields = {**config.scheduler, "stages": layout.stages, "pipeline_schedule": config.pipeline_schedule}
    fields["kv_parallel"] = layout.kvp
    schedule = SchedulerConfig.named(config.mode, **fields)
    # Opened before the model is loaded, so that an error comes at once.
    log = None if config.event_log is None else LogSink(config.event_log)
    built = build(config, wanted, loaded)
    try:
        return _engine(config, clock, schedule, built, log)
    except BaseException:
        built.executor.close()
        raise


def _prefix_cache(config: EngineConfig, latency: LatencyModel) -> PrefixCache | None:
    if not config.prefix_cache:
        return None
    cache = make_prefix_cache(config.prefix_cache_policy, latency, config.block_size)
    # The controller of a cluster keeps a copy of the keys.
    cache.index.changes = None if config.instance is None else {}
    return cache


def _engine(
    config: EngineConfig, clock: ClockProtocol, schedule: SchedulerConfig, built: LoadedModel, log: EventSink | None
) -> EngineCore:
    """Make scheduler, latency model and core around a loaded model."""
    source, confidence = latency_source(config, built)
    latency = CorrectedLatency(TableLatency(source), confidence)
    # One block manager per KV group.
    caches = [_prefix_cache(config, latency) for _ in range(schedule.kv_parallel)]
    block_managers = [BlockManager(built.kv_tokens, config.block_size, cache) for cache in caches]
    scheduler = make_scheduler(schedule, latency, block_managers, exchange_of(source))
    kv_tokens = sum(block_manager.total_tokens for block_manager in block_managers)
    info = EngineInfo(
        model=model_name(config.model),
        architecture=built.shape.architecture,
        dtype=built.dtype,
        device=built.device,
        layout=config.layout.name,
        # A request that fills the pool alone is the longest that can be served.
        max_model_len=min(built.shape.max_model_len, kv_tokens),
        context_tokens=built.shape.max_model_len,
        vocab_size=built.shape.vocab_size,
        kv_tokens_total=kv_tokens,
        kv_block_tokens=config.block_size,
        prefix_cache=config.prefix_cache,
        prepares=config.prefix_cache and config.instance is None and config.event_log is None,
        policy=schedule.policy,
        chunking=schedule.chunking,
        mode=schedule.mode,
        t_target_s=reference_aim_s(schedule, latency),
        max_num_seqs=schedule.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        parameters=built.parameters,
        weights_bytes=built.weights_bytes,
        kv_bytes=built.kv_bytes,
        eos_token_ids=eos_ids(Path(config.model)),
        long_tokens=LONG_TOKENS,
        processor=built.processor or processor_name(),
        kernels=built.kernels,
        threads=built.thread_choice,
        profile=source.provenance,
        utilisation=remembered(
            _kept(config, "utilisation"),
            UtilisationBase,
            lambda: utilisation_base(
                built.shape.model_shape(built.dtype), config.layout.accelerators, built.processor, built.measure
            ),
        ),
        latency=describe(latency),
    )
    restarts = RestartLimit(config.max_restarts, "the workers", config.restart_window_s)
    sampler = IterationSampler(scheduler) if config.live_page else None
    core = EngineCore(scheduler, built.executor, clock, info, sampler.beside(log) if sampler else log, restarts)
    core.sampler = sampler
    return core


def latency_source(config: EngineConfig, built: LoadedModel) -> tuple[TableSource, float]:
    """Return the latency table and its weight against new measurements (`CorrectedLatency`).

    The table is the cached profile of this model, host and layout, else a quick measurement. Times are of one stage.
    """
    mark = profile_mark(config, built)
    if (named := named_profile(config)) is not None:
        return _with_exchange(config, built, table.load(named, mark)), 20.0
    path = table.default_path(mark)
    if config.latency_profile == "auto" and path.exists():
        try:
            return _with_exchange(config, built, table.load(path, mark)), 20.0
        except ConfigError as error:
            log.warning("%s; measuring anew", error)
    # Half a second of measurement gives a coarse table: weight 2 lets corrections outweigh it soon; a profile has 20.
    words, groups = "quick measurement at start-up", config.kv_parallel_size
    return remembered(
        _kept(config, "latency"),
        TableSource,
        lambda: profiling.profile(built.measure, built.kv_tokens, profiling.QUICK, 0.5, mark, words, groups),
    ), 2.0


def named_profile(config: EngineConfig) -> Path | None:
    """Return the file of the profile that the user has named."""
    return None if config.latency_profile in ("auto", "quick") else Path(config.latency_profile)


def _kept(config: EngineConfig, what: str) -> str | None:
    """Return the file for one of the measurements at a start."""
    return None if config.measured is None else f"{config.measured}-{what}.json"


def _with_exchange(config: EngineConfig, built: LoadedModel, source: TableSource) -> TableSource:
    """Return the profile with the cost of exchange between KV groups, measured now when the profile lacks it."""
    if config.kv_parallel_size == 1 or source.exchange is not None:
        return source
    measured = profiling.exchange(built.measure, built.kv_tokens, profiling.QUICK)
    return msgspec.structs.replace(source, exchange=measured)


def profile_mark(config: EngineConfig, built: LoadedModel) -> str:
    """Return the fingerprint of what a profile is valid for: model, dtype, processor, threads and layout."""
    name = built.processor or processor_name()
    return table.fingerprint(built.mark, built.dtype, name, built.threads, config.layout.name)


def backend_name(config: EngineConfig, devices: DeviceAssignment | None) -> str:
    """Return the attention backend: the configured one, else the device's default."""
    if config.attention_backend != "auto":
        return config.attention_backend
    return "cpu" if devices is None else "sdpa"


def kv_blocks(config: EngineConfig, shape: DecoderConfig, per_token: int, available: int, groups: int = 1) -> int:
    """Return the number of KV blocks in each of `groups` KV groups.

    per_token: bytes of a token's KV; available: bytes that are free beside the weights. Raises ConfigError when all
    groups together cannot hold a request of `config.max_model_len` tokens. An instance of a cluster need not: several
    of them may hold one request (`contract.longest_request`).
    """
    asked = config.max_model_len if config.instance is None else None
    if config.kv_cache_bytes is not None:
        budget = config.kv_cache_bytes
    else:
        # Half of this instance's share of free memory, at most two full contexts and 256K tokens in each KV group.
        budget = min(
            int(0.5 * config.memory_share * available), groups * per_token * (2 * shape.max_model_len + 262_144)
        )
    blocks = budget // (groups * per_token * config.block_size)
    tokens = groups * blocks * config.block_size
    need = asked if asked is not None else min(shape.max_model_len, 2 * groups * config.block_size)
    if tokens < need:
        raise ConfigError(
            f"the KV cache has room for {max(tokens, 0)} tokens ({gib(budget)} at {per_token} bytes a token) and "
            f"{'--max-model-len' if asked else 'the smallest useful pool'} needs {need}: give it more memory with "
            f"--kv-cache-memory (at least {gib(need * per_token)}) or lower --max-model-len"
        )
    # Without an explicit length a pool smaller than the context is allowed, but not silently.
    if config.instance is None and asked is None and tokens < shape.max_model_len:
        log.warning(
            "the KV cache has room for %d tokens (%s): the longest prompt with its output is that, not the model's %d, "
            "which would take %s (--kv-cache-memory, or a layout over more memory)",
            tokens, gib(tokens * per_token), shape.max_model_len, gib(shape.max_model_len * per_token),
        )  # fmt: skip
    return blocks


# Loading the model in several worker processes, on one or several hosts. The engine's own process needs no torch.

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_START_S = 120.0
"""Seconds without a heartbeat after which a starting worker counts as lost."""


@dataclass(frozen=True)
class _RankLayout:
    """Where the ranks of a model run, and the model's sizes, before the ranks start."""

    layout: ParallelLayout
    shape: DecoderConfig
    itemsize: int
    """Bytes per weight."""
    longest: int
    """Tokens of the longest request that the KV pool must hold."""
    devices: DeviceAssignment | None
    """None: the ranks compute on CPUs."""
    hosts: RayHosts | None
    """None: all ranks run on this host."""


def build_many(config: EngineConfig, layout: ParallelLayout, wanted: Callable[[], bool] = lambda: True) -> LoadedModel:
    """Validate the layout, start the ranks, and wait until all have loaded.

    wanted: polled while waiting for other hosts; False ends the wait. Raises ConfigError with the layouts that would
    fit, or with the error of a rank that failed to start.
    """
    folder = Path(config.model)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    path = folder / "config.json"
    shape = read_config(read_json(path), config.max_model_len, str(path))
    itemsize = _ITEMSIZE[shape.dtype_for(config.dtype)]
    # Without a requested length a small pool is enough: two blocks, or the whole context if that is less.
    longest = config.max_model_len or min(shape.max_model_len, 2 * config.block_size)
    check_shape(shape, layout)
    devices = choose(config.device, layout.accelerators // config.nnodes, look_apart)
    hosts = _open_hosts(config, layout, devices) if config.nnodes > 1 else None
    try:
        placement = _RankLayout(layout, shape, itemsize, longest, devices, hosts)
        return _start_ranks(config, placement, _rank_config(config, placement, wanted))
    except BaseException:
        if hosts is not None:
            hosts.close()
        raise


def _open_hosts(config: EngineConfig, layout: ParallelLayout, devices: DeviceAssignment | None) -> RayHosts:
    """Join the Ray cluster whose nodes run this engine's workers together with this host."""
    assert config.ray_address is not None
    each = layout.accelerators // config.nnodes
    host_of = partial(node_of, nodes=config.nnodes, ranks=layout.accelerators)
    reserved = 0 if devices is None else each
    return join_ray(config.ray_address, config.nnodes, host_of, config.model, HOST_TIMEOUT_S, reserved)


def _resources(placement: _RankLayout, wanted: Callable[[], bool]) -> tuple[int, int]:
    """Return available bytes and cores of all hosts together, after waiting for the hosts.

    Ranks may be placed on any host, so each host counts with the memory of the smallest one.
    """
    layout, hosts = placement.layout, placement.hosts
    available, cores = available_bytes(), len(CORES)
    if hosts is not None:
        # The fork server imports torch while the other hosts connect.
        warm()
        present = hosts.gather(wanted)
        available = len(present) * min(host.available_bytes for host in present)
        # Equally many ranks on each, all with the same number of threads.
        cores = len(present) * min(host.cores for host in present)
    if placement.devices is not None:
        # On devices the host's memory does not limit weights and KV.
        available = layout.accelerators * placement.devices.free_bytes
    return available, cores


def _rank_config(config: EngineConfig, placement: _RankLayout, wanted: Callable[[], bool]) -> RankConfig:
    """Return the configuration of all ranks: the share of cores, and KV blocks in the memory that weights leave."""
    layout, shape, devices, hosts = placement.layout, placement.shape, placement.devices, placement.hosts
    available, cores = _resources(placement, wanted)
    check_memory(shape, layout, placement.itemsize, available, config.kv_cache_bytes, placement.longest)
    takes = need(shape, layout, placement.itemsize)
    # What remains beside the weights and the processes' own memory.
    left = max(0, available - takes.weights - takes.processes)
    engine = msgspec.structs.replace(
        config,
        attention_backend=backend_name(config, devices),
        threads=config.threads or max(1, cores // layout.accelerators),
    )
    return RankConfig(
        engine=engine,
        kv_blocks=kv_blocks(config, shape, takes.kv_per_token, left, layout.kvp),
        eos=eos_ids(Path(config.model)),
        cuda=None if devices is None else devices.first,
        host="127.0.0.1" if hosts is None else hosts.address,
        token=None if hosts is None else hosts.token,
        timeout_s=config.engine_timeout_s if hosts is None else config.worker_timeout_s,
        # On several hosts a start may have to wait for a host that is itself being started again.
        start_timeout_s=_START_S if hosts is None else _START_S + HOST_TIMEOUT_S,
    )


def _start_ranks(config: EngineConfig, placement: _RankLayout, ranks: RankConfig) -> LoadedModel:
    """Start the ranks and wait until all have loaded."""
    transport = ProcessTransport(ranks, placement.hosts)
    ready = transport.start()
    assert ready is not None, "it waits until they are"
    addresses = tuple(rank.peer_address for rank in ready if rank.peer_address is not None)
    # Ranks with peers are not restarted alone: see `RankConfig.peer`.
    restart = None if addresses else partial(ProcessTransport, ranks, placement.hosts)
    executor = MultiProcessExecutor(transport, placement.layout, restart, IterationDeadline.of(config))
    executor.peer_addresses = addresses
    executor.hosts = placement.hosts
    devices = placement.devices
    return LoadedModel(
        executor=executor,
        measure=executor.measure,
        shape=placement.shape,
        dtype=ready[0].dtype,
        mark=ready[0].mark,
        threads=ranks.engine.threads or 1,
        kv_tokens=ranks.kv_blocks * config.block_size,
        kv_bytes=sum(rank.kv_bytes for rank in ready),
        parameters=parameters(placement.shape),
        weights_bytes=sum(rank.weights_bytes for rank in ready),
        device="cpu" if devices is None else "cuda",
        processor=None if devices is None else devices.name,
    )
