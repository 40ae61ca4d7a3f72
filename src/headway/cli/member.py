"""An engine that has been assembled becomes an instance of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.cli.assemble import eos_ids, layout_of
from headway.core.clock import Clock
from headway.engine.config import EngineConfig
from headway.engine.core import EngineCore
from headway.engine.desk import Desk
from headway.engine.member import Member
from headway.transfer.connector import make_connector
from headway.transfer.peers import Peers


def join(config: EngineConfig, core: EngineCore, clock: Clock, ring: Callable[[], None]) -> Member | None:
    """Listen for other instances, and say so in the engine's `info`. None, and no listener, for an engine that is
    alone, or that is several processes: it serves whole requests only. ring: wakes the loop, from any thread. Raises
    ConfigError for an address that it cannot have, and an unknown connector."""
    if config.instance is None or layout_of(config).accelerators > 1:
        return None
    from headway.worker.kv_port import KvPort
    from headway.worker.local import LocalExecutor
    from headway.worker.runs import Runs

    assert isinstance(core.executor, LocalExecutor)
    own = config.instance
    peers = Peers(own.number, own.incarnation, own.listen, own.secret.encode())
    core.info = msgspec.structs.replace(core.info, peer_address=peers.address)
    worker = core.executor.worker
    runs = Runs(worker, peers, eos_ids(Path(config.model)))
    connector = make_connector(own.kv_connector, peers, ring)
    port = KvPort(worker, core.scheduler.ledgers[0].block_tokens, runs, connector, own.number)
    return Member(core, runs, peers, clock, own.room_s, Desk(core, port, core.executor.replay, clock))
