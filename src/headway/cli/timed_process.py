"""The process of a timed instance: a real engine but for the model, which a scenario's latencies stand in for.

usage: python -m headway.cli.timed_process ENDPOINT SERVER_PID < config.json

`model` in its settings is the scenario's file, in which the instance is one of `cluster.pools`, by its number.
"""

from __future__ import annotations

from pathlib import Path

from headway.cli.timed import scenario_of, spec_of
from headway.core.clock import Clock
from headway.kv.block_manager import Ledger
from headway.policy.iteration.grouped_scheduler import make_scheduler
from headway.runtime.build.engine_process import live
from headway.runtime.cluster.instance_agent import Member
from headway.runtime.cluster.kv_connector_scheduler import Desk
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import EngineInfo
from headway.runtime.engine.service import EngineService
from headway.runtime.engine.timed.alarm import Alarm
from headway.runtime.engine.timed.executor import TimedExecutor
from headway.runtime.engine.timed.mail import Mail
from headway.runtime.engine.timed.port import TimedPort
from headway.runtime.engine.timed.runs import TimedRuns
from headway.runtime.engine.timed.times import ClusterTimes
from headway.runtime.kv_transfer.peers import Peers

VOCAB = 32_000


def timed(
    config: EngineConfig, clock: Clock, service: EngineService, server_pid: int
) -> tuple[EngineCore, Member | None]:
    """An engine that sleeps for what its scenario predicts."""
    own, spec = config.instance, spec_of(scenario_of(Path(config.model)))
    assert own is not None, "a timed engine is an instance of a cluster"
    made = spec.engine([spec.instances[own.number]])
    ledger = Ledger(made.kv_tokens, made.block_tokens)
    alarm = Alarm(clock)
    executor = TimedExecutor(clock, alarm)
    peers = Peers(own.number, own.incarnation, own.listen, own.secret.encode())
    info = EngineInfo(
        model="timed",
        architecture="timed",
        dtype="none",
        device="none",
        max_model_len=ledger.total_tokens,
        vocab_size=VOCAB,
        kv_tokens_total=ledger.total_tokens,
        kv_block_tokens=made.block_tokens,
        policy=made.config.policy,
        chunking=made.config.chunking,
        mode=made.config.mode,
        t_target_s=made.config.t_target_s,
        max_num_seqs=made.config.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        parameters=spec.shape.parameters,
        weights_bytes=0,
        kv_bytes=ledger.total_tokens * spec.shape.kv_bytes_per_token,
        peer_address=peers.address,
    )
    core = EngineCore(make_scheduler(made.config, made.latency, [ledger]), executor, clock, info)
    mail = Mail(peers, service.ring)
    times = ClusterTimes(spec, own.number)
    runs = TimedRuns(times, mail, clock)
    port = TimedPort(times, runs, mail, alarm, clock)
    return core, Member(core, runs, peers, clock, own.room_s, Desk(core, port, executor.replay, clock))


if __name__ == "__main__":
    live(timed)
