"""Requests that wait for each other's room for KV: which ones would for ever, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import virtual_time
from tests.helpers.cluster_clients import ask, prompt, running
from tests.helpers.fake_instances import FakeCluster, answer

from headway.core.request import Request
from headway.core.sampling import SamplingParams
from headway.core.span import Span
from headway.policy.placement.base import (
    Action,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    RequestArrived,
    SpanDone,
    TransferKv,
)
from headway.policy.placement.view import ClusterSnapshot
from headway.runtime.cluster.attempt import RequestAttempt
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.cluster.deadlock import DeadlockDetector, knotted
from headway.runtime.cluster.messages import ReserveKv
from headway.runtime.engine.protocol import EngineStats, SubmitRequest


def test_two_crossing_migrations_are_a_deadlock() -> None:
    assert knotted({"a": [1], "b": [0]}, {}, {0: ["a"], 1: ["b"]}) == {"a", "b"}
    assert knotted({"a": [1], "b": [0]}, {}, {0: ["a"], 1: ["b", "decodes"]}) == set(), "who decodes will end"
    assert knotted({"a": [1]}, {}, {0: ["a"], 1: ["b"]}) == set()
    assert knotted({"a": [1], "b": [0]}, {"c": ["a"]}, {0: ["a", "c"], 1: ["b"]}) == {"a", "b", "c"}
    assert knotted({"a": [1], "b": [2], "c": [0]}, {}, {0: ["a"], 1: ["b"], 2: ["c"]}) == {"a", "b", "c"}
    assert knotted({"a": [0]}, {}, {0: ["a"]}) == {"a"}, "it waits for what it has itself"


names = st.sampled_from("abcdef")
places = st.integers(0, 3)


@given(
    st.dictionaries(names, st.sets(places, min_size=1), max_size=6),
    st.dictionaries(names, st.sets(names), max_size=3),
    st.dictionaries(places, st.sets(names), max_size=4),
)
def test_deadlock_is_the_set_left_after_removing_runnable_requests(
    waits: dict[str, set[int]], behind: dict[str, set[str]], holders: dict[int, set[str]]
) -> None:
    """Against a run of the tale itself: whoever waits for nobody ends, and with it what it holds."""
    left = set("abcdef")
    while True:
        held = {i: names & left for i, names in holders.items()}
        blocked = {
            name
            for name in left & {*waits, *behind}
            if any(
                held.get(i, set()) - {name} or not holders.get(i, set()) - {name} for i in waits.get(name, ())
            ) or behind.get(name, set()) & left
        }  # fmt: skip
        if blocked == left:
            break
        left = blocked
    found = knotted(waits, behind, holders)
    assert found <= left
    assert bool(found) == bool(left)


def attempt(name: str) -> RequestAttempt:
    submit = SubmitRequest(id=name, prompt_tokens=10, params=SamplingParams(max_tokens=5), received_s=0.0)
    asked = ClusterRequest(submit, b"")
    return RequestAttempt(asked, asked.try_again())


def looks(attempts: list[RequestAttempt], stats: EngineStats) -> RequestAttempt | None:
    """Who is found after four seconds in which two instances only say how they are: always the same."""
    fleet = [SimpleNamespace(number=number, stats=stats) for number in range(2)]
    knots = DeadlockDetector(cast(Any, fleet), cast(Any, attempts), cast(Any, SimpleNamespace(behind=dict)))
    found = None
    for now in range(5):
        for number in range(2):
            knots.heard(number, now)
        found = knots.find(now, ["a", "b"])
    return found[0] if found else None


def test_a_request_waiting_on_an_empty_instance_is_not_deadlocked() -> None:
    one = attempt("a")
    one.whole, one.room = {0}, {1: False}
    assert looks([one], EngineStats()) is None


@pytest.mark.parametrize("stats", [EngineStats(in_flight=1), EngineStats(recovering=True), EngineStats()])
def test_an_instance_that_is_in_a_long_iteration_goes_on(stats: EngineStats) -> None:
    one, decodes = attempt("a"), attempt("b")
    one.whole, one.room = {0}, {1: False}
    decodes.whole, decodes.at = {1}, 1
    assert looks([one, decodes], stats) is (one if stats == EngineStats() else None)


class Crossing:
    """Computes on one of two instances in turn, and decodes on the other."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        match event:
            case RequestArrived(request=request):
                return self._begin(request, view)
            case SpanDone(request=name):
                return [TransferKv(name, 1 - self.at[name])]
            case KvReady(request=name, instance=number):
                return [EnqueueRequest(name, (number,), "decode")]
        return []

    def _begin(self, request: Request, view: ClusterSnapshot) -> list[Action]:
        at = self.at[request.id] = 0 if request.id.startswith("a") else 1
        span = Span(request=request, start=0, end=request.prompt_tokens, group=(at,))
        return [CommitSpans(request.id, (span,), view.version)]

    def next_wakeup(self, now: float) -> float | None:
        return None


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.cluster_clients.make_placement", lambda *given: Crossing())


@pytest.mark.parametrize("count", [2, 6])
def test_of_deadlocked_requests_the_youngest_restarts(crossing: None, count: int) -> None:
    async def run() -> None:
        fake = FakeCluster(run_s=0.01, kv_tokens=100, full=True)
        async with running(fake, ("mixed", "mixed"), "tetris") as client:

            async def beat() -> None:
                while True:
                    for process in fake.processes.values():
                        process.beat()
                    await virtual_time.pause(0.1)

            beats = asyncio.create_task(beat())
            prompts = {f"{'ab'[i % 2]}{i}": prompt(i, 60) for i in range(count)}
            found = await asyncio.wait_for(
                asyncio.gather(*(ask(client, name, ids) for name, ids in prompts.items())), 20.0
            )
            beats.cancel()
            assert found == [answer(ids, 4) for ids in prompts.values()]
            asked = {message.id for message in fake.said(ReserveKv)}
            assert "a0#1" in asked
            assert "a0#2" not in asked, "the oldest goes on as it is"
            assert "b1#2" in asked, "they did wait for each other"

    virtual_time.run(run())


def test_a_request_behind_a_long_decode_is_not_deadlocked(crossing: None) -> None:
    async def run() -> None:
        fake = FakeCluster(run_s=0.01, token_s=0.6, kv_tokens=130, full=True)
        async with running(fake, ("mixed", "mixed"), "tetris") as client:

            async def beat() -> None:
                while True:
                    for process in fake.processes.values():
                        process.counted += 1  # it computes
                        process.beat()
                    await virtual_time.pause(0.1)

            beats = asyncio.create_task(beat())
            first = asyncio.create_task(ask(client, "a0", prompt(0, 70), 16))
            await virtual_time.pause(2.0)
            assert await ask(client, "a1", prompt(1, 70), 3) == answer(prompt(1, 70), 3)
            assert await first == answer(prompt(0, 70), 16)
            beats.cancel()
            assert {message.id for message in fake.said(ReserveKv)} == {"a0#1", "a1#1"}

    virtual_time.run(run())
