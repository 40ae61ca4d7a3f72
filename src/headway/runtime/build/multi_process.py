"""The model over several worker processes, of this host or of several. The engine's own process needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from headway.core.cpu_affinity import CORES
from headway.core.errors import CheckpointError
from headway.perf.hardware.device import DeviceAssignment, choose
from headway.perf.hardware.memory import available_bytes
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.build.engine import LoadedModel, backend_name, eos_ids, kv_blocks
from headway.runtime.engine.config import EngineConfig
from headway.runtime.executor.cuda_probe import look_apart
from headway.runtime.executor.memory_fit import check_memory, check_shape, need, parameters
from headway.runtime.executor.multi_process import MultiProcessExecutor
from headway.runtime.executor.rank_config import RankConfig, RankPeer
from headway.runtime.executor.rank_processes import ProcessTransport
from headway.runtime.launcher.host_compatibility import node_of, terms
from headway.runtime.launcher.host_coordinator import HostCoordinator
from headway.runtime.launcher.network import parse_endpoint
from headway.runtime.launcher.rank_launcher import warm
from headway.runtime.model.config import DecoderConfig, read_config
from headway.runtime.model.fields import read_json

_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_START_S = 120.0
"""A worker that gives no sign of life for so long while it starts is lost."""


def build_many(config: EngineConfig, layout: ParallelLayout, wanted: Callable[[], bool] = lambda: True) -> LoadedModel:
    """Check that the layout can be, start the ranks, and wait until all have loaded. Raises ConfigError otherwise, with
    the layouts that would fit or with the words of the rank that could not start. Hosts are waited for while it is
    `wanted`."""
    folder = Path(config.model)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such model folder")
    path = folder / "config.json"
    shape = read_config(read_json(path), config.max_model_len, str(path))
    itemsize = _ITEMSIZE[shape.dtype_for(config.dtype)]
    longest = config.max_model_len or min(shape.max_model_len, 2 * config.block_size)
    check_shape(shape, layout)
    devices = choose(config.device, layout.accelerators // config.nnodes, look_apart)
    hosts = open_rendezvous(config, layout) if config.nnodes > 1 else None
    try:
        return _build(config, layout, shape, itemsize, longest, devices, hosts, wanted)
    except BaseException:
        if hosts is not None:
            hosts.close()
        raise


def _peer(config: EngineConfig, layout: ParallelLayout) -> RankPeer | None:
    """What ranks hear other instances by, where KV moves between them: where they are cut by heads only. Such an
    instance is lost as a whole when a rank is (`runtime.cluster.live_instance`): others' KV was on it."""
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


def open_rendezvous(config: EngineConfig, layout: ParallelLayout) -> HostCoordinator:
    """Node 0's end of several hosts."""
    assert config.rdzv_endpoint is not None
    assert config.rdzv_token is not None
    mine = terms(0, config.nnodes, layout, config.model)
    return HostCoordinator(
        parse_endpoint(config.rdzv_endpoint),
        config.rdzv_token,
        mine,
        partial(node_of, nodes=config.nnodes, layout=layout),
        patience_s=config.rdzv_timeout_s,
    )


def _build(
    config: EngineConfig,
    layout: ParallelLayout,
    shape: DecoderConfig,
    itemsize: int,
    longest: int,
    devices: DeviceAssignment | None,
    hosts: HostCoordinator | None,
    wanted: Callable[[], bool],
) -> LoadedModel:
    available, cores = available_bytes(), len(CORES)
    if hosts is not None:
        warm()
        everybody = hosts.gather(wanted)
        available = len(everybody) * min(host.available_bytes for host in everybody)
        cores *= len(everybody)
    if devices is not None:
        available = layout.accelerators * devices.free_bytes
    check_memory(shape, layout, itemsize, available, config.kv_cache_bytes, longest)
    takes = need(shape, layout, itemsize)
    left = max(0, available - takes.weights - takes.processes)
    blocks = kv_blocks(config, shape, takes.kv_per_token, left, layout.kvp)
    threads = config.threads or max(1, cores // layout.accelerators)
    ranks = RankConfig(
        model=config.model,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        attention_backend=backend_name(config, devices),
        threads=threads,
        kv_blocks=blocks,
        block_tokens=config.block_size,
        eos=eos_ids(Path(config.model)),
        tp=layout.tp,
        stages=layout.stages,
        kvp=layout.kvp,
        cuda=None if devices is None else devices.first,
        nodes=config.nnodes,
        host="127.0.0.1" if hosts is None else hosts.address,
        token=config.rdzv_token if hosts is not None else None,
        timeout_s=config.worker_timeout_s,
        start_timeout_s=_START_S if hosts is None else _START_S + config.rdzv_timeout_s,
        log_level=config.log_level,
        log_format=config.log_format,
        instance=None if config.instance is None else config.instance.number,
        peer=_peer(config, layout),
    )
    wire = ProcessTransport(ranks, hosts)
    ready = wire.start()

    def rewire() -> ProcessTransport:
        again = ProcessTransport(ranks, hosts)
        again.start()
        return again

    addresses = tuple(rank.peer_address for rank in ready if rank.peer_address is not None)
    executor = MultiProcessExecutor(wire, layout, blocks, None if addresses else rewire)
    executor.peer_addresses = addresses
    executor.hosts = hosts
    weights = sum(rank.weights_bytes for rank in ready)
    return LoadedModel(
        executor=executor,
        measure=executor.measure,
        shape=shape,
        dtype=ready[0].dtype,
        mark=ready[0].mark,
        threads=threads,
        kv_tokens=blocks * config.block_size,
        kv_bytes=sum(rank.kv_bytes for rank in ready),
        parameters=parameters(shape),
        weights_bytes=weights,
        device="cpu" if devices is None else "cuda",
        processor=None if devices is None else devices.name,
    )
