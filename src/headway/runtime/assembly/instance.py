"""Composition of the parts that make an assembled engine an instance of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.core.batch import ClockProtocol
from headway.runtime.assembly.facts import eos_ids
from headway.runtime.cluster.agent import InstanceAgent, KvConnectorScheduler
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.kv_transfer.connector import make_connector
from headway.runtime.kv_transfer.peers import PeerNetwork


def join(
    config: EngineConfig, core: EngineCore, clock: ClockProtocol, ring: Callable[[], None]
) -> InstanceAgent | None:
    """Listen for other instances, and set the listening address in the engine's `info`.

    Returns None, without a listener, for an engine outside a cluster and for one that cannot move KV (pipeline stages,
    KV groups, other devices): such an instance serves whole requests only. ring: wakes the engine's loop, called from
    any thread. Raises ConfigError for an address that cannot be bound, and for an unknown connector.
    """
    if config.instance is None:
        return None
    if config.layout.accelerators > 1:
        return _join_ranks(config.instance, core, clock)
    return _join_one(config, config.instance, core, clock, ring)


def _join_one(
    config: EngineConfig, own: InstanceConfig, core: EngineCore, clock: ClockProtocol, ring: Callable[[], None]
) -> InstanceAgent:
    """Make an instance of an engine that computes in its own process."""
    from headway.runtime.assembly.single_process import SingleProcessExecutor
    from headway.runtime.kv_transfer.port import KvPort
    from headway.runtime.sequence_parallel.spans import SpanExecutor

    assert isinstance(core.executor, SingleProcessExecutor)
    peers = PeerNetwork(own.number, own.incarnation, own.listen, own.secret)
    core.info = msgspec.structs.replace(core.info, peer_address=peers.address)
    worker = core.executor.worker
    runs = SpanExecutor(worker, peers, eos_ids(Path(config.model)))
    connector = make_connector(own.kv_connector, peers, ring, worker.pool.kv_heads)
    port = KvPort(worker, core.scheduler.block_managers[0].block_tokens, runs, connector, own.number)
    return InstanceAgent(
        core, runs, peers, clock, own.room_s, KvConnectorScheduler(core, port, core.executor.replay, clock)
    )


def _join_ranks(own: InstanceConfig, core: EngineCore, clock: ClockProtocol) -> InstanceAgent | None:
    """Make an instance of an engine whose ranks listen for other instances; None when they do not.

    Whether they do is decided by `RankConfig.peer`.
    """
    from headway.runtime.executor.multi_process import MultiProcessExecutor
    from headway.runtime.kv_transfer.multi_rank import MultiRankKvTransfer, MultiRankPeers

    executor = core.executor
    assert isinstance(executor, MultiProcessExecutor)
    if not executor.peer_addresses:
        return None
    first, *others = executor.peer_addresses
    core.info = msgspec.structs.replace(core.info, peer_address=first, peer_others=tuple(others))
    port = MultiRankKvTransfer(executor, core.scheduler.block_managers[0].drain_ops)
    peers = MultiRankPeers(own.number, port)
    return InstanceAgent(
        core, port.computes, peers, clock, own.room_s, KvConnectorScheduler(core, port, executor.replay, clock)
    )
