"""Routers under anything at once: limited room, deaths, cuts, instances and clients that come and go."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.helpers.controller_audit import check
from tests.router import virtual_time
from tests.router.cluster_clients import all_quiet, ask, prompt, router
from tests.router.fake_instances import FakeCluster, FakeProcess, answer
from tests.router.virtual_time import pause

from headway.core.errors import RequestError
from headway.policy.placement.contract import Role
from headway.runtime.cluster.client import ClusterClient

SP = {"long_tokens": 40, "long_sp": 2}
RINGS = {**SP, "long_replicas": "fixed"}
POLICIES: list[tuple[str, dict[str, object]]] = [
    ("jsq", {}),
    ("fifo", {**SP}),
    ("fixed-sp", {"sp": 2}),
    ("context-parallel", {}),
    ("tetris", {"sizes": [1, 2]}),
    ("ladder", {}),
    ("loongserve", {}),
    ("loongserve", {"decode_batch": 1}),
    ("pecsched", {**RINGS}),
    ("pecsched", {**RINGS, "disaggregate": False}),
    ("priority", {**SP}),
    ("reservation", {**SP, "reserved": 2}),
]
_SPLIT: list[tuple[Role, ...]] = [
    ("prefill",) * 2 + ("decode",),
    ("prefill",) * 2 + ("decode",) * 2,
    ("prefill",) * 3 + ("decode",),
]
_ANY: list[tuple[Role, ...]] = [("mixed",) * 4, ("prefill",) * 3 + ("decode",), ("mixed", "mixed", "prefill", "decode")]
_MOST_CUTS = 2
"""One more, and it may be that a pair was started again in vain, and one of it is given up
(`runtime.cluster.membership`)."""
_PATIENCE_S = 600.0


class Complaints(logging.Handler):
    """What the product logs with a traceback: an error that something has caught."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


class Fuzz:
    """One seed. `done`: how often each thing was done to it."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.seed = seed
        self.placement, self.options = POLICIES[seed % len(POLICIES)]
        # Prompts begin alike, and instances cache them.
        self.shares = random.Random(f"shares {seed}").random() < 0.5
        if self.shares and self.placement in ("jsq", "tetris", "pecsched"):
            self.options = {**self.options, "affinity": True}
        self.roles = self._roles()
        self.in_place, self.full = chance.random() < 0.5, chance.random() < 0.5
        self.cuts: list[tuple[FakeProcess, FakeProcess]] = []
        self.done: dict[str, int] = {}
        self.fake = FakeCluster(
            run_s=chance.choice((0.0, 0.02, 0.1)),
            token_s=chance.choice((0.0, 0.01, 0.04)),
            send_s=chance.choice((0.0, 0.03)),
            start_s=0.1,
            kv_tokens=chance.choice((260, 400)) if self.full else 8192,
            full=self.full,
            caches=self.shares,
            evicts=seed % 3,
            apart=self._apart,
        )
        self.client = router(self.fake, self.roles, self.placement, self.options, self.in_place)

    def __str__(self) -> str:
        full = f", room for {self.fake.kv_tokens}" if self.full else ""
        return f"seed {self.seed}: {self.placement} {self.options} of {self.roles}, in place {self.in_place}{full}"

    def _roles(self) -> tuple[Role, ...]:
        if self.placement == "jsq":
            return ("mixed",) * 3
        apart = self.placement == "pecsched" and "disaggregate" not in self.options
        return self.chance.choice(_SPLIT if apart else _ANY)

    def _apart(self, one: FakeProcess, other: FakeProcess) -> bool:
        return (one, other) in self.cuts or (other, one) in self.cuts

    async def go(self) -> None:
        """Every request, and all that is done to it; raises AssertionError unless all that stay are answered, and
        nothing is left."""
        try:
            async with self._running(), asyncio.timeout(_PATIENCE_S):
                work = [self._ask(number) for number in range(self.chance.randint(4, 14))]
                found = await asyncio.gather(*work, self._hurt(), return_exceptions=True)
                wrong = [each for each in found if isinstance(each, BaseException)]
                assert not wrong, wrong[:3]
                await all_quiet(self.client, self.fake)
                self._audit()
                assert not self.fake.complaints, self.fake.complaints[:3]
        except TimeoutError:
            raise AssertionError(f"{self}: it hangs, {self._state()}") from None
        except Exception as error:
            raise AssertionError(f"{self}: {error!r}") from error

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[ClusterClient, None]:
        await self.client.start()
        beats = asyncio.create_task(self._beat())
        try:
            yield self.client
            assert not beats.done(), beats.exception()
        finally:
            beats.cancel()
            await self.client.close()

    async def _beat(self) -> None:
        """Snapshots, and whether all counts of the router are right meanwhile."""
        while True:
            await pause(0.1)
            for process in list(self.fake.processes.values()):
                if process.alive:
                    process.beat()
            self._audit()

    def _audit(self) -> None:
        if self.client._live is not None:
            check(self.client._live.controller)

    async def _ask(self, number: int) -> None:
        """One request; some clients do not stay."""
        chance = random.Random(1000 * self.seed + number)
        # Those that share come one after another rather than at once.
        await pause(chance.random() * (2.0 if self.shares else 0.3))
        text = 100 * self.seed + (number % 2 if self.shares else number)
        lengths = (50, 90, 150, 200) if self.shares and not self.full else (3, 10, 30, 60, 90)
        ids, count = prompt(text, chance.choice(lengths)), chance.randint(1, 25)
        asked = asyncio.create_task(ask(self.client, f"r{number}", ids, count))
        if chance.random() < 0.2:
            await pause(chance.random() * 0.3)
            asked.cancel()
            await asyncio.wait([asked])
            if asked.cancelled():
                self._count("gone")
                return
        assert await asked == answer(ids, count), f"r{number} is answered otherwise"

    async def _hurt(self) -> None:
        """Up to four times something, at any moment."""
        chance = random.Random(-1 - self.seed)
        cuts = 0
        for _ in range(chance.randint(0, 4)):
            await pause(chance.random() * 0.3)
            what, number = chance.choices(("kill", "leave", "join", "cut"), (5, 1, 1, 3))[0], chance.randrange(3)
            try:
                if what == "kill":
                    self.fake.kill(number)
                elif what == "leave":
                    self._leave(number)
                elif what == "join":
                    self.client.join(0)
                elif cuts < _MOST_CUTS:
                    cuts += 1
                    self._cut(number, (number + chance.randint(1, 2)) % 3, chance.choice((0.05, 0.5, 3.0)))
                self._count(what)
            except RequestError:
                self._count(f"no {what}")

    def _leave(self, number: int) -> None:
        """One that is starting again goes whatever the others can do without it, and takes their requests with it."""
        instance = self.client.registry.get(number)
        if instance is not None and instance.state == "ready":
            self.client.leave(number)

    def _cut(self, one: int, other: int, for_s: float) -> None:
        """Between two processes, for so long; the next life of either is not concerned."""
        processes = self.fake.processes
        pair = processes[one], processes[other]
        self.cuts.append(pair)
        asyncio.get_running_loop().call_later(for_s, self.cuts.remove, pair)

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1

    def _state(self) -> list[dict[str, Any]]:
        live = self.client._live
        assert live is not None
        return [
            {name: getattr(attempt, name) for name in ("wire", "at", "running", "spread", "whole", "room", "halts")}
            for attempt in live.requests.attempts
        ][:4]


async def go(seeds: range, beside: int = 32) -> dict[str, int]:
    """So many at a time; how often what was done to them, all together. Raises AssertionError for the first that
    fails, or for what anybody has not caught."""
    loop, raised = asyncio.get_running_loop(), []
    loop.set_exception_handler(lambda _, context: raised.append(str(context)))
    logs = Complaints()
    product = logging.getLogger("headway")
    product.addHandler(logs)
    turn = asyncio.Semaphore(beside)
    total: dict[str, int] = {}

    async def one(seed: int) -> None:
        async with turn:
            fuzz = Fuzz(seed)
            await fuzz.go()
        for what, count in fuzz.done.items():
            total[what] = total.get(what, 0) + count

    try:
        for ended in asyncio.as_completed([asyncio.create_task(one(seed)) for seed in seeds]):
            await ended
            assert not raised, raised[0]
            assert not logs.found, logs.found[0]
    finally:
        product.removeHandler(logs)
    return total


SEEDS = 60
LONG = 60
"""Times as many."""


@pytest.mark.parametrize("turn", [0, *(pytest.param(turn, marks=pytest.mark.long) for turn in range(1, LONG))])
def test_every_request_is_answered_whatever_happens_and_nothing_is_left(turn: int) -> None:
    done = virtual_time.run(go(range(turn * SEEDS, (turn + 1) * SEEDS)))
    assert min(done.get(what, 0) for what in ("kill", "leave", "join", "cut", "gone")) > 0, done
