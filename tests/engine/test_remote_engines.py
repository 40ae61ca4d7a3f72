"""Engine processes on two other hosts, over the loopback: what runs there is real, Ray is not."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from tests.helpers.fake_executor import answer
from tests.helpers.polling import eventually
from tests.helpers.process_tree import is_running

from headway.core.errors import ConfigError
from headway.core.request import SamplingParams
from headway.runtime.assembly.cluster import launcher
from headway.runtime.cluster.instances import LiveInstance
from headway.runtime.embedded import model_path
from headway.runtime.engine.config import EngineConfig, InstanceConfig
from headway.runtime.engine.process import EngineProcess, by_our_clock, start_engine_elsewhere
from headway.runtime.engine.protocol import (
    HEARTBEAT_SUFFIX,
    EndProcess,
    EngineInfo,
    EngineStats,
    IterationOutputs,
    KvArrived,
    OutputDelta,
    ReserveKv,
    SpanTaskDone,
    SubmitRequest,
    join_endpoints,
    split_endpoints,
)
from headway.runtime.launcher.processes import guard_client
from headway.runtime.launcher.ray_hosts import HostActor, RayHosts, mismatch


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class FakeRay:
    """Stands for the module and for its scheduler. Ends with `shutdown`, like the module.

    misused: whether it was waited for while or after it was shut down; Ray itself may then end the whole process.
    """

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._actors: list[FakeActor] = []
        self._waiting, self._shut = 0, False
        self.misused = False

    def actor(self, model: str, there: bool = True) -> FakeActor:
        actor = FakeActor(self, model, there)
        self._actors.append(actor)
        return actor

    def get(self, futures: Any) -> Any:
        with self._used():
            return [each.result() for each in futures] if isinstance(futures, list) else futures.result()

    def wait(self, futures: Sequence[Future[Any]], timeout: float) -> tuple[list[Any], list[Any]]:
        with self._used():
            done, rest = wait_for(futures, timeout)
            return list(done), list(rest)

    @contextmanager
    def _used(self) -> Iterator[None]:
        self.misused |= self._shut
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def shutdown(self) -> None:
        self._shut = True
        self.misused |= self._waiting > 0
        for actor in self._actors:
            actor.lose()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class FakeActor:
    """A handle of a `HostActor`: `actor.method.remote(…)` returns a future. Calls fail while its host is lost."""

    def __init__(self, ray: FakeRay, model: str, there: bool) -> None:
        self._ray, self._model = ray, model
        self._calls: list[Future[Any]] = []
        self._actor: HostActor | None = None
        if there:
            self.come()

    def come(self) -> None:
        """Its host is there, and nothing runs on it."""
        self._actor = HostActor(self._model, "127.0.0.1")

    def lose(self) -> None:
        """Its host is lost, with all that runs there."""
        actor, self._actor = self._actor, None
        if actor is not None:
            for process in list(actor._running.values()):
                process.kill()
                process.join()
        for call in self._calls:
            call.cancel()

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *words: self._call(name, *words))

    def _call(self, name: str, *words: Any) -> Future[Any]:
        if self._actor is None:
            failed: Future[Any] = Future()
            failed.set_exception(RayError("the actor is unavailable"))
            return failed
        call = asyncio.run_coroutine_threadsafe(getattr(self._actor, name)(*words), self._ray.loop)
        self._calls.append(call)
        return call


HOST_OF = {0: 0, 1: 1, 2: 2, 3: 2}
FAKE = "tests.helpers.fake_engine_process"


class Cluster:
    """This host's end, and the actors of the others."""

    def __init__(self, stack: ExitStack, patience_s: float = 20.0, model: str = "fake") -> None:
        self._stack, self.ray = stack, FakeRay()
        self.actors = [self.ray.actor(model), self.ray.actor(model)]
        there: Future[None] = Future()
        there.set_result(None)
        self.hosts = RayHosts(self.ray, self.actors, there, "127.0.0.1", HOST_OF.__getitem__, model, patience_s)
        stack.callback(self.hosts.close)

    def engine(self, number: int, **fields: Any) -> EngineProcess:
        instance = InstanceConfig(number=number, listen="tcp:127.0.0.1:0", secret="shared")
        config = EngineConfig(model="elsewhere", instance=instance, **fields)
        engine = start_engine_elsewhere(config, number, self.hosts, FAKE)
        self._stack.callback(engine.end)
        return engine


@contextmanager
def hosts(**settings: Any) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(stack, **settings)
        yield cluster
    assert not cluster.ray.misused, "a thread called Ray after its shutdown"


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    async with asyncio.timeout(seconds):
        yield


async def said(engine: EngineProcess, kind: type) -> Any:
    """The next message of a kind."""
    async with within(20.0):
        while not isinstance(message := await engine.receive(), kind):
            pass
    return message


def submit(engine: EngineProcess, name: str, prompt: list[int], received_s: float) -> None:
    message = SubmitRequest(
        id=name, prompt_tokens=len(prompt), params=SamplingParams(max_tokens=5), received_s=received_s, timeout_s=30.0
    )
    engine.send([msgspec.msgpack.encode(message), np.array(prompt, dtype=np.int32).tobytes()])


async def answered(engine: EngineProcess, count: int) -> list[OutputDelta]:
    deltas: list[OutputDelta] = []
    while sum(len(delta.tokens) for delta in deltas) < count:
        deltas += (await said(engine, IterationOutputs)).deltas
    return deltas


async def pid(engine: EngineProcess) -> int:
    """Of its process, as soon as its host has said it."""
    await eventually(lambda: engine.process.pid)
    assert engine.process.pid is not None
    return engine.process.pid


def test_a_process_asked_for_after_ray_was_left_has_ended() -> None:
    with hosts() as cluster:
        cluster.hosts.close()
        process = cluster.hosts.launch(1, "tcp://127.0.0.1:1", b"{}", FAKE)
        assert process is not None
        process.join(20.0)
        assert process.ended == "was told to end"


async def test_engines_of_two_hosts_answer_independently() -> None:
    """One is drained, one killed, and of one the host is lost; what waits for the host starts when it is back."""

    with hosts() as cluster:
        one, two, three = (cluster.engine(number) for number in (1, 2, 3))
        for engine in (one, two, three):
            await said(engine, EngineInfo)
            engine.ready()
            submit(engine, "a", [4, 5, 6], time.monotonic())
            deltas = await answered(engine, 5)
            assert [token for delta in deltas for token in delta.tokens] == answer([4, 5, 6], 5)
            assert abs(deltas[-1].emitted_s - time.monotonic()) < 5.0
            assert abs(engine.ahead_s) < 0.1, "both have one clock"
        one.send([msgspec.msgpack.encode(EndProcess())])
        assert await one.wait_until_exited() == "(on host 1) has ended with exit code 0"
        os.kill(await pid(two), signal.SIGKILL)
        assert await two.wait_until_exited() == "(on host 2) has ended with signal 9 (SIGKILL)"
        orphan = await pid(three)
        cluster.actors[1].lose()
        assert await three.wait_until_exited() == "was on host 2, which is lost"
        await eventually(lambda: not is_running(orphan))
        waiting = cluster.engine(3)
        await asyncio.sleep(0.2)
        assert waiting.process.pid is None
        cluster.actors[1].come()
        await said(waiting, EngineInfo)
        last = await pid(waiting)
    await eventually(lambda: not is_running(last))


async def test_the_times_of_another_clock_are_known_to_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    async def later(self: HostActor) -> float:
        return time.monotonic() + 1e6

    monkeypatch.setattr(HostActor, "now", later)

    with hosts() as cluster:
        engine = cluster.engine(1)
        await said(engine, EngineInfo)
        await eventually(lambda: engine.ahead_s)
        assert abs(engine.ahead_s + 1e6) < 0.5
        assert cluster.hosts.ahead_s(0) == cluster.hosts.ahead_s(2) == 0.0


async def test_an_engine_that_is_ended_before_its_host_is_there_never_runs() -> None:
    with hosts() as cluster:
        cluster.actors[0].lose()
        engine = cluster.engine(1)
        engine.end()
        assert engine.process.ended == "was told to end"
        cluster.actors[0].come()
        await asyncio.sleep(1.2)  # longer than the interval of tries
        assert engine.process.pid is None


async def test_a_process_that_the_system_refuses_to_start_is_told_from_a_lost_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("headway.runtime.launcher.ray_hosts.spawn", refused)

    with hosts() as cluster:
        engine = cluster.engine(1)
        assert "(on host 1) cannot be started: " in await engine.wait_until_exited()
        assert not engine.abandoned


async def test_a_hanging_remote_engine_is_noticed_and_ended() -> None:
    with hosts() as cluster:
        engine = cluster.engine(1, worker_timeout_s=1.0)
        await said(engine, EngineInfo)
        engine.ready()
        hung = await pid(engine)
        os.kill(hung, signal.SIGSTOP)
        assert await engine.wait_until_exited() == "sent no heartbeat for 1 s: it hangs, or is cut off"
        engine.end()
        await eventually(lambda: not is_running(hung))


async def test_only_its_own_process_can_speak_at_its_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one without a key, nor one with that of the hosts, nor another engine."""

    with hosts() as cluster:
        launches: list[str] = []
        launch = cluster.hosts.launch

        def spied(number: int, endpoint: str, settings: bytes, module: str) -> Any:
            launches.append(endpoint)
            return launch(number, endpoint, settings, module)

        monkeypatch.setattr(cluster.hosts, "launch", spied)
        cluster.actors[0].lose()
        engine = cluster.engine(1)
        where, _ = split_endpoints(launches[0])
        context = zmq.Context()
        for token in (None, cluster.hosts.token):
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
        cluster.actors[0].come()
        async with within(20.0):
            assert isinstance(await engine.receive(), EngineInfo), "the strangers have not taken its place"


async def test_a_host_that_does_not_come_back_in_time_fails_its_instances_once() -> None:
    class Told:
        ends: list[int] = []

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

        def ended(self, number: int) -> None:
            self.ends.append(number)

    with hosts(patience_s=1.5) as cluster:
        launch = launcher(1, Path(__file__).parent, FAKE, hosts=cluster.hosts, secret="shared")
        instance = LiveInstance(1, "mixed", 1, 0, EngineConfig(model="elsewhere"), launch, 0, 1)
        life = asyncio.create_task(instance.look_after(Told()))
        await eventually(lambda: instance.state == "ready")
        cluster.actors[0].lose()
        await eventually(lambda: instance.state == "lost")
        assert instance.pid == 0
        await life
        assert instance.state == "failed"
        assert instance.failure is not None
        assert "was on host 1, which has not come back for 1.5 s" in instance.failure
        assert instance.stats.engine_restarts_total == 1


def test_a_host_that_does_not_match_is_named_with_the_reason(tmp_path: Path) -> None:
    with hosts(model=str(tmp_path)) as cluster, pytest.raises(ConfigError, match=r"host 1 cannot .*config\.json"):
        cluster.hosts.gather()
    with hosts(model=str(model_path())) as cluster:
        mine, *others = cluster.hosts.gather()
        assert others == [mine._replace(available_bytes=each.available_bytes) for each in others]
        assert mine.cores == len(os.sched_getaffinity(0))
    assert mismatch(mine, mine) is None
    assert "it runs Headway 0.0, and this host " in str(mismatch(mine, mine._replace(version="0.0")))
    assert "another model (x) than this host's" in str(mismatch(mine, mine._replace(model="x")))


def test_hosts_that_do_not_come_are_an_error_after_a_while() -> None:
    with hosts(patience_s=0.1) as cluster:
        cluster.hosts._ready = Future()
        with pytest.raises(ConfigError, match=r"Ray has no 2 nodes .* within 0\.1 s"):
            cluster.hosts.gather()
        cluster.hosts._patience_s = 60.0
        with pytest.raises(ConfigError):
            cluster.hosts.gather(lambda: False)


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
    assert by_our_clock(ReserveKv("a", 1), 1.0) == ReserveKv("a", 1)


def test_two_endpoints_join_into_one_string_and_split_again() -> None:
    assert split_endpoints(join_endpoints("tcp://a:1", "tcp://a:2")) == ("tcp://a:1", "tcp://a:2")
    assert split_endpoints("ipc://x/e0") == ("ipc://x/e0", f"ipc://x/e0{HEARTBEAT_SUFFIX}")
