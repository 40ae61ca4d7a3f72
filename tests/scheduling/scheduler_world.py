"""A small world around the real scheduler of one group or several: virtual time, wrong predictions, aborts, losses.

Everything that the scheduler says is checked against books that are kept from its batches alone: which tokens of which
request have been computed in this life and in which group they lie, who may hold how many blocks, and who is in flight.
The functions at the end make worlds from a seed: every combination of settings, arrivals and mishaps.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from tests.helpers.unit_latency import random_config, small_machine

from headway.core.batch import Batch, DecodeGroup, GroupBatch, RemoteAttention, RequestProgress
from headway.core.request import BACKGROUND_PRIORITY, Request, RequestEvent, Slo, Span
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.groups import ShardExchangeCost
from headway.policy.iteration.budget import LEAST_GAIN, LONGEST_WAIT_S
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.fill import PROGRESS_EVERY
from headway.policy.iteration.groups import GroupedScheduler, group_policies
from headway.policy.iteration.requests import WHOLE
from headway.policy.iteration.scheduler import InstanceScheduler, Scheduler

BLOCK = 16


@dataclass
class RequestBook:
    """One request, as its batches have shown it. `shards`: (group, first token), in order; `cursor`: tokens that are
    computed or being computed in this life; `spread`: the most groups that it had at once."""

    request: Request
    output: int
    shards: list[tuple[int, int]] = field(default_factory=list)
    cursor: int = 0
    generated: int = 0
    decoding: bool = False
    aborted: bool = False
    started: int = 0
    spread: int = 1

    @property
    def base(self) -> int:
        return self.shards[-1][1]

    @property
    def known(self) -> int:
        return self.request.prompt_tokens + self.generated

    def begin_again(self) -> None:
        self.cursor, self.shards, self.decoding = 0, [], False


@dataclass
class World:
    """Runs `plan` (requests by arrival, with the tokens that each says) to the end. `chaos` is the chance of an abort
    per step, `losses` of a loss. grouped: by the scheduler of several groups, though there may be one."""

    rng: random.Random
    config: SchedulerConfig
    pool_tokens: int
    plan: list[tuple[Request, int]]
    noise: tuple[float, float] = (0.5, 2.0)
    exchange: ShardExchangeCost = ShardExchangeCost()  # noqa: RUF009 - frozen
    chaos: float = 0.0
    losses: float = 0.0
    learns: bool = False
    ahead: int = 1
    grouped: bool = False
    latency: LatencyModel = field(default_factory=small_machine)

    def __post_init__(self) -> None:
        self.model: LatencyModel = CorrectedLatency(self.latency) if self.learns else self.latency
        block_managers = [BlockManager(self.pool_tokens, BLOCK) for _ in range(self.config.kv_parallel)]
        self.alone = len(block_managers) == 1
        self.scheduler: InstanceScheduler
        if self.grouped:
            self.scheduler = GroupedScheduler(self.config, self.model, block_managers, self.exchange)
        else:
            self.scheduler = Scheduler(self.config, self.model, *block_managers)
        self.tables = [BlockTables(block_manager.n_blocks) for block_manager in block_managers]
        self.books: dict[str, RequestBook] = {}
        self.flights: list[tuple[float, int, Batch, float]] = []
        self.free_s = [0.0] * len(block_managers)
        self.epochs: dict[tuple[int, int], tuple[str, ...]] = {(g, 0): () for g in range(len(block_managers))}
        self.now = 0.0
        self.steps = self.lost = self.preempted = self.freed = self.idle_batches = self.assisted = self.lockstep = 0
        self.widest = 1
        self.log: list[bytes] = []
        self.finished: dict[str, float] = {}
        self.aborted: set[str] = set()
        self.limit = 60 * sum(request.prompt_tokens + output for request, output in self.plan) + 2000

    # -- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> World:
        arrivals = sorted(self.plan, key=lambda item: item[0].arrival_s)[::-1]
        while arrivals or self.books:
            self.steps += 1
            assert self.steps < self.limit, "livelock: the plan does not end"
            while arrivals and arrivals[-1][0].arrival_s <= self.now:
                request, output = arrivals.pop()
                self.books[request.id] = RequestBook(request, output)
                self.scheduler.add(Span.whole(request), self.now)
            self._meddle()
            while (batch := self._next()) is not None:
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
        assert (self.scheduler.running, self.scheduler.waiting) == (0, 0)
        assert all(manager.free_blocks == manager.n_blocks for manager in self.scheduler.block_managers)
        assert all(policy.targets.members == {} for policy in group_policies(self.scheduler))
        assert not self.grouped or self.scheduler.shard_table.longs == {}  # type: ignore[attr-defined]
        assert not self.alone or self.freed == self.preempted
        assert self.finished.keys() | self.aborted == {request.id for request, _ in self.plan}
        return self

    def _next(self) -> Batch | None:
        if self.alone:
            return self.scheduler.schedule(self.now, self.ahead)
        return self.scheduler.schedule(self.now, self.ahead, self._free if self.flights else None)

    def _meddle(self) -> None:
        if self.books and self.rng.random() < self.chaos:
            name = self.rng.choice(sorted(self.books))
            self.books[name].aborted = True
            flying = name in self._flying()
            events = self.scheduler.abort(name, self.now)
            assert [event.kind for event in events] == ([] if flying else ["aborted"])
            self._hear(events)
            assert self.scheduler.abort(name, self.now) == []
        if self.rng.random() < self.losses and self.lost < 3:
            self.lost += 1
            self.flights.clear()
            held = {name for table in self.tables for name in table.owners()} & self.books.keys()
            self.freed += sum(not self.books[name].aborted for name in held)
            self._hear(self.scheduler.lost(0, self.now))
            assert not self.alone or self.freed == self.preempted
            self.tables = [BlockTables(table.allocator.n_blocks) for table in self.tables]
            for book in self.books.values():
                book.begin_again()
                assert not book.aborted
        if not self.alone:
            self._free = {group for group in range(len(self.tables)) if self.rng.random() < 0.9}

    def _complete(self) -> None:
        done_s, _, batch, seconds = heapq.heappop(self.flights)
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
        ended = []
        for name in yields:
            book = self.books[name]
            book.generated += repeats
            book.cursor += repeats - 1
            book.decoding = True
            if book.aborted:
                results.append(RequestProgress(name, 0, True))
                continue
            if book.generated == book.output:
                ended.append(name)
            if book.generated == book.output or self.rng.random() < 0.3:  # who goes on need not be named
                results.append(RequestProgress(name, 1, book.generated == book.output))
        took_s = self.rng.uniform(*self.noise) * seconds
        events = self.scheduler.complete(batch.id, results, self.now, took_s, repeats)
        self._hear(events)
        assert sorted(event.request for event in events if event.kind == "finished") == sorted(ended)
        for name in {name for part in batch.parts for name in self._names(part)} & self.books.keys():
            assert not self.books[name].aborted or name in self._flying()

    # -- what is heard and seen -----------------------------------------------------------------------------------

    @staticmethod
    def _names(part: GroupBatch) -> list[str]:
        return [*part.decodes.members, *(chunk.request for chunk in part.prefills)]

    def _flying(self) -> set[str]:
        return {name for _, _, batch, _ in self.flights for part in batch.parts for name in self._names(part)}

    def _hear(self, events: list[RequestEvent]) -> None:
        self.log += [msgspec.json.encode(event) for event in events]
        for event in events:
            if event.kind == "preempted":
                self.preempted += 1
                continue
            book = self.books[event.request]
            if event.kind == "started":
                book.started += 1
                assert book.started == 1
                continue
            assert book.aborted == (event.kind == "aborted")
            assert book.started or book.aborted
            del self.books[event.request]
            if book.aborted:
                self.aborted.add(event.request)
            else:
                self.finished[event.request] = self.now
            self.widest = max(self.widest, book.spread)

    def _take(self, batch: Batch) -> None:
        self.log.append(msgspec.json.encode(batch))
        groups = [part.group for part in batch.parts]
        assert groups == sorted(set(groups))
        flying = self._flying()
        for part in batch.parts:
            self._replay(part)
            self._check_leases(part.group)
        rows: dict[str, int] = {}
        for part in batch.parts:
            assert part.decodes.members or part.prefills or part.assists, "an empty part"
            self._check_members(part.group, part.decodes)
            self._compute(part, rows, flying)
        assert len(rows) == sum(len(self._names(part)) for part in batch.parts), "rows of one request in two places"
        self._check_assists(batch, rows)
        self._check_limits(batch)
        times = self._part_times(batch)
        self._check_budget(batch, times)
        self._check_progress(batch, flying)
        seconds = max(times) if self.learns else batch.predicted_s
        starts_s = max([self.now, *(self.free_s[group] for group in groups)])
        done_s = starts_s + seconds * batch.repeat * self.rng.uniform(*self.noise)
        for group in groups:
            self.free_s[group] = done_s
        heapq.heappush(self.flights, (done_s, batch.id, batch, seconds))
        for group in range(len(self.tables)):
            mine = sum(any(part.group == group for part in other.parts) for _, _, other, _ in self.flights)
            assert mine <= self.config.stages
        self.lockstep += len(batch.parts) > 1

    def _replay(self, part: GroupBatch) -> None:
        """Another life of a request may be in flight elsewhere; whatever touches this group's blocks may not."""
        table = self.tables[part.group]
        mine = [other for _, _, batch, _ in self.flights for other in batch.parts if other.group == part.group]
        flying = {name for other in mine for name in (*self._names(other), *(a.request for a in other.assists))}
        for op in part.kv_ops:
            book = self.books.get(op.request)
            if op.verb == "free":
                assert op.request not in flying, "KV was freed under a batch in flight"
                oldest = next((name for name in self.books if name in table.owners()), None)
                table.free(op.request)
                if self.alone and book is not None:
                    assert op.request != oldest, "the oldest request keeps its KV"
                    book.begin_again()
                    self.freed += 1
                continue
            table.add(op.request, op.blocks)
            if op.verb == "reserve" and book is not None:
                if op.start == 0:
                    book.begin_again()
                else:
                    assert op.start == book.cursor, "a shard begins where the one before ends"
                    book.shards = [shard for shard in book.shards if shard[1] < op.start]
                book.shards.append((part.group, op.start))
                book.spread = max(book.spread, len(book.shards))
        table.check()

    def _check_leases(self, group: int) -> None:
        manager, table = self.scheduler.block_managers[group], self.tables[group]
        leases = {lease.request: manager.where(lease.request) for lease in manager.leases()}
        assert leases == {name: table.runs(name) for name in table.owners()}
        assert not self.alone or len(leases) <= self.config.max_num_seqs

    def _check_members(self, number: int, group: DecodeGroup) -> None:
        """The same epoch has the same members, and a new one is its base with the changes that it names."""
        if (number, group.epoch) not in self.epochs:
            stay = [name for name in self.epochs[number, group.base] if name not in group.left]
            self.epochs[number, group.epoch] = (*stay, *group.joined)
        assert group.members == self.epochs[number, group.epoch]

    def _compute(self, part: GroupBatch, rows: dict[str, int], flying: set[str]) -> None:
        for name in part.decodes.members:
            book = self.books[name]
            assert name not in flying
            assert book.decoding
            assert not book.aborted
            assert book.cursor == book.known - 1
            book.cursor += 1
            rows[name] = 1
        assert part.decodes.kv_sum == sum(self.books[n].cursor - self.books[n].base for n in part.decodes.members)
        for chunk in part.prefills:
            book = self.books[chunk.request]
            assert not book.aborted
            assert not book.decoding
            assert (chunk.start, chunk.base) == (book.cursor, book.base)
            assert chunk.tokens > 0
            assert self.config.pipeline_schedule == "stream" or chunk.request not in flying
            book.cursor += chunk.tokens
            assert book.cursor <= book.known
            assert chunk.last == (book.cursor == book.known)
            rows[chunk.request] = chunk.tokens
        assert sum(is_long(self.config, self.books[chunk.request].request) for chunk in part.prefills) <= 1
        for name in self._names(part):
            book = self.books[name]
            assert book.shards[-1][0] == part.group, "rows are computed where the last shard is"
            held = book.cursor - book.base
            assert held <= sum(count for _, count in self.tables[part.group].runs(name)) * BLOCK
            assert held <= self._limit(book.request)

    def _limit(self, request: Request) -> int:
        if not self.grouped:
            return WHOLE
        shard, groups = self.scheduler.shard_tokens, len(self.tables)  # type: ignore[attr-defined]
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

    def _check_limits(self, batch: Batch) -> None:
        """Tokens of a batch of one group; a batch that is repeated has decodes alone, and room for all of them."""
        rules, chunks = self.config, batch.parts[0].prefills
        if batch.repeat > 1 and self.alone:
            assert not chunks
            assert not self.flights
            for name in batch.parts[0].decodes.members:
                room = sum(count for _, count in self.tables[0].runs(name)) * BLOCK
                assert self.books[name].cursor + batch.repeat - 1 <= room
        if not chunks or not self.alone:
            return
        if rules.chunking == "whole":
            assert all(chunk.last for chunk in chunks)
            assert len(chunks) == 1 or batch.tokens <= rules.max_num_batched_tokens
            return
        static = int(rules.chunking.split(":")[1]) if rules.chunking.startswith("static") else batch.tokens
        assert batch.tokens <= min(static, rules.max_num_batched_tokens)

    def _part_times(self, batch: Batch) -> list[float]:
        """What each part takes before noise, counted here, whatever a model that learns may have learned."""
        model = self.latency
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
        assert self.learns or batch.predicted_s == pytest.approx(max(times))
        return times

    def _check_budget(self, batch: Batch, times: list[float]) -> None:
        """Predicted time within t_target unless decodes alone exceed it, or the named progress exception."""
        rules, chunks = self.config, [chunk for part in batch.parts for chunk in part.prefills]
        if rules.chunking != "adaptive" or not chunks:
            return
        assert rules.t_target_s is not None
        members = {name for part in batch.parts for name in part.decodes.members}
        decoding = [book for name, book in self.books.items() if book.decoding and (self.alone or name in members)]
        # Where nobody decodes only a newcomer would wait: the longest default wait is 1 s.
        target_s = rules.t_target_s if decoding else max(rules.t_target_s, LONGEST_WAIT_S)
        promises = [book.request.slo.tbt_s for book in decoding if book.request.slo.tbt_s]
        budget_s = min([target_s, *(tbt_s / rules.gap_stages for tbt_s in promises)])
        budget_s = max(budget_s, LEAST_GAIN * float(self.model.token_s(1, 1)[0]))
        if any(chunk.last for chunk in chunks) and rules.medha_rules is not None:
            budget_s *= 1.0 + rules.medha_rules.stretch
        small = [chunk.tokens <= max(1, rules.min_chunk) for chunk in chunks]
        if any(small) and (len(chunks) == 1 or not self.alone):
            return
        chunked = {chunk.request for chunk in chunks}
        for part, seconds in zip(batch.parts, [batch.predicted_s] if self.alone else times, strict=True):
            busy = part.prefills or any(assist.request in chunked for assist in part.assists)
            assert not busy or seconds <= budget_s * (1 + 1e-9), (seconds, budget_s, batch)

    def _check_progress(self, batch: Batch, flying: set[str]) -> None:
        """While a begun prefill could run, one advances at least every `PROGRESS_EVERY` iterations."""
        rules = self.config
        begun = [
            book
            for name, book in self.books.items()
            if 0 < book.cursor < book.known and not book.decoding and not book.aborted
            if rules.pipeline_schedule == "stream" or name not in flying
        ]
        full = batch.parts[0].decodes.count >= rules.max_num_batched_tokens
        held = rules.chunking != "adaptive" or not rules.min_chunk or full
        self.idle_batches = 0 if batch.parts[0].prefills or held or not begun else self.idle_batches + 1
        assert not self.alone or self.idle_batches <= PROGRESS_EVERY


def is_long(config: SchedulerConfig, request: Request) -> bool:
    """Whether Medha's rules hold and the prompt is long by its tokens alone."""
    medha = config.medha_rules
    return medha is not None and request.prompt_tokens - request.cached_tokens > medha.long_tokens


def random_world(seed: int, grouped: bool = False, background: bool = False) -> World:
    """One group of any policy, chunking, pipeline and mode; a pool so small that decodes exhaust it; arrivals outrun
    service. background: with requests that no client waits for."""
    rng = random.Random(seed)
    stages = rng.choice((1, 1, 2, 3))
    config = random_config(
        rng,
        chunking=rng.choice(("adaptive", "adaptive", "static:96", "whole")),
        t_target_s=rng.choice((0.004, 0.01, 0.02)),
        max_num_seqs=rng.choice((3, 8, 64)),
        max_num_batched_tokens=rng.choice((48, 256, 2048)),
        stages=stages,
        pipeline_schedule=rng.choice(("stream", "microbatch")),
    )
    pool = rng.choice((640, 960, 1600))
    plan, at = [], 0.0
    for i in range(rng.randint(4, 18)):
        at += rng.expovariate(1 / rng.choice((0.002, 0.02, 0.1)))
        long = rng.random() < 0.3
        prompt = rng.randint(201, 560) if long else rng.randint(1, 120)
        output = rng.choice((1, rng.randint(2, 12), rng.randint(20, 80)))
        tbt_s = rng.choice((None, None, None, 0.015, 0.002))
        slo = Slo(ttft_s=rng.choice((None, None, 0.05, 0.5)), tbt_s=tbt_s)
        priority = rng.choice((0, 0, 0, 0, -1, 3)) if seed % 3 == 0 else 0
        request = Request(
            id=f"{'L' if long else 'S'}{i}",
            arrival_s=at,
            prompt_tokens=prompt,
            max_output_tokens=min(output + rng.choice((0, 0, 20)), pool + 1 - prompt),
            slo=slo,
            priority=BACKGROUND_PRIORITY if background and rng.random() < 0.5 else priority,
        )
        plan.append((request, min(output, request.max_output_tokens)))
    return World(
        rng,
        config,
        pool,
        plan,
        chaos=rng.choice((0.0, 0.0, 0.02, 0.1)),
        losses=rng.choice((0.0, 0.0, 0.005, 0.03)),
        learns=rng.random() < 0.3,
        ahead=rng.choice((1, 1, 100)),
        grouped=grouped,
    )


def grouped_world(seed: int) -> World:
    """Several groups of any policy, chunking and pipeline; pools that are too small; requests up to what all groups
    together hold."""
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
    return World(
        rng=rng,
        config=config,
        pool_tokens=pool,
        plan=plan,
        exchange=rng.choice((ShardExchangeCost(), ShardExchangeCost(1e-4, 1e-6))),
        chaos=rng.choice((0.0, 0.0, 0.02)),
        losses=rng.choice((0.0, 0.0, 0.01)),
        ahead=rng.choice((1, 1, 50)),
        grouped=True,
    )
