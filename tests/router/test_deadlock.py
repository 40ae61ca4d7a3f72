"""Requests that wait for each other's room for KV: which ones would for ever, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.router import virtual_time
from tests.router.cluster_clients import ask, beating, prompt, running
from tests.router.fake_instances import FakeCluster, answer

from headway.control.kv import KvClaim, deadlocked, gives_way
from headway.core.request import Request, Span
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    Event,
    KvReady,
    RequestArrived,
    SpanDone,
    TransferKv,
)
from headway.runtime.engine.protocol import ReserveKv


def claim(name: str, has: dict[int, int], **needs: int) -> KvClaim:
    """Of a request that waits, or not; needs: tokens by instance, as `on0=5`, behind those that were made before."""
    wanted = {int(key[2:]): tokens for key, tokens in needs.items()}
    return KvClaim(name, has, wanted, dict.fromkeys(wanted, ord(name[0])))


def test_two_crossing_migrations_are_a_deadlock() -> None:
    a, b = claim("a", {0: 60}, on1=60), claim("b", {1: 60}, on0=60)
    assert deadlocked([a, b], lambda i: 100) == {"a", "b"}
    assert gives_way([a, b], lambda i: 100) == ("b", True)
    assert not deadlocked([a, b], lambda i: 120)
    assert not deadlocked([a, claim("b", {1: 60})], lambda i: 100), "b ends, wherever it is"
    c = claim("c", {}, on1=10)
    assert deadlocked([a, b, c], lambda i: 100) == {"a", "b", "c"}, "blocks are given in the order of waiting"
    ring = [claim("a", {0: 60}, on1=60), claim("b", {1: 60}, on2=60), claim("c", {2: 60}, on0=60)]
    assert deadlocked(ring, lambda i: 100) == {"a", "b", "c"}
    assert gives_way([claim("a", {0: 60}, on0=60)], lambda i: 100) == ("a", False), "it waits for what it has itself"
    assert not deadlocked([claim("a", {}, on0=200)], lambda i: 100), "the instance refuses it"


def test_a_decode_that_lacks_room_to_end_is_waited_for_only_where_others_leave_it_some() -> None:
    decodes = KvClaim("d", {1: 30}, {1: 20}, {}, resident=True)
    a, b = claim("a", {0: 60}, on1=40), claim("b", {1: 60}, on0=30)
    assert not deadlocked([decodes, b], lambda i: 100)
    assert deadlocked([decodes, a, claim("b", {1: 60}, on0=60)], lambda i: 100) == {"d", "a", "b"}
    assert not deadlocked([decodes, a, b], lambda i: 100)
    others = [KvClaim(name, {1: 45}, {1: 10}, {}, resident=True) for name in "de"]
    assert not deadlocked([*others, claim("a", {0: 60}, on1=60)], lambda i: 100), "one of them is computed again"


@st.composite
def worlds(draw: st.DrawFn) -> list[KvClaim]:
    some = st.dictionaries(st.integers(0, 2), st.integers(1, 9), max_size=2)
    return [
        KvClaim(name, draw(some), needs := draw(some), {number: draw(st.integers(0, 9)) * 10 + n for number in needs})
        for n, name in enumerate("abcde"[: draw(st.integers(0, 5))])
    ]


def _ends(order: Sequence[KvClaim]) -> bool:
    """Whether requests can end in this order, each with all that it needs beside what those after it have."""
    for n, one in enumerate(order):
        for number, tokens in one.needs.items():
            others = order[n:]
            if any(each.turns.get(number, 99) < one.turns[number] for each in others):
                return False
            taken = sum(each.has.get(number, 0) for each in others)
            if taken and taken + tokens > 12:
                return False
    return True


@given(worlds())
def test_there_is_a_deadlock_where_requests_can_end_in_no_order(claims: list[KvClaim]) -> None:
    found = deadlocked(claims, lambda i: 12)
    assert bool(found) == (not any(map(_ends, permutations(claims))))
    way = gives_way(claims, lambda i: 12)
    assert (way is None) == (not found)
    assert way is None or way[0] in found


class World:
    """Requests that compute on one instance, move to another, and end there; few fit on an instance at a time."""

    TOTAL = 100

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.sizes = {f"r{n}": self.chance.randint(1, self.TOTAL) for n in range(12)}
        self.new, self.moved = list(self.sizes), set[str]()
        self.held: list[dict[str, int]] = [{}, {}, {}]
        self.queues: list[dict[str, int]] = [{}, {}, {}]

    def steps(self) -> list[tuple[str, str, int]]:
        """What can happen next: (what, request, instance)."""
        found = []
        for number, (here, queue) in enumerate(zip(self.held, self.queues, strict=True)):
            free = self.TOTAL - sum(here.values())
            # A prompt takes nothing that others wait for.
            room = free - sum(queue.values())
            found += [("begin", name, number) for name in self.new if self.sizes[name] <= room]
            found += [("grant", name, number) for name in list(queue)[:1] if queue[name] <= free]
            for name in here:
                if name in self.moved:
                    found.append(("end", name, number))
                elif not any(name in each for each in self.queues):
                    found += [("wait", name, i) for i in range(3) if i != number]
        return found

    def do(self, what: str, name: str, number: int) -> None:
        if what == "begin":
            self.new.remove(name)
            self.held[number][name] = self.sizes[name]
        elif what == "wait":
            self.queues[number][name] = self.sizes[name]
        elif what == "grant":
            self.held[number][name] = self.queues[number].pop(name)
            self.moved.add(name)
        else:
            self.drop(name)

    def drop(self, name: str) -> None:
        for each in (*self.held, *self.queues):
            each.pop(name, None)

    def claims(self) -> list[KvClaim]:
        found = []
        for name in self.sizes:
            waits = {i: queue for i, queue in enumerate(self.queues) if name in queue}
            has = {i: here[name] for i, here in enumerate(self.held) if name in here}
            turns = {i: list(queue).index(name) for i, queue in waits.items()}
            found.append(KvClaim(name, has, {i: queue[name] for i, queue in waits.items()}, turns))
        return found


@given(st.integers(0, 1 << 20))
def test_with_one_giving_way_some_request_can_always_go_on(seed: int) -> None:
    world, restarts = World(seed), 0
    while world.new or any(world.held):
        steps = world.steps()
        assert steps, "all wait"
        world.do(*world.chance.choice(steps))
        while (way := gives_way(world.claims(), lambda i: World.TOTAL)) is not None:
            name, helps = way
            assert helps
            world.drop(name)
            world.new.append(name)
            restarts += 1
    assert restarts <= len(world.sizes) ** 2


def test_without_giving_way_requests_do_wait_for_each_other() -> None:
    """In some of the same worlds."""
    stuck = 0
    for seed in range(40):
        world = World(seed)
        while steps := world.steps():
            world.do(*world.chance.choice(steps))
        stuck += any(world.held)
    assert stuck > 4


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
    monkeypatch.setattr("tests.router.cluster_clients.make_placement", lambda *given: Crossing())


@pytest.mark.parametrize("count", [2, 6])
async def test_of_deadlocked_requests_the_youngest_restarts(crossing: None, count: int) -> None:
    fake = FakeCluster(run_s=0.01, kv_tokens=100, full=True)
    async with running(fake, ("mixed", "mixed"), "tetris") as client, beating(fake):
        prompts = {f"{'ab'[i % 2]}{i}": prompt(i, 60) for i in range(count)}
        found = await asyncio.wait_for(asyncio.gather(*(ask(client, name, ids) for name, ids in prompts.items())), 20.0)
        assert found == [answer(ids, 4) for ids in prompts.values()]
        asked = {message.id for message in fake.said(ReserveKv)}
        assert "a0#1" in asked
        assert "a0#2" not in asked, "the oldest goes on as it is"
        assert "b1#2" in asked, "they did wait for each other"


async def test_a_request_behind_a_long_decode_is_not_deadlocked(crossing: None) -> None:
    fake = FakeCluster(run_s=0.01, token_s=0.6, kv_tokens=130, full=True)
    async with running(fake, ("mixed", "mixed"), "tetris") as client, beating(fake, computed=1):
        first = asyncio.create_task(ask(client, "a0", prompt(0, 70), 16))
        await virtual_time.pause(2.0)
        assert await ask(client, "a1", prompt(1, 70), 3) == answer(prompt(1, 70), 3)
        assert await first == answer(prompt(0, 70), 16)
        assert {message.id for message in fake.said(ReserveKv)} == {"a0#1", "a1#1"}
