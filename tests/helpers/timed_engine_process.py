"""The process of a timed instance: a real engine but for the model, which a scenario's latencies stand in for.

usage: python -m tests.helpers.timed_engine_process ENDPOINT SERVER_PID < config.json

`model` in its settings is the scenario's file, in which the instance is one of `cluster.pools`, by its number.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.timed.alarm import TimedCalls
from tests.helpers.timed.executor import TimedExecutor
from tests.helpers.timed.mail import TimedMail
from tests.helpers.timed.port import TimedPort
from tests.helpers.timed.runs import TimedSpanExecutor
from tests.helpers.timed.times import ClusterTimes
from tests.helpers.timed_cluster import scenario_of, spec_of

from headway.core.batch import ClockProtocol
from headway.kv.block_manager import BlockManager
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.iteration.groups import make_scheduler
from headway.runtime.assembly.engine_process import IsWanted, live
from headway.runtime.cluster.agent import InstanceAgent, KvConnectorScheduler
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import EngineInfo
from headway.runtime.engine.service import EngineService
from headway.runtime.kv_transfer.peers import PeerNetwork

VOCAB = 32_000


def timed(
    config: EngineConfig, clock: ClockProtocol, service: EngineService, is_wanted: IsWanted
) -> tuple[EngineCore, InstanceAgent | None]:
    """An engine that sleeps for what its scenario predicts."""
    own, spec = config.instance, spec_of(scenario_of(Path(config.model)))
    assert own is not None, "a timed engine is an instance of a cluster"
    made = spec.engine([spec.instances[own.number]])
    block_manager = BlockManager(made.kv_tokens, made.block_tokens)
    alarm = TimedCalls(clock)
    executor = TimedExecutor(clock, alarm)
    peers = PeerNetwork(own.number, own.incarnation, own.listen, own.secret)
    info = EngineInfo(
        model="timed",
        architecture="timed",
        dtype="none",
        device="none",
        max_model_len=block_manager.total_tokens,
        vocab_size=VOCAB,
        kv_tokens_total=block_manager.total_tokens,
        kv_block_tokens=made.block_tokens,
        policy=made.config.policy,
        chunking=made.config.chunking,
        mode=made.config.mode,
        t_target_s=reference_aim_s(made.config, made.latency),
        max_num_seqs=made.config.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        parameters=spec.shape.parameters,
        weights_bytes=0,
        kv_bytes=block_manager.total_tokens * spec.shape.kv_bytes_per_token,
        peer_address=peers.address,
    )
    core = EngineCore(make_scheduler(made.config, made.latency, [block_manager]), executor, clock, info)
    mail = TimedMail(peers, service.wake)
    times = ClusterTimes(spec, own.number)
    runs = TimedSpanExecutor(times, mail, clock)
    port = TimedPort(times, runs, mail, alarm, clock)
    return core, InstanceAgent(
        core, runs, peers, clock, own.room_s, KvConnectorScheduler(core, port, executor.replay, clock)
    )


if __name__ == "__main__":
    live(timed)
