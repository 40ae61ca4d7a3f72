"""The router over engines that say what they are told: who computes what, ends, losses, refusals."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

import msgspec
import pytest

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.core.sampling import SamplingParams
from headway.engine.protocol import Delta, EngineInfo, EngineStats, Submit
from headway.hardware.links import Link
from headway.hardware.models import model
from headway.latency.groups import GroupLatency, GroupShape
from headway.placement.base import Placement
from headway.placement.registry import Surroundings, make_placement
from headway.placement.view import Instance, Links
from headway.router.client import ClusterClient, Member
from headway.router.lanes import Lane
from headway.router.loads import Load
from server.fake_engine import INFO, FakeEngine, say

SHAPE = model("llama-3-8b")
HOST = Link(name="host", bytes_per_s=1e9, latency_s=0.0, source="test")


class PerToken:
    """A millisecond a token."""

    source = "test"

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return tokens * 1e-3

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return int(budget_s * 1e3)


def cluster(engines: Sequence[FakeEngine], placement: str = "jsq", **options: object) -> ClusterClient:
    def make(infos: Sequence[EngineInfo]) -> tuple[Placement, GroupLatency]:
        return make_placement(placement, Surroundings(latency=PerToken(), shape=SHAPE), options), PerToken()

    members = [Member(client=engine, instance=Instance(id=i, node=0)) for i, engine in enumerate(engines)]
    return ClusterClient(members, Links(inside=HOST, across=HOST), make)


async def ask(client: ClusterClient, name: str, prompt: int = 3, max_tokens: int = 2) -> list[int]:
    submit = Submit(id=name, prompt_tokens=prompt, params=SamplingParams(max_tokens=max_tokens), received_s=0.0)
    ids = array("i", range(10, 10 + prompt))
    return [token async for delta in client.generate(submit, ids.tobytes()) for token in delta.tokens]


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def names(engine: FakeEngine) -> list[str]:
    return [submit.id for submit in engine.submits]


def test_requests_join_the_shorter_queue_in_seconds() -> None:
    async def run() -> None:
        hold = asyncio.Event()
        engines = [FakeEngine(hold=hold), FakeEngine(hold=hold)]
        client = cluster(engines)
        info = await client.start()
        assert info.kv_tokens_total == 2 * INFO.kv_tokens_total
        asks = [asyncio.create_task(ask(client, "long", 500))]
        await settled()
        for number in range(4):
            asks.append(asyncio.create_task(ask(client, f"s{number}", 3)))
            await settled()
        assert names(engines[0]) == ["long"]
        assert names(engines[1]) == ["s0", "s1", "s2", "s3"]
        hold.set()
        answers = await asyncio.gather(*asks)
        assert answers[1] == [10, 11]
        assert client.state == "ready"
        await client.close()
        assert all(engine.closed for engine in engines)

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_instance() -> None:
    async def run() -> None:
        engines = [FakeEngine(hold=asyncio.Event()), FakeEngine(hold=asyncio.Event())]
        client = cluster(engines)
        await client.start()
        first = asyncio.create_task(ask(client, "gone", 500))
        await settled()
        first.cancel()
        await settled()
        assert engines[0].aborted == ["gone"]
        waits = asyncio.create_task(ask(client, "next"))
        await settled()
        assert names(engines[0]) == ["gone", "next"]
        with pytest.raises(RequestError, match="in use"):
            await ask(client, "next")
        waits.cancel()

    asyncio.run(run())


def test_the_requests_of_a_lost_instance_go_on_elsewhere_with_what_they_have_said() -> None:
    class Dying(FakeEngine):
        async def generate(self, submit, prompt):  # type: ignore[no-untyped-def]
            self.submits.append(submit)
            yield Delta(id=submit.id, tokens=(7,))
            await self.hold.wait()
            self.state = "lost"
            raise UnavailableError("gone")

    async def run() -> None:
        hold = asyncio.Event()
        dying, other = Dying(hold=hold), FakeEngine(script=say([8, 9]))
        client = cluster([dying, other])
        await client.start()
        answer = asyncio.create_task(ask(client, "a"))
        await settled()
        hold.set()
        assert await answer == [7, 8, 9]
        assert [(submit.again, submit.output) for submit in other.submits] == [(True, (7,))]
        assert await ask(client, "b") == [8, 9]
        assert names(dying) == ["a"]
        assert client.state == "ready"
        other.state = "lost"
        assert client.state == "lost"
        with pytest.raises(UnavailableError):
            await ask(client, "c")

    asyncio.run(run())


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("prompt", [5, 200])
def test_reservation_goes_on_with_the_instances_that_are_left(lost: int, prompt: int) -> None:
    class Dying(FakeEngine):
        async def generate(self, submit, prompt):  # type: ignore[no-untyped-def]
            self.state = "lost"
            raise UnavailableError("gone")
            yield

    async def run() -> None:
        for count in (2, 3):
            engines = [Dying() if i == lost else FakeEngine(script=say([8])) for i in range(count)]
            client = cluster(engines, "reservation", long_tokens=100, long_sp=1)
            await client.start()
            for number in range(4):
                for tokens in (prompt, 205 - prompt):
                    assert await asyncio.wait_for(ask(client, f"{number} {tokens}", tokens), 5) == [8]

    asyncio.run(run())


def test_when_the_last_instance_is_lost_those_who_wait_are_told() -> None:
    async def run() -> None:
        hold = asyncio.Event()

        class Dying(FakeEngine):
            async def generate(self, submit, prompt):  # type: ignore[no-untyped-def]
                await hold.wait()
                self.state = "lost"
                raise UnavailableError("gone")
                yield

        client = cluster([Dying()], "fifo", long_tokens=100, long_sp=1)
        await client.start()
        asks = [asyncio.create_task(ask(client, name, 200)) for name in ("a", "b")]
        await settled()
        assert client.stats.waiting == 1
        hold.set()
        errors = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(error, UnavailableError) for error in errors)

    asyncio.run(run())


def test_a_long_prompt_under_fifo_has_its_instance_alone_until_its_first_token() -> None:
    async def run() -> None:
        gate, holds = asyncio.Semaphore(0), [asyncio.Event(), asyncio.Event()]
        engines = [FakeEngine(hold=hold, gate=gate) for hold in holds]
        client = cluster(engines, "fifo", long_tokens=100, long_sp=1)
        await client.start()
        asks = []
        for name, tokens in (("s0", 90), ("s1", 80), ("long", 200), ("s2", 5)):
            asks.append(asyncio.create_task(ask(client, name, tokens)))
            await settled()
        assert names(engines[0]) == ["s0", "s2"], "the long one is before instance 1"
        assert names(engines[1]) == ["s1"], "the long one waits until s1 has ended"
        assert client.stats.waiting == 1
        gate.release()
        holds[1].set()
        await settled()
        assert names(engines[1]) == ["s1", "long"]
        asks += [asyncio.create_task(ask(client, f"t{number}", 60)) for number in range(3)]
        await settled()
        assert "t0" in names(engines[1]), "the long one has its first token"
        for _ in range(9):
            gate.release()
        holds[0].set()
        assert await asyncio.gather(*asks) == [[10, 11]] * 7

    asyncio.run(run())


def test_an_engine_that_refuses_is_heard() -> None:
    async def run() -> None:
        client = cluster([FakeEngine(refuse=OverloadedError("full"))])
        with pytest.raises(UnavailableError, match="starting"):
            await ask(client, "early")
        await client.start()
        with pytest.raises(OverloadedError, match="full"):
            await ask(client, "a")
        assert client.stats == EngineStats()

    asyncio.run(run())


def test_what_live_instances_cannot_do_is_said_and_nothing_hangs() -> None:
    async def run() -> None:
        client = cluster([FakeEngine(), FakeEngine()], "fifo", long_tokens=10, long_sp=2)
        await client.start()
        with pytest.raises(UnavailableError, match="live instances"):
            await asyncio.wait_for(ask(client, "long", 50), 5)
        assert await ask(client, "short", 2) == [10, 11]

    asyncio.run(run())


def test_instances_of_different_models_are_no_cluster() -> None:
    async def run() -> None:
        other = msgspec.structs.replace(INFO, vocab_size=7)
        client = cluster([FakeEngine(), FakeEngine(info_value=other)])
        with pytest.raises(ConfigError, match="instance 1 has vocab_size 7"):
            await client.start()
        assert client.failure is not None

    asyncio.run(run())


def test_draining_finishes_what_waits_and_takes_nothing_new() -> None:
    async def run() -> None:
        hold = asyncio.Event()
        engine = FakeEngine(hold=hold, script=say([5]))
        client = cluster([engine], "fifo", long_tokens=10, long_sp=1)
        await client.start()
        asks = [asyncio.create_task(ask(client, name, 20)) for name in ("a", "b")]
        await settled()
        drained = asyncio.create_task(client.drain())
        await settled()
        with pytest.raises(UnavailableError, match="draining"):
            await ask(client, "late")
        hold.set()
        assert await asyncio.gather(*asks) == [[5], [5]]
        await asyncio.wait_for(drained, 5)

    asyncio.run(run())


def test_a_lane_keeps_spans_to_themselves() -> None:
    started: list[str] = []
    lane = Lane(started.append)
    lane.door("a", False)
    lane.span("x", False)
    lane.door("b", False)
    lane.door("c", True)
    assert started == ["a", "c"]
    lane.ended("a")
    assert started == ["a", "c"]
    lane.ended("c")
    assert started == ["a", "c", "x"]
    assert lane.is_span("x")
    lane.computed("x")
    assert started == ["a", "c", "x", "b"]
    lane.span("y", True)
    assert started[-1] == "y"
    lane.door("d", False)
    assert lane.waiting == 1
    lane.ended("y")
    assert (lane.waiting, lane.running, started[-1]) == (0, 3, "d")


def test_a_load_spreads_progress_over_the_prompts_that_wait() -> None:
    load = Load()
    load.take(EngineStats(prefill_tokens_total=1000))
    load.add("a", 300, 3.0)
    load.add("b", 100, 1.0)
    assert (load.queued, load.left_s) == (400, 4.0)
    load.take(EngineStats(prefill_tokens_total=1200))
    load.take(EngineStats(prefill_tokens_total=1200))
    assert (load.queued, load.left_s) == (200, 2.0)
    load.first_token("b")
    assert (load.queued, load.left_s) == (200, 2.0)
    load.remove("a")
    assert (load.queued, load.left_s) == (0, 0.0)
