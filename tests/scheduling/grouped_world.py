"""A small world around an instance of several groups, with its own books, which are kept from the batches alone.

For each request: in which group which of its tokens lie, and how far it has been computed in this life.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from tests.helpers.scheduler_simulation import is_long
from tests.helpers.unit_latency import random_config, small_machine

from headway.core.batch import Batch, GroupBatch, RemoteAttention, RequestProgress
from headway.core.request import Request, RequestEvent, Slo, Span
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.perf.latency.groups import ShardExchangeCost
from headway.policy.iteration.budget import LEAST_GAIN, LONGEST_WAIT_S
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.groups import GroupedScheduler
from headway.policy.iteration.requests import WHOLE

BLOCK = 16


@dataclass
class Book:
    """`shards`: (group, first token), in order; `cursor`: tokens computed or being computed."""

    request: Request
    output: int
    shards: list[tuple[int, int]] = field(default_factory=list)
    cursor: int = 0
    generated: int = 0
    aborted: bool = False
    spread: int = 1

    @property
    def base(self) -> int:
        return self.shards[-1][1]


@dataclass
class GroupedWorld:
    """Runs `plan` to its end; everything that the scheduler says is checked on the way."""

    rng: random.Random
    config: SchedulerConfig
    pool_tokens: int
    plan: list[tuple[Request, int]]
    exchange: ShardExchangeCost = ShardExchangeCost()  # noqa: RUF009 - frozen
    chaos: float = 0.0
    losses: float = 0.0
    ahead: int = 1

    def __post_init__(self) -> None:
        self.model = small_machine()
        block_managers = [BlockManager(self.pool_tokens, BLOCK) for _ in range(self.config.kv_parallel)]
        self.scheduler = GroupedScheduler(self.config, self.model, block_managers, self.exchange)
        self.tables = [BlockTables(block_manager.n_blocks) for block_manager in block_managers]
        self.books: dict[str, Book] = {}
        self.flights: list[tuple[float, int, Batch]] = []
        self.free_s = [0.0] * len(block_managers)
        self.now = 0.0
        self.steps = self.lost = self.preempted = self.assisted = self.lockstep = 0
        self.widest = 1
        self.log: list[bytes] = []
        self.finished: set[str] = set()
        self.aborted: set[str] = set()
        self.limit = 60 * sum(request.prompt_tokens + output for request, output in self.plan) + 2000

    def run(self) -> GroupedWorld:
        arrivals = sorted(self.plan, key=lambda item: -item[0].arrival_s)
        while arrivals or self.books:
            self.steps += 1
            assert self.steps < self.limit, "livelock: the plan does not end"
            while arrivals and arrivals[-1][0].arrival_s <= self.now:
                request, output = arrivals.pop()
                self.books[request.id] = Book(request, output)
                self.scheduler.add(Span.whole(request), self.now)
            self._meddle()
            free = {group for group in range(len(self.free_s)) if self.rng.random() < 0.9}
            while (batch := self.scheduler.schedule(self.now, self.ahead, free if self.flights else None)) is not None:
                self._take(batch)
                self.scheduler.check()
            if self.flights:
                self._complete()
            elif arrivals:
                self.now = max(self.now, arrivals[-1][0].arrival_s)
            else:
                assert not self.books, f"livelock: {sorted(self.books)} wait and nothing runs"
            self.scheduler.check()
        assert self.scheduler.idle
        assert (self.scheduler.running, self.scheduler.waiting, self.scheduler.shard_table.longs) == (0, 0, {})
        for group in self.scheduler.groups:
            assert group.block_manager.free_blocks == group.block_manager.n_blocks
            assert group.policy.targets.members == {}
        assert self.finished | self.aborted == {request.id for request, _ in self.plan}
        return self

    def _meddle(self) -> None:
        if self.books and self.rng.random() < self.chaos:
            name = self.rng.choice(sorted(self.books))
            self.books[name].aborted = True
            self._hear(self.scheduler.abort(name, self.now))
            assert self.scheduler.abort(name, self.now) == []
        if self.rng.random() < self.losses and self.lost < 3:
            self.lost += 1
            self.flights.clear()
            self._hear(self.scheduler.lost(0, self.now))
            self.tables = [BlockTables(table.allocator.n_blocks) for table in self.tables]
            for book in self.books.values():
                book.cursor, book.shards = 0, []
                assert not book.aborted

    def _complete(self) -> None:
        done_s, _, batch = heapq.heappop(self.flights)
        self.now = max(self.now, done_s)
        repeats = self.rng.randint(1, batch.repeat)
        results: list[RequestProgress] = []
        yields = [
            name
            for part in batch.parts
            for name in (*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last))
        ]
        if batch.repeat > 1:
            repeats = min(repeats, *(self.books[n].output - self.books[n].generated for n in yields))
        for name in yields:
            book = self.books[name]
            book.generated += repeats
            book.cursor += repeats - 1
            if book.aborted:
                results.append(RequestProgress(name, 0, True))
            elif book.generated == book.output or self.rng.random() < 0.3:
                results.append(RequestProgress(name, 1, book.generated == book.output))
        took_s = self.rng.uniform(0.5, 2.0) * batch.predicted_s
        self._hear(self.scheduler.complete(batch.id, results, self.now, took_s, repeats))

    def _hear(self, events: list[RequestEvent]) -> None:
        self.log += [msgspec.json.encode(event) for event in events]
        for event in events:
            if event.kind == "preempted":
                self.preempted += 1
            elif event.kind != "started":
                book = self.books.pop(event.request)
                assert book.aborted == (event.kind == "aborted")
                (self.aborted if book.aborted else self.finished).add(event.request)
                self.widest = max(self.widest, book.spread)

    # -- one batch ------------------------------------------------------------------------------------------------

    def _take(self, batch: Batch) -> None:
        self.log.append(msgspec.json.encode(batch))
        groups = [part.group for part in batch.parts]
        assert groups == sorted(set(groups))
        flying = {n for _, _, other in self.flights for part in other.parts for n in self._names(part)}
        for part in batch.parts:
            self._replay(part)
        rows: dict[str, int] = {}
        for part in batch.parts:
            assert part.decodes.members or part.prefills or part.assists, "an empty part"
            self._compute(part, rows, flying)
        assert len(rows) == sum(len(self._names(part)) for part in batch.parts), "rows of one request in two places"
        self._check_assists(batch, rows)
        self._check_times(batch)
        starts_s = max([self.now, *(self.free_s[group] for group in groups)])
        done_s = starts_s + batch.predicted_s * batch.repeat * self.rng.uniform(0.5, 2.0)
        for group in groups:
            self.free_s[group] = done_s
        heapq.heappush(self.flights, (done_s, batch.id, batch))
        for group in range(len(self.tables)):
            mine = sum(any(part.group == group for part in other.parts) for _, _, other in self.flights)
            assert mine <= self.config.stages
        self.lockstep += len(batch.parts) > 1

    @staticmethod
    def _names(part: GroupBatch) -> list[str]:
        return [*part.decodes.members, *(chunk.request for chunk in part.prefills)]

    def _replay(self, part: GroupBatch) -> None:
        """Another life of a request may be in flight elsewhere; whatever touches this group's blocks may not."""
        table = self.tables[part.group]
        mine = [other for _, _, batch in self.flights for other in batch.parts if other.group == part.group]
        flying = {name for other in mine for name in (*self._names(other), *(a.request for a in other.assists))}
        for op in part.kv_ops:
            if op.verb == "free":
                assert op.request not in flying, "KV was freed under a batch in flight"
                table.free(op.request)
                continue
            table.add(op.request, op.blocks)
            book = self.books.get(op.request)
            if op.verb == "reserve" and book is not None:
                if op.start == 0:
                    book.shards, book.cursor = [], 0
                else:
                    assert op.start == book.cursor, "a shard begins where the one before ends"
                    book.shards = [shard for shard in book.shards if shard[1] < op.start]
                book.shards.append((part.group, op.start))
                book.spread = max(book.spread, len(book.shards))
        table.check()

    def _compute(self, part: GroupBatch, rows: dict[str, int], flying: set[str]) -> None:
        longs = 0
        for name in part.decodes.members:
            book = self.books[name]
            assert name not in flying
            assert not book.aborted
            assert book.cursor == book.request.prompt_tokens + book.generated - 1
            book.cursor += 1
            rows[name] = 1
        assert part.decodes.kv_sum == sum(self.books[n].cursor - self.books[n].base for n in part.decodes.members)
        for chunk in part.prefills:
            book = self.books[chunk.request]
            assert not book.aborted
            assert (chunk.start, chunk.base) == (book.cursor, book.base)
            assert chunk.tokens > 0
            book.cursor += chunk.tokens
            known = book.request.prompt_tokens + book.generated
            assert book.cursor <= known
            assert chunk.last == (book.cursor == known)
            rows[chunk.request] = chunk.tokens
            longs += is_long(self.config, book.request)
        assert longs <= 1
        for name in self._names(part):
            book = self.books[name]
            assert book.shards[-1][0] == part.group, "rows are computed where the last shard is"
            held = book.cursor - book.base
            assert held <= sum(count for _, count in self.tables[part.group].runs(name)) * BLOCK
            assert held <= self._limit(book.request)

    def _limit(self, request: Request) -> int:
        shard, groups = self.scheduler.shard_tokens, len(self.tables)
        need = request.prompt_tokens + max(1, request.max_output_tokens - 1)
        return WHOLE if need <= shard else max(shard, -(-need // groups // BLOCK) * BLOCK + BLOCK)

    def _check_assists(self, batch: Batch, rows: dict[str, int]) -> None:
        """Every row of a spread request is attended over each of its earlier shards, once, and nothing else is."""
        wanted = set()
        for part in batch.parts:
            for name in self._names(part):
                shards = self.books[name].shards
                assert len({group for group, _ in shards}) == len(shards)
                for (group, start), (_, end) in pairwise(shards):
                    wanted.add((group, RemoteAttention(name, rows[name], part.group, start, end - start)))
        told = [(part.group, assist) for part in batch.parts for assist in part.assists]
        assert len(told) == len(set(told))
        assert set(told) == wanted
        self.assisted += len(told)

    def _check_times(self, batch: Batch) -> None:
        """What each part takes, counted here, against the prediction and the budget."""
        model, rules = self.model, self.config
        chunked = {chunk.request for part in batch.parts for chunk in part.prefills}
        crossing = dict.fromkeys((part.group for part in batch.parts), 0)
        for part in batch.parts:
            for assist in part.assists:
                crossing[part.group] += assist.rows
                crossing[assist.owner] += assist.rows
        times = []
        for part in batch.parts:
            decoded = [assist for assist in part.assists if assist.request not in chunked]
            kv = part.decodes.kv_sum + sum(assist.tokens for assist in decoded)
            count = part.decodes.count + len(decoded)
            seconds = float(model.token_s(part.tokens, part.tokens)[0]) + (model.decode_s(count, kv) if count else 0.0)
            for chunk in part.prefills:
                seconds += float(model.chunk_s(chunk.start - chunk.base, chunk.tokens, chunk.tokens)[0])
            for assist in part.assists:
                if assist.request in chunked:
                    whole, own = (float(model.chunk_s(p, assist.rows, assist.rows)[0]) for p in (assist.tokens, 0))
                    seconds += max(0.0, whole - own)
            if crossing[part.group]:
                seconds += self.exchange.fixed_s + self.exchange.row_s * crossing[part.group]
            times.append(seconds)
        assert batch.predicted_s == pytest.approx(max(times))
        chunks = [chunk for part in batch.parts for chunk in part.prefills]
        if rules.chunking != "adaptive" or not chunks:
            return
        assert rules.t_target_s is not None
        decodes = any(part.decodes.members for part in batch.parts)
        target_s = rules.t_target_s if decodes else max(rules.t_target_s, LONGEST_WAIT_S)
        budget_s = max(target_s, LEAST_GAIN * float(model.token_s(1, 1)[0]))
        medha = rules.medha_rules
        budget_s *= 1.0 + medha.stretch if medha is not None and any(chunk.last for chunk in chunks) else 1.0
        progress = any(chunk.tokens <= max(1, rules.min_chunk) for chunk in chunks)
        for part, seconds in zip(batch.parts, times, strict=True):
            busy = part.prefills or any(assist.request in chunked for assist in part.assists)
            assert not busy or progress or seconds <= budget_s * (1 + 1e-9), (seconds, budget_s, batch)


def grouped_world(seed: int) -> GroupedWorld:
    """Any policy, chunking and pipeline; pools that are too small; requests up to what all groups together hold."""
    rng = random.Random(f"groups {seed}")
    groups = rng.choice((2, 2, 3, 4))
    pool = rng.choice((320, 640, 960))
    config = random_config(
        rng,
        chunking=rng.choice(("adaptive", "adaptive", "static:96", "whole")),
        t_target_s=rng.choice((0.004, 0.01, 0.02)),
        max_num_seqs=rng.choice((3, 8, 64)),
        max_num_batched_tokens=rng.choice((64, 256, 2048)),
        stages=rng.choice((1, 1, 2, 3)),
        pipeline_schedule=rng.choice(("stream", "microbatch")),
        kv_parallel=groups,
        kv_shard_tokens=rng.choice((64, 160, 320, None)),
    )
    plan, at = [], 0.0
    for number in range(rng.randint(4, 16)):
        at += rng.expovariate(1 / rng.choice((0.002, 0.02, 0.1)))
        most = rng.choice((100, 300, groups * pool - 60))
        prompt = rng.randint(1, most)
        output = rng.choice((1, rng.randint(2, 12), rng.randint(13, 50)))
        slo = Slo(ttft_s=rng.choice((None, 0.05)), tbt_s=None)
        request = Request(
            id=f"r{number}", arrival_s=at, prompt_tokens=prompt, slo=slo, priority=rng.choice((0, 0, 0, -1)),
            max_output_tokens=min(output + rng.choice((0, 9)), groups * pool + 1 - prompt),
        )  # fmt: skip
        plan.append((request, min(output, request.max_output_tokens)))
    return GroupedWorld(
        rng=rng,
        config=config,
        pool_tokens=pool,
        plan=plan,
        exchange=rng.choice((ShardExchangeCost(), ShardExchangeCost(1e-4, 1e-6))),
        chaos=rng.choice((0.0, 0.0, 0.02)),
        losses=rng.choice((0.0, 0.0, 0.01)),
        ahead=rng.choice((1, 1, 50)),
    )
