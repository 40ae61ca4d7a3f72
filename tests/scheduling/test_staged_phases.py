"""Phases of a request on one scheduler: staged KV, transferred KV, and blocks for it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from tests.helpers.present import present
from tests.helpers.unit_latency import small_machine
from tests.scheduling.scheduler_steps import add_request, chunks, make_scheduler, step

from headway.core.batch import Batch, KvOp, RequestProgress
from headway.core.errors import RequestError
from headway.core.request import Phase, Request, RequestEvent, Span
from headway.kv.allocator import BlockTables
from headway.kv.block_manager import BlockManager
from headway.policy.iteration.admission import ADMISSION_AGE_S
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.scheduler import Scheduler


def add_phase(scheduler: Scheduler, name: str, known: int, phase: Phase, cached: int = 0, output: int = 4) -> None:
    request = Request(id=name, arrival_s=0.0, prompt_tokens=known, max_output_tokens=output, cached_tokens=cached)
    scheduler.add(Span.whole(request), 0.0, phase)


def prefill(scheduler: Scheduler, name: str, prompt: int) -> None:
    add_phase(scheduler, name, prompt, "prefill", output=1)
    while name in scheduler:
        step(scheduler)


def test_prefill_phase_stages_its_kv_and_decode_phase_claims_it_in_place() -> None:
    scheduler = make_scheduler()
    add_phase(scheduler, "a", 40, "prefill", output=1)
    batch = scheduler.schedule(0.0)
    assert chunks(batch) == [("a", 0, 40)]
    assert batch is not None
    events = scheduler.complete(batch.id, [], 0.5)
    assert [(e.kind, e.request, e.tokens) for e in events] == [("started", "a", 0), ("staged", "a", 40)]
    scheduler.check()
    assert scheduler.idle
    lease = present(scheduler.staged_kv.lease("a"))
    runs = scheduler.block_manager.where(lease.request)
    add_phase(scheduler, "a", 41, "decode", cached=40)
    scheduler.check()
    assert scheduler.staged_kv.lease("a") is None
    batch = step(scheduler)
    assert batch.parts[0].decodes.members == ("a",)
    assert batch.parts[0].decodes.kv_sum == 41
    assert batch.tokens == 1
    assert scheduler.block_manager.where(lease.request)[0][0] == runs[0][0]
    step(scheduler, 0.0, "a")
    assert scheduler.block_manager.free_blocks == scheduler.block_manager.n_blocks


def test_staged_part_of_a_prompt_is_not_computed_again() -> None:
    """What runs of a group have left, say: the scheduler goes on behind it."""
    scheduler = make_scheduler()
    scheduler.staged_kv.request("a", 50, 0.0)
    assert scheduler.staged_kv.admit() == ["a"]
    add_phase(scheduler, "a", 50, "all", cached=30)
    assert chunks(step(scheduler)) == [("a", 30, 20)]
    scheduler.abort("a", 0.0)
    scheduler.check()


@pytest.mark.parametrize(("known", "cached"), [(41, 0), (41, 39), (100, 99)])
def test_a_decode_without_its_kv_is_refused_and_changes_nothing(known: int, cached: int) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="KV of 'a' is not here"):
        add_phase(scheduler, "a", 41, "decode", cached=40)
    prefill(scheduler, "a", 40)
    with pytest.raises(RequestError, match="KV of 'a'"):
        add_phase(scheduler, "a", known, "decode", cached=cached)
    assert "a" not in scheduler
    assert "a" in scheduler.staged_kv
    scheduler.check()


def test_name_with_a_pending_request_is_in_use() -> None:
    scheduler = make_scheduler(pool=160)
    add_request(scheduler, "b", 150)
    step(scheduler)
    scheduler.staged_kv.request("a", 100, 0.0)
    with pytest.raises(RequestError, match="'a' is in use"):
        add_request(scheduler, "a", 10)


def test_new_requests_wait_once_a_transfer_has_waited_too_long() -> None:
    scheduler = make_scheduler(pool=160)
    add_request(scheduler, "a", 60, 80)
    step(scheduler)
    scheduler.staged_kv.request("large", 128, 0.0)
    assert scheduler.staged_kv.admit() == []
    add_request(scheduler, "b", 20, 20)
    assert chunks(step(scheduler, 0.9)) == [("b", 0, 20)]
    add_request(scheduler, "c", 20, 20)
    for _ in range(3):
        assert chunks(step(scheduler, ADMISSION_AGE_S)) == []
    step(scheduler, ADMISSION_AGE_S, "a", "b")
    assert scheduler.staged_kv.admit() == ["large"]
    assert chunks(step(scheduler, ADMISSION_AGE_S)) == [("c", 0, 20)]


@pytest.mark.parametrize("flying", [False, True])
def test_decode_that_moves_to_another_instance_stages_its_kv(flying: bool) -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "stays", 20, 20)
    add_request(scheduler, "goes", 40, 20)
    for _ in range(4):
        step(scheduler)
    batch = scheduler.schedule(0.0) if flying else None
    events = scheduler.stage("goes", 0.0)
    assert scheduler.stage("goes", 0.0) == scheduler.stage("nobody", 0.0) == []
    assert bool(events) is not flying
    if batch is not None:
        events = scheduler.complete(batch.id, [], 0.0)
    scheduler.check()
    assert [(event.kind, event.request) for event in events] == [("staged", "goes")]
    known = events[0].tokens + 1
    assert known == 40 + 4 + flying
    assert list(scheduler.staged_kv.names()) == ["goes"]
    assert step(scheduler).parts[0].decodes.members == ("stays",)
    add_phase(scheduler, "goes", known, "decode", cached=known - 1)
    assert set(step(scheduler).parts[0].decodes.members) == {"stays", "goes"}
    step(scheduler, 0.0, "goes", "stays")
    assert scheduler.block_manager.free_blocks == scheduler.block_manager.n_blocks


@pytest.mark.parametrize("end", ["finished", "aborted"])
def test_decode_that_ends_with_the_token_in_flight_stages_nothing(end: str) -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "a", 20, 20)
    step(scheduler)
    batch = present(scheduler.schedule(0.0))
    assert scheduler.stage("a", 0.0) == []
    if end == "aborted":
        assert scheduler.abort("a", 0.0) == []
    events = scheduler.complete(batch.id, [RequestProgress("a", 1, True)] if end == "finished" else [], 0.0)
    assert [event.kind for event in events] == [end]
    assert scheduler.idle
    assert scheduler.block_manager.free_blocks == scheduler.block_manager.n_blocks


def test_evicted_decode_is_staged_with_its_next_token() -> None:
    scheduler = make_scheduler(pool=128)
    add_request(scheduler, "old", 60, 60)
    step(scheduler)
    scheduler.staged_kv.request("new", 50, 0.0)
    scheduler.staged_kv.admit()
    add_phase(scheduler, "new", 51, "decode", cached=50, output=30)
    while "new" in scheduler.policy.holders:
        step(scheduler)
    assert scheduler.stage("new", 0.0) == []
    while "old" in scheduler.policy.holders:
        step(scheduler, 0.0, "old")
    while "new" in scheduler:
        step(scheduler)
    lease = present(scheduler.staged_kv.lease("new"))
    assert lease.tokens > 51
    scheduler.check()


def test_loss_of_kv_drops_all_staged_kv() -> None:
    scheduler = make_scheduler(pool=160)
    prefill(scheduler, "a", 40)
    scheduler.staged_kv.request("b", 160, 0.0)
    scheduler.lost(0, 0.0)
    scheduler.check()
    assert scheduler.block_manager.free_blocks == scheduler.block_manager.n_blocks
    assert scheduler.staged_kv.waiting == ()


@dataclass
class _Stay:
    known: int
    phase: Phase
    left: int
    cursor: int = 0


@dataclass
class PhasesWorld:
    """Requests in every phase, KV that comes and goes, aborts; a replica replays all operations in order."""

    rng: random.Random
    scheduler: Scheduler
    stays: dict[str, _Stay] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    """What is staged: tokens whose KV is there (0: it has not come)."""
    flights: list[Batch] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    named: int = 0
    done: int = 0
    asked: list[str] = field(default_factory=list)
    granted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tables = BlockTables(self.scheduler.block_manager.n_blocks)

    def step(self, now: float, arrivals: bool) -> None:
        rng, scheduler, staged_kv = self.rng, self.scheduler, self.scheduler.staged_kv
        if arrivals and rng.random() < 0.3:
            self._arrive(now)
        for name in staged_kv.admit():
            self.granted.append(name)
            self.kept[name] = 0
        for name, there in list(self.kept.items()):
            self._tend(name, there, arrivals)
        if rng.random() < 0.05 and self.stays:
            name = rng.choice(sorted(self.stays))
            self._hear(scheduler.abort(name, now))
            self.gone.add(name)
        batch = scheduler.schedule(now)
        if batch is not None:
            self._take(batch)
        elif self.flights or rng.random() < 0.5:
            self._replay(scheduler.block_manager.drain_ops())
        if self.flights and (batch is None or rng.random() < 0.7):
            self._complete(self.flights.pop(0), now)
        scheduler.check()

    def _arrive(self, now: float) -> None:
        name, self.named = f"r{self.named}", self.named + 1
        known = self.rng.choice((3, 40, 200))
        if self.rng.random() < 0.5:
            self.scheduler.staged_kv.request(name, known, now)
            self.asked.append(name)
            return
        self._enter(name, known, self.rng.choice(("all", "prefill")), 0)

    def _enter(self, name: str, known: int, phase: Phase, cached: int) -> None:
        left = 1 if phase == "prefill" and self.rng.random() < 0.3 else self.rng.randint(2, 30)
        add_phase(self.scheduler, name, known, phase, cached, 1 if phase == "prefill" else left)
        self.stays[name] = _Stay(known, phase, left, cached)

    def _tend(self, name: str, there: int, arrivals: bool) -> None:
        lease = present(self.scheduler.staged_kv.lease(name))
        if not there:
            self.kept[name] = lease.tokens if self.rng.random() < 0.3 else 0
        elif not arrivals or self.rng.random() < 0.2:
            del self.kept[name]
            if self.rng.random() < 0.5:
                self._enter(name, there + 1, "decode", there)
            else:
                self.scheduler.staged_kv.release(name)

    def _replay(self, ops: tuple[KvOp, ...]) -> None:
        parts = [batch.parts[0] for batch in self.flights]
        flying = {name for part in parts for name in (*part.decodes.members, *(c.request for c in part.prefills))}
        for op in ops:
            if op.verb == "free":
                assert op.request not in flying
                self.tables.free(op.request)
                if op.request in self.stays:
                    self.stays[op.request].cursor = 0
            else:
                self.tables.add(op.request, op.blocks)
        self.tables.check()

    def _take(self, batch: Batch) -> None:
        part = batch.parts[0]
        self._replay(part.kv_ops)
        block_manager = self.scheduler.block_manager
        assert {lease.request: block_manager.where(lease.request) for lease in block_manager.leases()} == {
            name: self.tables.runs(name) for name in self.tables.owners()
        }
        for name, start, tokens in (
            *((name, self.stays[name].known - 1, 1) for name in part.decodes.members),
            *((chunk.request, chunk.start, chunk.tokens) for chunk in part.prefills),
        ):
            stay = self.stays[name]
            assert stay.cursor == start
            stay.cursor += tokens
            assert stay.cursor <= sum(count for _, count in self.tables.runs(name)) * 16
        self.flights.append(batch)

    def _complete(self, batch: Batch, now: float) -> None:
        part, results = batch.parts[0], []
        for name in (*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)):
            stay = self.stays[name]
            stay.known, stay.left = stay.known + 1, stay.left - 1
            if name in self.gone:
                results.append(RequestProgress(name, 0, True))
            elif stay.left == 0:
                results.append(RequestProgress(name, 1, True))
        self._hear(self.scheduler.complete(batch.id, results, now))

    def _hear(self, events: list[RequestEvent]) -> None:
        for event in events:
            kind, name = event.kind, event.request
            if kind in ("finished", "aborted"):
                assert name not in self.scheduler.staged_kv
                del self.stays[name]
                self.done += 1
            elif kind == "staged":
                stay = self.stays.pop(name)
                assert stay.phase == "prefill"
                assert event.tokens == stay.known - 1 == stay.cursor
                self.kept[name] = stay.known - 1
                self.gone.discard(name)


@pytest.mark.parametrize("seed", range(30))
def test_blocks_are_conserved_and_every_request_ends(seed: int) -> None:
    rng = random.Random(seed)
    config = SchedulerConfig.named(
        "default",
        policy=rng.choice(("fcfs", "srpt", "lars", "ladder", "ladder")),
        t_target_s=0.02,
        max_num_batched_tokens=rng.choice((48, 256)),
        max_num_seqs=rng.choice((3, 64)),
        stages=rng.choice((1, 1, 2, 3)),
    )
    world = PhasesWorld(rng, Scheduler(config, small_machine(), BlockManager(640, 16)))
    now = 0.0
    for _ in range(400):
        world.step(now := now + 0.01, True)
    for _ in range(4000):
        if world.scheduler.idle and not world.kept and not world.scheduler.staged_kv.waiting:
            break
        world.step(now := now + 0.01, False)
    assert world.scheduler.idle
    assert world.scheduler.block_manager.free_blocks == world.scheduler.block_manager.n_blocks
    assert world.granted == world.asked, "who asks first is served first, and everybody is"
    assert len(world.granted) > 10
    assert world.done > 10
    assert world.scheduler.policy.targets.members == {}
