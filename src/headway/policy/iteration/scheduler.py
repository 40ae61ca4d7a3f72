"""The scheduler of one group, which is mostly all of an instance: add → schedule → complete, live and simulated alike.

It decides; it never waits, reads a clock, or sees a token. The order of waiting prefills is the policy's, the size of
chunks the chunking's, what fits together the packer's, and KV the ledger's; this module moves cursors between them.
"""

from __future__ import annotations

from collections.abc import Container
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, GroupBatch, RemoteAttention, RequestProgress
from headway.core.errors import InvariantError, RequestError
from headway.core.events import RequestEvent
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.staged_kv import StagedKv
from headway.perf.latency.base import BatchLoad, LatencyModel, decode_load, load_s
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.admission import refuse_unservable
from headway.policy.iteration.audit import audit
from headway.policy.iteration.base import NeighbourGroups
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.decodes import DecodeSet
from headway.policy.iteration.kv_growth import KvGrowth
from headway.policy.iteration.prefill import WHOLE
from headway.policy.iteration.sequence import SequenceState


class _BatchInFlight:
    """A group's part of a batch that has been handed out and not completed. `carried` are the chunks' requests."""

    __slots__ = ("carried", "chunks", "decodes", "load", "repeat")

    def __init__(
        self, decodes: DecodeSet, chunks: tuple[Chunk, ...], carried: list[SequenceState], load: BatchLoad, repeat: int
    ) -> None:
        self.decodes, self.chunks, self.carried, self.load, self.repeat = decodes, chunks, carried, load, repeat


class Scheduler:
    """Deterministic: the same calls with the same times give the same batches. Implements `InstanceScheduler`.

    At most `config.stages` batches are in flight. Preemption of a prefill happens at chunk edges and keeps its KV;
    KV is given up (and computed again later) only when decodes cannot grow, youngest request first. What is in
    `custody` is nobody's to take.

    As one of several groups (`groups.GroupedScheduler`) it has `neighbours`, and is driven a step at a time: `feed`,
    `pack`, `depart`; requests are brought by `enter` or `take_over` and leave by `hand_over`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        latency: LatencyModel,
        ledger: BlockManager,
        group: int = 0,
        neighbours: NeighbourGroups | None = None,
        prefill_times: PrefillCache | None = None,
    ) -> None:
        self.config = config
        self.latency = latency
        self.ledger = ledger
        self.group = group
        remote_cost = neighbours.remote_cost if neighbours is not None else None
        self.policy = IterationPolicy(config, latency, ledger, prefill_times, remote_cost)
        self.ready = DecodeSet()
        self.custody = StagedKv(ledger)
        self._neighbours = neighbours
        self._growth = KvGrowth(config, ledger, self.policy.admission)
        self._sequences: dict[str, SequenceState] = {}
        self._parked: dict[str, SequenceState] = {}
        self._aborting: dict[str, SequenceState] = {}
        self._staging: dict[str, SequenceState] = {}
        self._flights: dict[int, _BatchInFlight] = {}
        self._untold: list[RequestEvent] = []
        self._arrivals = 0
        self._batches = 0
        self._epochs = 0

    # -- what surroundings may ask ------------------------------------------------------------------------------

    @property
    def ledgers(self) -> tuple[BlockManager, ...]:
        return (self.ledger,)

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self.policy.holders)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self._sequences) - len(self.policy.holders)

    @property
    def idle(self) -> bool:
        return not self._sequences

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def deadline_s(self, request_id: str) -> float:
        """When the first token of a request that is here is due: its SLO's word, else the default's."""
        return self._sequences[request_id].deadline_s

    def progress(self, request_id: str) -> int:
        """See `InstanceScheduler`."""
        return self._sequences[request_id].computed

    def next_wakeup(self, now: float) -> float | None:
        """When `schedule` should be called although nothing was added or completed; None: no need.

        Policies here act only when something arrives or ends, so a waiting request never needs a timer.
        """
        return None

    def check(self) -> None:
        """Raise InvariantError unless cursors, sets and the ledger agree. Called when idle, and by tests each step."""
        audit(self)

    # -- the three verbs ----------------------------------------------------------------------------------------

    def add(self, span: Span, now: float, phase: Phase = "all") -> None:
        """See `InstanceScheduler`."""
        request, custody = span.request, self.custody
        if request.id in self._sequences or custody.waits(request.id):
            raise RequestError(f"request id {request.id!r} is in use", "id")
        refuse_unservable(request, self.ledger.total_tokens)
        lease = custody.lease(request.id)
        if phase == "decode" and (lease is None or request.cached_tokens < request.prompt_tokens - 1):
            raise RequestError(f"KV of {request.id!r} is not here", "id")
        decodes = request.cached_tokens == request.prompt_tokens - 1  # its lease may grow
        if lease is not None and lease.tokens < request.prompt_tokens - decodes:
            raise RequestError(f"KV of {request.id!r} has room for {lease.tokens} tokens only", "id")
        sequence = self.enter(request, self._arrivals, lease=custody.take(request.id) if lease is not None else None)
        sequence.hands_over = phase == "prefill"
        self._arrivals += 1

    def enter(self, request: Request, order: int, limit: int = WHOLE, lease: KvLease | None = None) -> SequenceState:
        """A new request waits here, or decodes at once when its last token alone is left to compute. `order` is the
        instance's count of arrivals; `limit`: tokens of a shard; `lease`: where what is cached lies. What is cached
        beyond the first shard is computed again: it would belong to other groups."""
        sequence = SequenceState(request, order)
        sequence.limit, sequence.lease, sequence.holds_kv = limit, lease, lease is not None
        sequence.scheduled = sequence.computed = min(request.cached_tokens, limit - 1)
        self._sequences[request.id] = sequence
        self.policy.add(sequence)
        if sequence.decoding:
            self.ready.add(sequence)
        return sequence

    def schedule(self, now: float, ahead: int = 1, free: Container[int] | None = None) -> Batch | None:
        """The next batch, or None when there is nothing to do or `stages` batches are in flight.

        `ahead` above 1 allows a batch of decodes that stands for up to so many iterations (`Batch.repeat`): those in
        which nobody waits, nothing else is in flight and nobody needs KV.
        """
        if len(self._flights) >= self.config.stages or (free is not None and self.group not in free):
            return None
        return self.launch(now, ahead, self._batches)

    def launch(self, now: float, ahead: int, number: int) -> Batch | None:
        """A batch of this group alone."""
        self.feed(now)
        decodes = self.ready
        load = decode_load(self.latency, len(decodes), decodes.kv_sum)
        chunks, load = self.pack(load, now) if len(self.policy.queue) else ([], load)
        if not decodes.members and not chunks:
            return None
        repeat = max(1, min(ahead, decodes.room())) if ahead > 1 and not chunks and self.alone else 1
        part = self.depart(number, chunks, load, repeat)
        return Batch(id=number, parts=(part,), predicted_s=load_s(self.latency, load), repeat=repeat)

    @property
    def alone(self) -> bool:
        """Whether the decodes that are ready are all that there is."""
        return not (len(self.policy.queue) or self._parked or self._flights or self._aborting)

    @property
    def open(self) -> bool:
        """Whether another batch may be in flight."""
        return len(self._flights) < self.config.stages

    def feed(self, now: float) -> None:
        """Give KV to decodes that have filled their lease. Before every batch."""
        if self._parked or self.ready.hungry:
            self._feed(now)

    def depart(
        self,
        number: int,
        chunks: Seq[Chunk],
        load: BatchLoad,
        repeat: int = 1,
        assists: tuple[RemoteAttention, ...] = (),
    ) -> GroupBatch:
        """All that is ready and these chunks are in flight as this group's part of batch `number`."""
        decodes, self.ready = self.ready, DecodeSet()
        self._epochs += 1
        part = GroupBatch(self.group, decodes.group(self._epochs), tuple(chunks), self.ledger.take_ops(), assists)
        self.policy.began()
        self._batches += 1
        carried = [self._sequences[chunk.request] for chunk in chunks]
        self._flights[number] = _BatchInFlight(decodes, part.prefills, carried, load, repeat)
        return part

    def complete(
        self, batch_id: int, results: Seq[RequestProgress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        flight = self._flights.pop(batch_id, None)
        if flight is None:
            raise InvariantError(f"batch {batch_id} is not in flight")
        if not 1 <= repeats <= flight.repeat:
            raise InvariantError(f"batch {batch_id} may run {flight.repeat} times, not {repeats}")
        if elapsed_s is not None:
            self.policy.observed(flight.load, elapsed_s)
        if repeats > 1:
            self.policy.began(repeats - 1)
            self._batches += repeats - 1
        events, self._untold = self._untold, []
        decodes = flight.decodes
        if decodes.members:
            decodes.step(repeats)
        yielding: dict[str, SequenceState] = {}
        for chunk, sequence in zip(flight.chunks, flight.carried, strict=True):
            sequence.computed += chunk.tokens
            sequence.in_flight -= 1
            if chunk.last:
                yielding[chunk.request] = sequence
                sequence.generated += 1
            if not sequence.started:
                sequence.started = True
                events.append(RequestEvent("started", chunk.request, now))
        ended = self._ended(results, flight, yielding) if results or self._aborting else {}
        for name, sequence in ended.items():
            if name in decodes.members:
                decodes.remove(sequence)
        staging = [s for name, s in self._staging.items() if name in decodes.members] if self._staging else []
        for sequence in staging:
            decodes.remove(sequence)
        self._rejoin(decodes)
        events += [self._stage(sequence, now) for sequence in staging]
        for name, sequence in yielding.items():
            if name not in ended:
                if sequence.hands_over:
                    events.append(self._stage(sequence, now))
                    continue
                self.ready.add(sequence)
                self.policy.decoding(name)
        events += [self._end(sequence, now) for sequence in ended.values()]
        return events

    def _ended(
        self, results: Seq[RequestProgress], flight: _BatchInFlight, yielding: dict[str, SequenceState]
    ) -> dict[str, SequenceState]:
        """Who takes part in no later batch: finished as told, and aborted ones that nothing in flight holds back."""
        ended: dict[str, SequenceState] = {}
        for result in results:
            if result.finished:
                ended[result.request] = self._sequences[result.request]
            elif result.accepted != 1 and not self._sequences[result.request].aborted:
                raise InvariantError(f"{result.request} goes on with {result.accepted} tokens of one iteration")
        if self._aborting:
            landed = (sequence.request.id for sequence in flight.carried if not sequence.in_flight)
            mine = {*flight.decodes.members, *yielding, *landed}
            ended.update((name, sequence) for name, sequence in self._aborting.items() if name in mine)
        return ended

    def expect(self, batch_id: int, load: BatchLoad) -> None:
        """The load of a part that others assist, or that assists, as the whole batch gives it."""
        self._flights[batch_id].load = load

    def expected_s(self, batch_id: int) -> float:
        """Predicted seconds of this group's part of a batch in flight."""
        return load_s(self.latency, self._flights[batch_id].load)

    def carries(self, batch_id: int, request_id: str) -> bool:
        """Whether a request yields a token of this group's part of a batch in flight."""
        flight = self._flights[batch_id]
        return request_id in flight.decodes.members or any(c.last and c.request == request_id for c in flight.chunks)

    def abort(self, request_id: str, now: float) -> list[RequestEvent]:
        """Drop a request: at once, or when the batch that it is in completes. Unknown ids (ended) are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        sequence.aborted = True
        if self.flying(sequence):
            self.policy.withdraw(request_id)
            self._aborting[request_id] = sequence
            return []
        if request_id in self.ready.members:
            self.ready.remove(sequence)
        return [self._end(sequence, now)]

    def stage(self, request_id: str, now: float) -> list[RequestEvent]:
        """See `InstanceScheduler`."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        if request_id in self.ready.members:
            self.ready.remove(sequence)
            return [self._stage(sequence, now)]
        if request_id in self._parked:
            return [self._stage(sequence, now)]
        sequence.hands_over = True  # where its KV is not all here, it goes with its next token
        if any(request_id in flight.decodes.members for flight in self._flights.values()):
            self._staging[request_id] = sequence
        return []

    def landed(self, now: float) -> list[RequestEvent]:
        """End aborted requests whose last chunk was in flight in another group."""
        return [self._end(s, now) for s in list(self._aborting.values()) if not self.flying(s)]

    def lost(self, instance: int, now: float) -> list[RequestEvent]:
        """The instance has lost its KV: everything in flight is void, all progress must be made again.

        The next batch's KV operations start from empty block tables. Returns what has become true, as `complete` does.
        """
        for flight in self._flights.values():
            flight.decodes.settle_all()
        self._flights.clear()
        self.ready.settle_all()
        self.ready, self._parked = DecodeSet(), {}
        self._staging.clear()
        events, self._untold = self._untold, []
        for sequence in list(self._sequences.values()):
            sequence.in_flight = 0
            if sequence.aborted:
                events.append(self._end(sequence, now))
            elif sequence.lease is not None:
                events.append(self.give_up(sequence, now))
        self.custody.lost()
        self.ledger.take_ops()
        return events

    # -- prefills -----------------------------------------------------------------------------------------------

    def pack(
        self, load: BatchLoad, now: float, shorts_elsewhere: bool = False, least_s: float | None = None
    ) -> tuple[list[Chunk], BatchLoad]:
        """Chunks of waiting prefills beside what is in `load`, and the load that they make together. In a crew: whether
        short ones wait in other groups, and the shortest time that anybody in it was promised."""
        skip = self._flying_prefills() if self.config.pipeline_schedule == "microbatch" else ()
        blocked = self.custody.shut(now, self.config.admission_age_s)
        decision = self.policy.pick(load, now, least_s, skip, not blocked, shorts_elsewhere)
        chunks = []
        for quota in decision.quotas:
            name, tokens = quota.request, quota.tokens
            sequence = self._sequences[name]
            if sequence.lease is None:
                sequence.lease = self.ledger.lease(name)
            start = sequence.scheduled
            sequence.in_flight += 1
            self.policy.moved(name, start + tokens)
            chunks.append(Chunk(name, start, tokens, sequence.remaining == 0, sequence.base))
        return chunks, decision.load

    def _flying_prefills(self) -> set[str]:
        waiting = (self._sequences[state.request.id] for state in self.policy.queue)
        return {sequence.request.id for sequence in waiting if sequence.in_flight}

    # -- decodes ------------------------------------------------------------------------------------------------

    def _rejoin(self, decodes: DecodeSet) -> None:
        """Decodes whose batch is done are ready for the next. Where two sets meet, the smaller joins the larger."""
        if len(decodes) > len(self.ready):
            self.ready, decodes = decodes, self.ready
        for sequence in list(decodes.members.values()):
            decodes.settle(sequence)
            self.ready.add(sequence)

    def _feed(self, now: float) -> None:
        """Give KV to decodes that have filled their lease; take it from the youngest when the pool is empty."""
        hungry = sorted({*self.ready.take_full(), *self._parked.values()}, key=lambda s: s.order)
        self._parked = {}
        for sequence in hungry:
            if sequence.lease is None:  # given up for an older one, just now
                continue
            self._provide(sequence, now)
            name = sequence.request.id
            if name not in self._sequences:  # another group has taken over
                continue
            if sequence.lease.tokens > sequence.computed - sequence.base:
                if name in self.ready.members:
                    self.ready.watch(sequence)
                else:
                    self.ready.add(sequence)
            else:
                if name in self.ready.members:
                    self.ready.remove(sequence)
                self._parked[name] = sequence

    def _provide(self, sequence: SequenceState, now: float) -> None:
        """KV for one decode, whoever must go for it."""
        while not self._growth.grow(sequence):
            others = self._neighbours
            if others is not None and sequence.limit != WHOLE and others.widen(sequence, now):
                return
            if sequence.computed - sequence.base >= sequence.limit or not self.evict_behind(sequence, now):
                return

    def evict_behind(self, sequence: SequenceState, now: float) -> bool:
        """Take the KV of the youngest request that holds some here, came after `sequence` and is in no batch in
        flight. False: there is none."""
        behind = [
            s
            for s in map(self._sequences.__getitem__, self.policy.holders)
            if s.order > sequence.order and not self.flying(s)
        ]
        others = self._neighbours
        if others is not None:
            behind += [s for s in others.guests(self.group) if s.order > sequence.order and not others.flying(s)]
        victim = max(behind, key=lambda s: s.order, default=None)
        if victim is None:
            return False
        here = victim.request.id in self._sequences
        self._untold.append(self.give_up(victim, now) if here or others is None else others.give_up(victim, now))
        return True

    def give_up(self, sequence: SequenceState, now: float) -> RequestEvent:
        """Preempt by recomputation: free the KV, keep the generated count, queue for prefill of all that is known."""
        name = sequence.request.id
        if name in self.ready.members:
            self.ready.remove(sequence)
        lost = sequence.computed
        self._parked.pop(name, None)
        self._release(sequence)
        sequence.computed = 0
        self.policy.lost(name, sequence.known)
        return RequestEvent("preempted", name, now, lost)

    # -- ends, and other groups ---------------------------------------------------------------------------------

    def flying(self, sequence: SequenceState) -> bool:
        """Whether a request whose rows are computed here is in a batch in flight."""
        if sequence.in_flight:
            return True
        return any(sequence.request.id in flight.decodes.members for flight in self._flights.values())

    def _end(self, sequence: SequenceState, now: float) -> RequestEvent:
        name = sequence.request.id
        self._parked.pop(name, None)
        self._aborting.pop(name, None)
        self._staging.pop(name, None)
        self.policy.ended(name)
        self._release(sequence)
        del self._sequences[name]
        return RequestEvent("aborted" if sequence.aborted else "finished", name, now)

    def _stage(self, sequence: SequenceState, now: float) -> RequestEvent:
        """A request that hands over has its token: its KV stays, and it goes."""
        name, lease = sequence.request.id, sequence.lease
        assert lease is not None
        self._parked.pop(name, None)
        self._staging.pop(name, None)
        self.policy.ended(name)
        sequence.lease = None
        del self._sequences[name]
        self.custody.keep(lease)
        return RequestEvent("staged", name, now, sequence.computed)

    def _release(self, sequence: SequenceState) -> None:
        if sequence.lease is None:
            return
        self.ledger.free(sequence.lease)
        sequence.lease = None
        if sequence.shards:
            for shard in sequence.shards:
                shard.ledger.free(shard.lease)
            sequence.shards, sequence.base = (), 0
            if self._neighbours is not None:
                self._neighbours.released(sequence)

    def reserve(self, sequence: SequenceState, start: int) -> KvLease | None:
        """KV for the next shard of a request that other groups hold up to token `start`; None: there is no room."""
        return self._growth.next_shard(sequence, start)

    def hand_over(self, sequence: SequenceState) -> None:
        """Another group is about to take over a request that is not decoding in flight; its lease here stays."""
        name = sequence.request.id
        if name in self.ready.members:
            self.ready.remove(sequence)
        self._parked.pop(name, None)
        self.policy.ended(name)
        del self._sequences[name]

    def take_over(self, sequence: SequenceState) -> None:
        """Compute the rows of a request from now on. It holds a lease here."""
        self._sequences[sequence.request.id] = sequence
        self.policy.transfer_in(sequence)
        if sequence.decoding:
            self.ready.add(sequence)

    def outstanding_s(self) -> float:
        """Predicted seconds of what is ahead of a newcomer: waiting prefills, and one iteration of the decodes over all
        KV that is leased (which is the same however many steps of theirs are taken at once)."""
        count = len(self.ready) + sum(len(flight.decodes) for flight in self._flights.values())
        decodes_s = load_s(self.latency, BatchLoad(count, count, self.ledger.used_tokens)) if count else 0.0
        return self.policy.waiting_s + decodes_s
