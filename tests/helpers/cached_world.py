"""The real scheduler with a prefix cache around a pool that stores tokens: what is attended is read and compared."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from tests.helpers.unit_latency import small_machine

from headway.core.batch import Batch, RequestProgress
from headway.core.request import Request, RequestEvent, Span
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.kv.eviction import make_eviction
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
        cache = PrefixCache(make_eviction(self.eviction, lambda depth: 1.0 + depth), BLOCK, self.unused_blocks)
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
