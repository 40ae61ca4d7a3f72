"""A small world around the real scheduler: virtual time, wrong predictions, aborts, losses, and its own books.

Everything that the scheduler says is checked against books that are kept from its batches alone: which tokens of which
request have been computed in this life, who may hold how many blocks, and who is in flight.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from tests.helpers.unit_latency import small_machine

from headway.core.batch import Batch, DecodeGroup, RequestProgress
from headway.core.request import Request, RequestEvent, Span
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.policy.iteration.budget import LEAST_GAIN, LONGEST_WAIT_S
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.fill import PROGRESS_EVERY
from headway.policy.iteration.scheduler import Scheduler

BLOCK = 16


@dataclass
class Book:
    """What one request has been seen to do. `cursor` is the next token to be computed, in this life."""

    request: Request
    output: int
    cursor: int = 0
    generated: int = 0
    lives: int = 0
    decoding: bool = False
    aborted: bool = False
    started: int = 0
    is_long: bool = False


def is_long(config: SchedulerConfig, request: Request) -> bool:
    """Whether Medha's rules hold and the prompt is long by its tokens alone."""
    medha = config.medha_rules
    return medha is not None and request.prompt_tokens - request.cached_tokens > medha.long_tokens


@dataclass
class World:
    """Runs `plan` (requests by arrival) to the end. `chaos` is the chance of an abort per step; `losses` of a loss."""

    rng: random.Random
    config: SchedulerConfig
    pool_tokens: int
    plan: list[tuple[Request, int]]
    noise: tuple[float, float] = (0.5, 2.0)
    chaos: float = 0.0
    losses: float = 0.0
    learns: bool = False
    ahead: int = 1
    latency: LatencyModel | None = None
    now: float = 0.0
    steps: int = 0
    log: list[bytes] = field(default_factory=list)
    finished: dict[str, float] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        base = self.latency or small_machine()
        self.truth = base
        self.model: LatencyModel = CorrectedLatency(base) if self.learns else base
        self.scheduler = Scheduler(self.config, self.model, BlockManager(self.pool_tokens, BLOCK))
        self.tables = BlockTables(self.scheduler.block_manager.n_blocks)
        self.books: dict[str, Book] = {}
        self.flights: deque[tuple[Batch, float]] = deque()
        self.arrivals = deque(sorted(self.plan, key=lambda item: item[0].arrival_s))
        self.epochs: dict[int, tuple[str, ...]] = {0: ()}
        self.preempted = self.told_preempted = self.idle_batches = self.lost = 0
        self.limit = 50 * sum(request.prompt_tokens + output for request, output in self.plan) + 1000

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> World:
        while self.arrivals or self.books:
            self.steps += 1
            assert self.steps < self.limit, "livelock: the plan does not end"
            self._arrive()
            self._meddle()
            while (batch := self.scheduler.schedule(self.now, self.ahead)) is not None:
                self._take(batch)
                self.scheduler.check()
            if self.flights:
                self._complete()
            elif self.arrivals:
                self.now = max(self.now, self.arrivals[0][0].arrival_s)
            else:
                assert not self.books, f"livelock: {sorted(self.books)} wait and nothing runs"
            self.scheduler.check()
        assert self.scheduler.idle
        assert self.scheduler.block_manager.free_blocks == self.scheduler.block_manager.n_blocks
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        assert self.told_preempted == self.preempted
        assert self.scheduler.policy.targets.members == {}
        assert self.finished.keys() | self.aborted == {request.id for request, _ in self.plan}
        return self

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0].arrival_s <= self.now:
            request, output = self.arrivals.popleft()
            self.books[request.id] = Book(request, output, is_long=is_long(self.config, request))
            self.scheduler.add(Span.whole(request), self.now)

    def _meddle(self) -> None:
        if self.books and self.rng.random() < self.chaos:
            name = self.rng.choice(sorted(self.books))
            self.books[name].aborted = True
            flying = name in self._flying()
            events = self.scheduler.abort(name, self.now)
            assert [event.kind for event in events] == ([] if flying else ["aborted"])
            self._hear(events)
            assert self.scheduler.abort(name, self.now) == []
        if self.rng.random() < self.losses and self.lost < 4:
            self.lost += 1
            self.flights.clear()
            held = {name for name in self.tables.owners() if name in self.books and not self.books[name].aborted}
            before = self.told_preempted
            events = self.scheduler.lost(0, self.now)
            self.preempted += len(held)
            self.tables = BlockTables(self.tables.allocator.n_blocks)
            for book in self.books.values():
                book.cursor, book.decoding = 0, False
                book.lives += book.request.id in held
            self._hear(events)
            assert self.told_preempted == self.preempted >= before + len(held)
            assert not any(book.aborted for book in self.books.values())

    def _complete(self) -> None:
        batch, done_s = self.flights.popleft()
        elapsed_s = max(0.0, done_s - self.now)
        self.now = max(self.now, done_s)
        results = []
        part = batch.parts[0]
        ended = []
        repeats = self._repeats(batch)
        for name in (*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)):
            book = self.books[name]
            if book.aborted:
                results.append(RequestProgress(name, 0, True))
                continue
            book.generated += repeats
            book.cursor += repeats - 1
            book.decoding = True
            if book.generated == book.output or self.rng.random() < 0.5:  # who goes on need not be named
                results.append(RequestProgress(name, 1, book.generated == book.output))
            if book.generated == book.output:
                ended.append(name)
        events = self.scheduler.complete(batch.id, results, self.now, elapsed_s if self.learns else None, repeats)
        self._hear(events)
        assert [event.request for event in events if event.kind == "finished"] == ended
        waiting = {chunk.request for chunk in part.prefills} | set(part.decodes.members)
        for name in waiting & self.books.keys():
            assert not self.books[name].aborted or name in self._flying()

    def _repeats(self, batch: Batch) -> int:
        """How often a batch of decodes is carried out: at most until one of them ends, or somebody arrives."""
        if batch.repeat == 1:
            return 1
        part = batch.parts[0]
        assert not part.prefills
        assert not self.flights
        books = [self.books[name] for name in part.decodes.members]
        for book in books:
            assert book.cursor + batch.repeat - 1 <= self._room(book.request.id)
        return self.rng.randint(1, min(batch.repeat, *(book.output - book.generated for book in books)))

    def _room(self, name: str) -> int:
        return sum(count for _, count in self.tables.runs(name)) * BLOCK

    # -- what is heard and seen -----------------------------------------------------------------------------------

    def _flying(self) -> set[str]:
        return {
            name
            for batch, _ in self.flights
            for name in (*batch.parts[0].decodes.members, *(chunk.request for chunk in batch.parts[0].prefills))
        }

    def _hear(self, events: list[RequestEvent]) -> None:
        self.log.extend(msgspec.json.encode(event) for event in events)
        for event in events:
            book = self.books.get(event.request)
            if event.kind == "preempted":
                self.told_preempted += 1
            elif event.kind == "started":
                assert book is not None
                book.started += 1
                assert book.started == 1
            else:
                assert book is not None
                assert book.aborted == (event.kind == "aborted")
                assert book.started or book.aborted
                del self.books[event.request]
                if book.aborted:
                    self.aborted.add(event.request)
                else:
                    self.finished[event.request] = self.now

    def _take(self, batch: Batch) -> None:
        self.log.append(msgspec.json.encode(batch))
        flying = self._flying()
        part, rules = batch.parts[0], self.config
        for op in part.kv_ops:
            if op.verb != "free":
                self.tables.add(op.request, op.blocks)
                continue
            assert op.request not in flying, "KV was freed under a batch in flight"
            oldest = next((name for name in self.books if name in self.tables.owners()), None)
            self.tables.free(op.request)
            if op.request in self.books:
                assert op.request != oldest, "the oldest request keeps its KV"
                book = self.books[op.request]
                book.cursor, book.decoding = 0, False
                book.lives += 1
                self.preempted += 1
        self.tables.check()
        leases = {
            lease.request: self.scheduler.block_manager.where(lease.request)
            for lease in self.scheduler.block_manager.leases()
        }
        assert leases == {name: self.tables.runs(name) for name in self.tables.owners()}
        names = [*part.decodes.members, *(chunk.request for chunk in part.prefills)]
        assert names, "an empty batch"
        assert len(names) == len(set(names))
        assert sum(self.books[chunk.request].is_long for chunk in part.prefills) <= 1
        self._check_group(part.decodes)
        assert len(leases) <= rules.max_num_seqs
        self._check_budget(batch)
        self._check_progress(batch, flying)
        for name in part.decodes.members:
            book = self.books[name]
            assert book.decoding
            assert not book.aborted
            assert name not in flying
            assert book.cursor == book.request.prompt_tokens + book.generated - 1
            book.cursor += 1
        assert part.decodes.kv_sum == sum(self.books[name].cursor for name in part.decodes.members)
        for chunk in part.prefills:
            book = self.books[chunk.request]
            assert not book.aborted
            assert not book.decoding
            assert chunk.start == book.cursor
            assert chunk.tokens > 0
            assert rules.pipeline_schedule == "stream" or chunk.request not in flying
            book.cursor += chunk.tokens
            known = book.request.prompt_tokens + book.generated
            assert book.cursor <= known
            assert chunk.last == (book.cursor == known)
        for name in names:
            assert self.books[name].cursor <= self._room(name)
        starts_s = max([self.now, *(done_s for _, done_s in self.flights)])
        self.flights.append((batch, starts_s + self._true_s(batch) * self.rng.uniform(*self.noise)))
        assert len(self.flights) <= rules.stages

    def _true_s(self, batch: Batch) -> float:
        """What the batch takes, before noise, whatever a model that learns may have learned."""
        part = batch.parts[0]
        load = BatchLoad(part.decodes.count, part.decodes.count, part.decodes.kv_sum)
        for chunk in part.prefills:
            load = load.with_chunk(chunk.tokens, self.truth.attention_s(chunk.start, chunk.tokens))
        seconds = load_s(self.truth, load)
        assert self.learns or seconds == pytest.approx(batch.predicted_s)
        return seconds

    def _check_group(self, group: DecodeGroup) -> None:
        """The same epoch has the same members, and a new one is its base with the changes that it names."""
        if group.epoch not in self.epochs:
            stay = [name for name in self.epochs[group.base] if name not in group.left]
            self.epochs[group.epoch] = (*stay, *group.joined)
        assert group.members == self.epochs[group.epoch]

    def _check_budget(self, batch: Batch) -> None:
        """Predicted time within t_target unless decodes alone exceed it, or the named progress exception."""
        part, rules = batch.parts[0], self.config
        chunks = [chunk.tokens for chunk in part.prefills]
        if not chunks:
            return
        if rules.chunking == "whole":
            assert all(chunk.last for chunk in part.prefills)
            assert len(chunks) == 1 or batch.tokens <= rules.max_num_batched_tokens
        elif rules.chunking.startswith("static"):
            assert batch.tokens <= min(int(rules.chunking.split(":")[1]), rules.max_num_batched_tokens)
        else:
            assert batch.tokens <= rules.max_num_batched_tokens
            promises = [b.request.slo.tbt_s for b in self.books.values() if b.decoding and b.request.slo.tbt_s]
            assert rules.t_target_s is not None
            target_s = rules.t_target_s
            if not any(book.decoding for book in self.books.values()):
                # Only a newcomer would wait: the longest default wait is 1 s.
                target_s = max(target_s, LONGEST_WAIT_S)
            budget_s = min([target_s, *(tbt_s / rules.gap_stages for tbt_s in promises)])
            one_token_s = float(self.scheduler.latency.token_s(1, 1)[0])
            budget_s = max(budget_s, LEAST_GAIN * one_token_s)
            budget_s = max(budget_s, LEAST_GAIN * float(self.model.token_s(1, 1)[0]))
            if any(chunk.last for chunk in part.prefills) and rules.medha_rules is not None:
                budget_s *= 1.0 + rules.medha_rules.stretch
            exception = len(chunks) == 1 and chunks[0] <= max(1, rules.min_chunk)
            assert batch.predicted_s <= budget_s * (1 + 1e-9) or exception

    def _check_progress(self, batch: Batch, flying: set[str]) -> None:
        """While a begun prefill could run, one advances at least every `PROGRESS_EVERY` iterations."""
        rules = self.config
        begun = [
            book
            for name, book in self.books.items()
            if book.cursor and not book.decoding and not book.aborted
            if book.cursor < book.request.prompt_tokens + book.generated
            if rules.pipeline_schedule == "stream" or name not in flying
        ]
        full = batch.parts[0].decodes.count >= rules.max_num_batched_tokens
        held = rules.chunking != "adaptive" or not rules.min_chunk or full
        self.idle_batches = 0 if batch.parts[0].prefills or held or not begun else self.idle_batches + 1
        assert self.idle_batches <= PROGRESS_EVERY
