"""Prefix sharing by the real scheduler: chunks and decodes attend the KV of their own tokens, whoever computed it."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.helpers.marks import quick_first
from tests.helpers.unit_latency import small_machine

from headway.core.batch import Batch, RequestProgress
from headway.core.request import Request, RequestEvent, Span
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.kv.prefix_cache import PrefixCache
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler

BLOCK = 16
Tokens = tuple[int, ...]


class PrefixNumbers:
    """A number for each prefix of each salt: equal exactly for equal prefixes, by construction."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, int], int] = {}

    def of(self, tokens: Tokens, salt: str) -> list[int]:
        number = self._numbers.setdefault((salt, -1), len(self._numbers))
        numbers = []
        for token in tokens:
            number = self._numbers.setdefault((token, number), len(self._numbers))
            numbers.append(number)
        return numbers


@dataclass
class Client:
    """One request, and the tokens that it will generate."""

    request: Request
    prompt: Tokens
    output: Tokens
    """The tokens that it will generate."""
    numbers: list[int] = field(default_factory=list)
    """The number of each prefix of prompt and output."""
    salt: str = ""
    cached: bool = True
    got: int = 0
    registered: list[int] = field(default_factory=list)
    aborted: bool = False

    def keys(self, tokens: int) -> list[int]:
        """Keys of the full blocks of its first tokens."""
        return self.numbers[BLOCK - 1 : tokens : BLOCK]


@dataclass
class CachedWorld:
    """Runs clients to their end. `chaos`: chance of an abort a step; `losses`: of a loss of all KV."""

    rng: random.Random
    pool_tokens: int
    clients: list[Client]
    stages: int = 1
    eviction: str = "lru"
    unused_blocks: int | None = None
    chaos: float = 0.0
    losses: float = 0.0
    computed: int = 0
    finished: list[str] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        model = small_machine()
        cache = PrefixCache(BLOCK, (lambda depth: 1.0 + depth) if self.eviction == "cost" else None, self.unused_blocks)
        self.cache = cache
        self.manager = BlockManager(self.pool_tokens, BLOCK, cache)
        config = SchedulerConfig(stages=self.stages)
        self.scheduler = Scheduler(config, model, self.manager)
        self.prefixes = PrefixNumbers()
        self.live: dict[str, Client] = {}
        self.flights: deque[Batch] = deque()
        self.forget()

    def forget(self) -> None:
        """Start with an empty pool."""
        self.tables = BlockTables(self.manager.n_blocks)
        # The number of the prefix whose last token each slot holds; -1: nothing was stored.
        self.slots = [-1] * (self.manager.n_blocks * BLOCK)

    def add(self, client: Client) -> None:
        name, hit = client.request.id, 0
        client.numbers = self.prefixes.of(client.prompt + client.output, client.salt)
        if client.cached:
            client.registered = client.keys(len(client.prompt))
            hit = self.cache.register(name, client.registered, len(client.prompt))
        request = Request(
            id=name, arrival_s=self.now, prompt_tokens=len(client.prompt), max_output_tokens=len(client.output),
            cached_tokens=hit,
        )  # fmt: skip
        self.live[name] = client
        self.scheduler.add(Span.whole(request), self.now)

    def run(self) -> CachedWorld:
        arrivals = deque(self.clients)
        for step in range(100_000):
            if not (arrivals or self.live or self.flights):
                self.scheduler.check()
                return self
            while arrivals and (self.rng.random() < 0.3 or not self.live):
                self.add(arrivals.popleft())
            self.step(step)
        raise AssertionError("requests starve")

    def step(self, step: int) -> None:
        self.now = 0.01 * step
        if self.live and self.rng.random() < self.chaos:
            name = self.rng.choice(sorted(self.live))
            self.live[name].aborted = True
            self.apply(self.scheduler.abort(name, self.now))
        if self.rng.random() < self.losses:
            self.flights.clear()
            self.apply(self.scheduler.lost(0, self.now))
            self.forget()
        while (batch := self.scheduler.schedule(self.now)) is not None:
            self.compute(batch)
            self.flights.append(batch)
        self.scheduler.check()
        if self.flights:
            self.complete(self.flights.popleft())

    def compute(self, batch: Batch) -> None:
        """Store what the batch computes and compare what it attends, token for token."""
        part = batch.parts[0]
        for op in part.kv_ops:
            self.tables.apply(op)
        for name in part.decodes.members:
            client = self.live[name]
            self.attend(client, len(client.prompt) + client.got - 1, 1)
        for chunk in part.prefills:
            self.attend(self.live[chunk.request], chunk.start, chunk.tokens)
            self.computed += chunk.tokens

    def attend(self, client: Client, start: int, count: int) -> None:
        runs = self.tables.runs(client.request.id)
        slots = [slot for first, n in runs for slot in range(first * BLOCK, (first + n) * BLOCK)]
        for position in range(start, start + count):
            self.slots[slots[position]] = client.numbers[position]
        known = client.numbers[: start + count]
        assert [self.slots[slot] for slot in slots[: start + count]] == known, "another prompt's KV"

    def complete(self, batch: Batch) -> None:
        part, progress = batch.parts[0], []
        for name in (*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)):
            client = self.live[name]
            client.got += 1
            ended = client.got >= len(client.output)
            if ended and client.cached:
                client.registered[:] = client.keys(len(client.prompt) + client.got)
            progress.append(RequestProgress(name, 0 if client.aborted else 1, client.aborted or ended))
        self.apply(self.scheduler.complete(batch.id, progress, self.now))

    def apply(self, events: list[RequestEvent]) -> None:
        for event in events:
            if event.kind in ("finished", "aborted"):
                del self.live[event.request]
                self.finished.append(event.request)


def client(name: str, prompt: Tokens, output: int = 4, **fields: object) -> Client:
    request = Request(id=name, arrival_s=0.0, prompt_tokens=len(prompt), max_output_tokens=output)
    return Client(request, prompt, tuple(-i - 1 for i in range(output)), **fields)


def random_world(seed: int) -> CachedWorld:
    """Questions to a few documents of a few tenants, and turns that go on from earlier answers."""
    rng = random.Random(seed)
    documents = [tuple(rng.randrange(9) for _ in range(rng.randrange(8, 300))) for _ in range(4)]
    clients: list[Client] = []
    for i in range(rng.randrange(5, 40)):
        if clients and rng.random() < 0.3:
            earlier = rng.choice(clients)
            prompt = earlier.prompt + earlier.output + tuple(rng.randrange(9) for _ in range(rng.randrange(1, 40)))
        else:
            prompt = rng.choice(documents) + tuple(rng.randrange(9) for _ in range(rng.randrange(1, 40)))
        salt = rng.choice(["", "", "tenant"])
        clients.append(client(f"r{i}", prompt[:600], rng.randrange(1, 30), salt=salt, cached=rng.random() < 0.9))
    return CachedWorld(
        rng,
        pool_tokens=BLOCK * rng.randrange(42, 150),
        clients=clients,
        stages=rng.choice([1, 1, 3]),
        eviction=rng.choice(["lru", "cost"]),
        unused_blocks=rng.choice([None, None, 0, 10]),
        chaos=rng.choice([0.0, 0.02]),
        losses=rng.choice([0.0, 0.01]),
    )


@pytest.mark.parametrize("first", quick_first(range(0, 400, 20)))
def test_random_worlds_attend_the_right_kv_and_every_request_ends(first: int) -> None:
    hits = 0
    for seed in range(first, first + 20):
        world = random_world(seed)
        try:
            world.run()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        assert sorted(world.finished) == sorted(c.request.id for c in world.clients)
        hits += world.cache.hit_tokens
    assert hits > 5_000


def world_of(*clients: Client, pool: int = 4096, **fields: object) -> CachedWorld:
    return CachedWorld(random.Random(0), pool, list(clients), **fields)


def in_turn(*clients: Client, **fields: Any) -> CachedWorld:
    """A world in which each comes when the one before has ended."""
    world = world_of(**fields)
    for one in clients:
        world.clients = [one]
        world.run()
    return world


@pytest.mark.parametrize(("tokens", "hit"), [(100, 96), (96, 80)])
def test_a_prompt_that_comes_again_is_computed_but_for_its_last_block(tokens: int, hit: int) -> None:
    """One of whole blocks still computes its last token."""
    prompt = tuple(range(tokens))
    world = in_turn(client("a", prompt), client("b", prompt))
    assert world.computed == 2 * tokens - hit
    assert (world.cache.queried_tokens, world.cache.hit_tokens) == (2 * tokens, hit)


def test_the_next_turn_finds_the_answer_cached_too() -> None:
    first = client("a", tuple(range(40)), output=30)
    world = in_turn(first, client("b", first.prompt + first.output + (7, 7)))
    # Of 70 tokens all but the last generated one have KV: 4 blocks.
    assert world.cache.hit_tokens == 64


def test_other_salts_and_uncached_requests_never_hit() -> None:
    prompt = tuple(range(100))
    world = world_of(client("a", prompt), client("b", prompt, salt="b"), client("c", prompt, cached=False))
    world.run()
    assert world.cache.hit_tokens == 0
    assert world.computed == 300


def test_a_second_question_waits_for_a_document_that_is_being_prefilled() -> None:
    document = tuple(i % 97 for i in range(3000))
    world = world_of(pool=8192)
    for name, question in (("a", (1,)), ("b", (2,))):
        world.add(client(name, document + question))
    while world.live:
        world.step(0)
    # The document once; its last 3000 % 16 = 8 tokens and the question again.
    assert world.computed == 3001 + 9


def test_requests_share_blocks_that_do_not_fit_twice() -> None:
    document = tuple(i % 97 for i in range(1600))
    world = world_of(client("a", (*document, 1), 300), client("b", (*document, 2), 300), pool=BLOCK * 142)
    world.run()
    assert world.computed == 1601 + 1
    assert sorted(world.finished) == ["a", "b"]


def test_cached_blocks_count_as_free_and_keep_none_waiting() -> None:
    world = world_of(client("a", tuple(range(1000)), 1), pool=1024)
    world.run()
    assert world.manager.cached_tokens == 62 * BLOCK
    assert world.manager.free_blocks == 64
    world.clients = [client("b", tuple(range(5000, 6000)), 1)]
    world.run()
    assert world.finished == ["a", "b"]


def test_a_limit_of_unused_blocks_is_kept() -> None:
    world = in_turn(client("a", tuple(range(1000)), 1), unused_blocks=5)
    assert world.manager.cached_tokens == 5 * BLOCK


def test_class_and_deadline_follow_the_uncached_part() -> None:
    document = tuple(i % 97 for i in range(20_000))
    world = world_of(client("a", document, 1), pool=32_768)
    world.run()
    world.add(client("cached", (*document, 1), 1))
    world.add(client("new", tuple(1 + i % 97 for i in range(20_000)), 1))
    cached, new = (world.scheduler.deadline_s(name) for name in ("cached", "new"))
    assert cached < new
