"""Engine processes of a cluster on two hosts beside node 0, all over the loopback: agents and engines are processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from tests.helpers.fake_executor import answer
from tests.helpers.host_agent_process import NODES, TOKEN
from tests.helpers.polling import eventually

from headway.core.errors import ConfigError
from headway.core.ports import free_port
from headway.core.sampling import SamplingParams
from headway.runtime.cluster.launch import host_launcher
from headway.runtime.cluster.live_instance import LiveInstance
from headway.runtime.cluster.messages import KvArrived, KvReserved, SpanTaskDone
from headway.runtime.embedded import model_path
from headway.runtime.engine.clock_offsets import by_our_clock
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.protocol import (
    HEARTBEAT_SUFFIX,
    DrainEngine,
    EngineInfo,
    EngineStats,
    IterationOutputs,
    OutputDelta,
    SubmitRequest,
    join_endpoints,
    split_endpoints,
)
from headway.runtime.launcher.host_compatibility import CLUSTER, cluster_terms, mismatch
from headway.runtime.launcher.host_coordinator import HostCoordinator
from headway.runtime.launcher.network import HostEndpoint
from headway.runtime.launcher.remote_engine import RemoteEngine
from headway.runtime.launcher.secret import guard_client, peers_secret

HOST_OF = {0: 0, 1: 1, 2: 2, 3: 2}


class Cluster:
    """Node 0's end, and the processes of the others."""

    def __init__(self, stack: ExitStack, patience_s: float = 20.0, lost_s: float = 10.0) -> None:
        self._stack, self.port = stack, free_port()
        mine = cluster_terms(0, NODES, str(model_path()))
        self.meeting = HostCoordinator(
            HostEndpoint("127.0.0.1", self.port), TOKEN, mine, HOST_OF.__getitem__, patience_s, lost_s
        )
        stack.callback(self.meeting.close)

    def agent(self, node: int, model: str = "beating", folder: str = str(model_path())) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tests.helpers.host_agent_process", str(self.port), str(node), model, folder]
        agent = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        assert agent.stderr is not None
        self._stack.callback(agent.stderr.close)
        self._stack.callback(agent.wait)
        self._stack.callback(agent.kill)
        return agent

    def engine(self, number: int, **fields: Any) -> RemoteEngine:
        instance = InstanceConfig(number=number, listen="tcp:127.0.0.1:0", secret=peers_secret(TOKEN))
        config = EngineConfig(model="elsewhere", instance=instance, **fields)
        engine = RemoteEngine(config, number, self.meeting)
        self._stack.callback(engine.end)
        return engine


@contextmanager
def hosts(**settings: float) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, **settings)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    async with asyncio.timeout(seconds):
        yield


def go(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(bounded())


async def said(engine: RemoteEngine, kind: type) -> Any:
    """The next message of a kind."""
    async with within(20.0):
        while not isinstance(message := await engine.receive(), kind):
            pass
    return message


def submit(engine: RemoteEngine, name: str, prompt: list[int], received_s: float) -> None:
    message = SubmitRequest(
        id=name, prompt_tokens=len(prompt), params=SamplingParams(max_tokens=5), received_s=received_s, timeout_s=30.0
    )
    engine.send([msgspec.msgpack.encode(message), np.array(prompt, dtype=np.int32).tobytes()])


async def answered(engine: RemoteEngine, count: int) -> list[OutputDelta]:
    deltas: list[OutputDelta] = []
    while sum(len(delta.tokens) for delta in deltas) < count:
        deltas += (await said(engine, IterationOutputs)).deltas
    return deltas


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


async def pid(engine: RemoteEngine) -> int:
    """Of its process, as soon as its host has said it."""
    await eventually(lambda: engine.process.pid)
    assert engine.process.pid is not None
    return engine.process.pid


def test_engines_of_two_hosts_answer_independently() -> None:
    """One is drained, one killed, and of one the agent is; a new agent takes what waits for it."""

    async def test() -> None:
        with hosts() as cluster:
            agents = {node: cluster.agent(node) for node in (1, 2)}
            one, two, three = (cluster.engine(number) for number in (1, 2, 3))
            for engine in (one, two, three):
                await said(engine, EngineInfo)
                engine.ready()
                submit(engine, "a", [4, 5, 6], time.monotonic())
                deltas = await answered(engine, 5)
                assert [token for delta in deltas for token in delta.tokens] == answer([4, 5, 6], 5)
                assert abs(deltas[-1].emitted_s - time.monotonic()) < 5.0
                assert abs(engine.ahead_s) < 0.1, "both have one clock"
            one.send([msgspec.msgpack.encode(DrainEngine())])
            assert await one.wait_until_exited() == "(on host 1) has ended with exit code 0"
            os.kill(await pid(two), signal.SIGKILL)
            assert await two.wait_until_exited() == "(on host 2) has ended with signal 9 (SIGKILL)"
            orphan = await pid(three)
            agents[2].kill()
            assert await three.wait_until_exited() == "was cut off: its connection has ended"
            await eventually(lambda: not alive(orphan))
            waiting = cluster.engine(3)
            cluster.agent(2)
            await said(waiting, EngineInfo)
            last = await pid(waiting)
        await eventually(lambda: not alive(last))

    go(test)


def test_a_hanging_remote_engine_is_noticed_and_ended() -> None:
    async def test() -> None:
        with hosts() as cluster:
            cluster.agent(1)
            engine = cluster.engine(1, worker_timeout_s=1.0)
            await said(engine, EngineInfo)
            engine.ready()
            hung = await pid(engine)
            os.kill(hung, signal.SIGSTOP)
            assert await engine.wait_until_exited() == "sent no heartbeat for 1 s: it hangs, or is cut off"
            engine.end()
            await eventually(lambda: not alive(hung))

    go(test)


def test_only_its_own_process_can_speak_at_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one without a key, nor one with that of the hosts, nor another engine."""

    async def test() -> None:
        with hosts() as cluster:
            launches: list[str] = []
            launch = cluster.meeting.launch

            def spied(rank: int, endpoint: str, settings: bytes) -> Any:
                launches.append(endpoint)
                return launch(rank, endpoint, settings)

            monkeypatch.setattr(cluster.meeting, "launch", spied)
            engine = cluster.engine(1)
            where, _ = split_endpoints(launches[0])
            context = zmq.Context()
            for token in (None, TOKEN):
                stranger = context.socket(zmq.PAIR)
                stranger.linger = 0
                if token is not None:
                    guard_client(stranger, token)
                stranger.connect(where)
                stranger.send(msgspec.msgpack.encode(IterationOutputs(stats=EngineStats(running=7))))
                with pytest.raises(TimeoutError):
                    async with within(0.5):
                        await engine.receive()
                stranger.close()
            context.term()
            cluster.agent(1)
            assert isinstance(await engine.receive(), EngineInfo), "the strangers have not taken its place"

    go(test)


def test_a_host_that_does_not_come_back_in_time_fails_its_instances_once() -> None:
    class Told:
        ends: list[int] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

        def ended(self, number: int) -> None:
            self.ends.append(number)

    async def test() -> None:
        with hosts(patience_s=1.5) as cluster:
            agent = cluster.agent(1)
            launch = host_launcher(1, Path(__file__).parent, cluster.meeting, peers_secret(TOKEN))
            instance = LiveInstance(1, "mixed", 1, 0, EngineConfig(model="elsewhere"), launch, 0, 1)
            life = asyncio.create_task(instance.look_after(Told()))
            await eventually(lambda: instance.state == "ready")
            agent.terminate()
            await eventually(lambda: instance.state == "lost")
            assert instance.pid == 0
            await life
            assert instance.state == "failed"
            assert instance.failure is not None
            assert "was on host 1, which has not come back for 1.5 s" in instance.failure
            assert instance.stats.engine_restarts_total == 1

    go(test)


def test_a_host_without_the_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with hosts(patience_s=2.0) as cluster:
        agent = cluster.agent(1, folder=str(tmp_path / "nothing"))
        cluster.agent(2)
        _, said = agent.communicate(timeout=20.0)
        assert "node 0 refuses this host" in said
        assert "nothing" in said
        with pytest.raises(
            ConfigError, match=r"no host came with --node-rank 1 within .*host 1 was refused: .*nothing"
        ):
            cluster.meeting.gather()


def test_hosts_of_a_cluster_and_of_an_engine_do_not_mix(tmp_path: Path) -> None:
    mine = cluster_terms(0, 2, str(model_path()))
    theirs = msgspec.structs.replace(cluster_terms(1, 2, str(model_path())), layout="tp2-pp1-kvp1")
    assert mismatch(mine, theirs) == (
        f"it was started for tp2-pp1-kvp1, and node 0 for {CLUSTER}: give the same command on all hosts"
    )
    assert cluster_terms(1, 2, str(tmp_path)).trouble
    with pytest.raises(ConfigError):
        cluster_terms(0, 2, str(tmp_path))


def test_times_of_another_clock_are_moved_and_nothing_else_is() -> None:
    delta = OutputDelta(id="a", tokens=(1,), emitted_s=10.0, first_scheduled_s=9.0)
    moved = by_our_clock(IterationOutputs(deltas=(delta, OutputDelta(id="b"))), 5.0)
    assert moved == IterationOutputs(
        deltas=(OutputDelta(id="a", tokens=(1,), emitted_s=15.0, first_scheduled_s=14.0), OutputDelta(id="b"))
    )
    done = SpanTaskDone(id="a", index=0, began_s=1.0, ended_s=2.0, delta=delta)
    after = by_our_clock(done, -1.0)
    assert isinstance(after, SpanTaskDone)
    assert (after.began_s, after.ended_s) == (0.0, 1.0)
    assert after.delta == OutputDelta(id="a", tokens=(1,), emitted_s=9.0, first_scheduled_s=8.0)
    arrived = KvArrived(id="a", piece=1, source=0, began_s=1.0, ended_s=2.0)
    assert by_our_clock(arrived, 1.0) == KvArrived(id="a", piece=1, source=0, began_s=2.0, ended_s=3.0)
    assert by_our_clock(KvReserved("a"), 1.0) == KvReserved("a")


def test_two_endpoints_join_into_one_string_and_split_again() -> None:
    assert split_endpoints(join_endpoints("tcp://a:1", "tcp://a:2")) == ("tcp://a:1", "tcp://a:2")
    assert split_endpoints("ipc://x/e0") == ("ipc://x/e0", f"ipc://x/e0{HEARTBEAT_SUFFIX}")
