"""Loading the model in several worker processes, on one or several hosts. The engine's own process needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headway.core.errors import CheckpointError
from headway.core.json_files import read_json
from headway.core.machine import CORES
from headway.perf.device import DeviceAssignment, available_bytes, choose
from headway.perf.hardware import ParallelLayout
from headway.runtime.assembly.engine import LoadedModel, backend_name, kv_blocks
from headway.runtime.assembly.facts import eos_ids
from headway.runtime.engine.config import HOST_TIMEOUT_S, EngineConfig
from headway.runtime.executor.cuda_probe import look_apart
from headway.runtime.executor.multi_process import MultiProcessExecutor, ProcessTransport
from headway.runtime.executor.plans import RankConfig, RankPeer
from headway.runtime.executor.profiling import check_memory, check_shape, need, parameters
from headway.runtime.launcher.rank_launcher import warm
from headway.runtime.launcher.ray_hosts import RayHosts, join_ray, node_of
from headway.runtime.model.config import DecoderConfig, read_config

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_START_S = 120.0
"""Seconds without a heartbeat after which a starting worker counts as lost."""


@dataclass(frozen=True)
class _Placement:
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
        placement = _Placement(layout, shape, itemsize, longest, devices, hosts)
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


def _resources(placement: _Placement, wanted: Callable[[], bool]) -> tuple[int, int]:
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


def _rank_config(config: EngineConfig, placement: _Placement, wanted: Callable[[], bool]) -> RankConfig:
    """Return the configuration of all ranks: the share of cores, and KV blocks in the memory that weights leave."""
    layout, shape, devices, hosts = placement.layout, placement.shape, placement.devices, placement.hosts
    available, cores = _resources(placement, wanted)
    check_memory(shape, layout, placement.itemsize, available, config.kv_cache_bytes, placement.longest)
    takes = need(shape, layout, placement.itemsize)
    # What remains beside the weights and the processes' own memory.
    left = max(0, available - takes.weights - takes.processes)
    return RankConfig(
        model=config.model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        attention_backend=backend_name(config, devices),
        threads=config.threads or max(1, cores // layout.accelerators),
        kv_blocks=kv_blocks(config, shape, takes.kv_per_token, left, layout.kvp),
        block_tokens=config.block_size,
        eos=eos_ids(Path(config.model)),
        tp=layout.tp,
        stages=layout.stages,
        kvp=layout.kvp,
        cuda=None if devices is None else devices.first,
        nodes=config.nnodes,
        host="127.0.0.1" if hosts is None else hosts.address,
        token=None if hosts is None else hosts.token,
        timeout_s=config.worker_timeout_s,
        # On several hosts a start may have to wait for a host that is itself being started again.
        start_timeout_s=_START_S if hosts is None else _START_S + HOST_TIMEOUT_S,
        log_level=config.log_level,
        log_format=config.log_format,
        instance=None if config.instance is None else config.instance.number,
        peer=_peer(config, layout),
    )


def _peer(config: EngineConfig, layout: ParallelLayout) -> RankPeer | None:
    """Return how ranks exchange KV with other instances; None unless they are cut by heads only.

    Such an instance is lost as a whole when one rank is (`runtime.cluster.instances`), because KV of other
    instances' requests was on it.
    """
    own = config.instance
    if own is None or layout.accelerators != layout.tp:
        return None
    return RankPeer(
        number=own.number,
        incarnation=own.incarnation,
        listen=own.listen,
        secret=own.secret,
        connector=own.kv_connector,
    )


def _start_ranks(config: EngineConfig, placement: _Placement, ranks: RankConfig) -> LoadedModel:
    """Start the ranks and wait until all have loaded."""
    transport = ProcessTransport(ranks, placement.hosts)
    ready = transport.start()

    def restart() -> ProcessTransport:
        again = ProcessTransport(ranks, placement.hosts)
        again.start()
        return again

    addresses = tuple(rank.peer_address for rank in ready if rank.peer_address is not None)
    # Ranks with peers are not restarted alone: see `_peer`.
    executor = MultiProcessExecutor(transport, placement.layout, ranks.kv_blocks, None if addresses else restart)
    executor.peer_addresses = addresses
    executor.hosts = placement.hosts
    devices = placement.devices
    return LoadedModel(
        executor=executor,
        measure=executor.measure,
        shape=placement.shape,
        dtype=ready[0].dtype,
        mark=ready[0].mark,
        threads=ranks.threads,
        kv_tokens=ranks.kv_blocks * config.block_size,
        kv_bytes=sum(rank.kv_bytes for rank in ready),
        parameters=parameters(placement.shape),
        weights_bytes=sum(rank.weights_bytes for rank in ready),
        device="cpu" if devices is None else "cuda",
        processor=None if devices is None else devices.name,
    )
