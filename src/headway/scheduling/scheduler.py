"""The scheduler of one instance: add → schedule → complete, live and simulated alike.

It decides; it never waits, reads a clock, or sees a token. The order of waiting prefills is the policy's, the size of
chunks the chunking's, what fits together the packer's, and KV the ledger's; this module moves cursors between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from headway.core.batch import Batch, Chunk, Part, Progress
from headway.core.errors import InvariantError, RequestError
from headway.core.events import Event
from headway.core.request import Request
from headway.core.span import Span
from headway.kv.ledger import Ledger
from headway.latency.base import LatencyModel, Load, load_s
from headway.latency.prefill_cache import PrefillCache
from headway.scheduling.chunking import make_chunking
from headway.scheduling.config import SchedulerConfig
from headway.scheduling.decodes import DecodeSet
from headway.scheduling.packer import Candidate, PackRules, pack
from headway.scheduling.policy import Line, make_policy
from headway.scheduling.queue import make_queue
from headway.scheduling.sequence import Sequence

MISFITS = 32
"""How many waiting requests one decision tries to find KV for in vain: a bound on its time."""


class _Flight:
    """A batch that has been handed out and not completed."""

    __slots__ = ("batch", "decodes", "load")

    def __init__(self, batch: Batch, decodes: DecodeSet, load: Load) -> None:
        self.batch, self.decodes, self.load = batch, decodes, load


class Scheduler:
    """Deterministic: the same calls with the same times give the same batches.

    At most `config.stages` batches are in flight. Preemption of a prefill happens at chunk edges and keeps its KV;
    KV is given up (and computed again later) only when decodes cannot grow, youngest request first.
    """

    def __init__(self, config: SchedulerConfig, latency: LatencyModel, ledger: Ledger) -> None:
        self.config = config
        self.latency = latency
        self.ledger = ledger
        self.policy = make_policy(config.policy)
        self.chunking = make_chunking(config.chunking, config.subtract_times)
        self.prefill_times = PrefillCache(latency, config.t_target_s, max(config.min_chunk, 16))
        self._sequences: dict[str, Sequence] = {}
        self._queue = make_queue(self.policy.parallel)
        self._ready = DecodeSet()
        self._parked: dict[str, Sequence] = {}
        self._holders: dict[str, Sequence] = {}
        self._aborting: dict[str, Sequence] = {}
        self._flights: dict[int, _Flight] = {}
        self._incumbent: Sequence | None = None
        self._tbt: dict[float, int] = {}
        self._untold: list[Event] = []
        self._arrivals = 0
        self._iterations = 0
        self._advanced = 0
        self._epochs = 0

    # -- what surroundings may ask ------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Requests that hold KV."""
        return len(self._holders)

    @property
    def waiting(self) -> int:
        """Requests that hold none yet."""
        return len(self._sequences) - len(self._holders)

    @property
    def idle(self) -> bool:
        return not self._sequences

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def deadline_s(self, request_id: str) -> float:
        """When the first token of a request that is here is due: its SLO's word, else the default's."""
        return self._sequences[request_id].deadline_s

    def next_wakeup(self, now: float) -> float | None:
        """When `schedule` should be called although nothing was added or completed; None: no need.

        Policies here act only when something arrives or ends, so a waiting request never needs a timer.
        """
        return None

    # -- the three verbs ----------------------------------------------------------------------------------------

    def add(self, span: Span, now: float) -> None:
        """Take on a request. Raises RequestError when it could never be served here."""
        request = span.request
        if request.id in self._sequences:
            raise RequestError(f"request id {request.id!r} is in use", "id")
        need = request.prompt_tokens + 1
        if need > self.ledger.total_tokens:
            raise RequestError(
                f"the prompt has {request.prompt_tokens} tokens and the KV cache holds {self.ledger.total_tokens}: "
                "shorten the prompt or start the server with more KV memory",
                "prompt",
            )
        if need - 2 + request.max_output_tokens > self.ledger.total_tokens:  # alone it would run dry and wait for ever
            raise RequestError(
                f"{request.prompt_tokens} prompt and {request.max_output_tokens} output tokens do not fit the KV cache "
                f"of {self.ledger.total_tokens} tokens: ask for less output or give the server more KV memory",
                "max_tokens",
            )
        sequence = Sequence(request, self._arrivals, self._is_long(request))
        self._arrivals += 1
        sequence.total_s = sequence.work_s = self._work_s(sequence)
        ttft_s = request.slo.ttft_s
        if ttft_s is None:
            ttft_s = max(self.config.deadline_base_s, self.config.deadline_factor * sequence.total_s)
        sequence.deadline_s = request.arrival_s + ttft_s
        self._sequences[request.id] = sequence
        self._queue.add(sequence, self._line(sequence))

    def schedule(self, now: float, ahead: int = 1) -> Batch | None:
        """The next batch, or None when there is nothing to do or `stages` batches are in flight.

        `ahead` above 1 allows a batch of decodes that stands for up to so many iterations (`Batch.repeat`): those in
        which nobody waits, nothing else is in flight and nobody needs KV.
        """
        if len(self._flights) >= self.config.stages:
            return None
        if self._parked or self._ready.room() <= 0:
            self._feed(now)
        decodes = self._ready
        load = Load(len(decodes), len(decodes), decodes.kv_sum)
        chunks, load = self._pack(load, now) if len(self._queue) else ([], load)
        if not decodes.members and not chunks:
            return None
        self._ready = DecodeSet()
        self._epochs += 1
        group = decodes.group(self._epochs)
        alone = ahead > 1 and not (len(self._queue) or self._parked or self._flights or self._aborting)
        batch = Batch(
            id=self._iterations,
            parts=(Part(0, group, tuple(chunks), self.ledger.take_ops()),),
            predicted_s=load_s(self.latency, load),
            repeat=max(1, min(ahead, decodes.room())) if alone and not chunks else 1,
        )
        self._iterations += 1
        self._flights[batch.id] = _Flight(batch, decodes, load)
        return batch

    def complete(
        self, batch_id: int, results: Seq[Progress], now: float, elapsed_s: float | None = None, repeats: int = 1
    ) -> list[Event]:
        """A batch has been carried out. `results` names those that have ended; any other request that yielded output
        (a decode of the batch, a prompt whose last chunk was in it) has accepted one token and goes on, and may be
        named as such. `elapsed_s` teaches latency models that learn. `repeats` (at most the batch's `repeat`) is how
        many iterations of it were carried out. Returns what has become true since the last call, preemptions while
        scheduling included.
        """
        flight = self._flights.pop(batch_id, None)
        if flight is None:
            raise InvariantError(f"batch {batch_id} is not in flight")
        if not 1 <= repeats <= flight.batch.repeat:
            raise InvariantError(f"batch {batch_id} may run {flight.batch.repeat} times, not {repeats}")
        if elapsed_s is not None:
            self.latency.observe(flight.load, elapsed_s)
            self.prefill_times.refresh()
        self._iterations += repeats - 1
        events, self._untold = self._untold, []
        decodes, chunks = flight.decodes, flight.batch.parts[0].prefills
        if decodes.members:
            decodes.step(repeats)
        yielding: dict[str, Sequence] = {}
        for chunk in chunks:
            sequence = self._sequences[chunk.request]
            sequence.computed += chunk.tokens
            sequence.in_flight -= 1
            if chunk.last:
                yielding[chunk.request] = sequence
                sequence.generated += 1
            if not sequence.started:
                sequence.started = True
                events.append(Event("started", chunk.request, now))
        ended = self._ended(results, decodes, yielding, chunks)
        for name, sequence in ended.items():
            if name in decodes.members:
                decodes.remove(sequence)
        self._rejoin(decodes)
        for name, sequence in yielding.items():
            if name not in ended:
                self._begin_decoding(sequence)
        for name, sequence in ended.items():
            kind = "aborted" if sequence.aborted else "finished"
            self._forget(sequence)
            events.append(Event(kind, name, now))  # type: ignore[arg-type]
        return events

    def _ended(
        self, results: Seq[Progress], decodes: DecodeSet, yielding: dict[str, Sequence], chunks: Seq[Chunk]
    ) -> dict[str, Sequence]:
        """Who takes part in no later batch: finished as told, and aborted ones that nothing in flight holds back."""
        ended: dict[str, Sequence] = {}
        for result in results:
            if result.finished:
                ended[result.request] = self._sequences[result.request]
            elif result.accepted != 1 and not self._sequences[result.request].aborted:
                raise InvariantError(f"{result.request} goes on with {result.accepted} tokens of one iteration")
        if self._aborting:
            landed = (chunk.request for chunk in chunks if not self._sequences[chunk.request].in_flight)
            mine = {*decodes.members, *yielding, *landed}
            ended.update((name, sequence) for name, sequence in self._aborting.items() if name in mine)
        return ended

    def abort(self, request_id: str, now: float) -> list[Event]:
        """Drop a request: at once, or when the batch that it is in completes. Unknown ids (ended) are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.aborted:
            return []
        sequence.aborted = True
        if sequence.slot >= 0:
            self._queue.remove(sequence)
        if self._flying(sequence):
            self._aborting[request_id] = sequence
            return []
        if request_id in self._ready.members:
            self._ready.remove(sequence)
        self._forget(sequence)
        return [Event("aborted", request_id, now)]

    def lost(self, instance: int, now: float) -> list[Event]:
        """The instance has lost its KV: everything in flight is void, all progress must be made again.

        The next batch's KV operations start from empty block tables. Returns what has become true, as `complete` does.
        """
        for flight in self._flights.values():
            self._settle(flight.decodes)
        self._flights.clear()
        self._settle(self._ready)
        self._ready, self._parked = DecodeSet(), {}
        events, self._untold = self._untold, []
        for sequence in list(self._sequences.values()):
            sequence.in_flight = 0
            if sequence.aborted:
                self._forget(sequence)
                events.append(Event("aborted", sequence.request.id, now))
            elif sequence.lease is not None:
                events.append(self._give_up_kv(sequence, now))
        self.ledger.take_ops()
        return events

    def check(self) -> None:
        """Raise InvariantError unless cursors, sets and the ledger agree. Called when idle, and by tests each step."""
        self.ledger.check()
        for group in (self._ready, *(flight.decodes for flight in self._flights.values())):
            self._settle(group)
        leased = {s.request.id for s in self._sequences.values() if s.lease is not None}
        if leased != {lease.request for lease in self.ledger.leases()} or leased != self._holders.keys():
            raise InvariantError("sequences and ledger disagree on who holds KV")
        for sequence in self._sequences.values():
            if not sequence.computed <= sequence.scheduled <= sequence.known:
                raise InvariantError(f"cursors of {sequence.request.id} are out of order")
            if sequence.lease is not None and sequence.scheduled > sequence.lease.tokens:
                raise InvariantError(f"{sequence.request.id} has been scheduled beyond its lease")
        homes = [*(s.request.id for s in self._queue), *self._parked, *self._ready.members]
        chunks = [chunk for flight in self._flights.values() for chunk in flight.batch.parts[0].prefills]
        homes += {chunk.request for chunk in chunks if chunk.last or self._sequences[chunk.request].aborted}
        homes += [name for flight in self._flights.values() for name in flight.decodes.members]
        if len(homes) != len(set(homes)) or set(homes) != set(self._sequences):
            raise InvariantError("a request is nowhere, or in two places at once")
        for group in (self._ready, *(flight.decodes for flight in self._flights.values())):
            if group.kv_sum != sum(s.computed + 1 for s in group.members.values()):
                raise InvariantError("a decode group's KV sum is off")

    # -- prefills -----------------------------------------------------------------------------------------------

    def _pack(self, load: Load, now: float) -> tuple[list[Chunk], Load]:
        config = self.config
        rules = PackRules(
            t_target_s=max(
                min([config.t_target_s, *self._tbt]), config.least_gain * float(self.latency.token_s(1, 1)[0])
            ),
            max_tokens=config.max_num_batched_tokens,
            min_chunk=config.min_chunk,
            progress_every=config.progress_every,
            rho_min=config.rho_min,
            rho_max=config.rho_max,
            shares_space=config.shares_space,
            stretch=config.stretch,
        )
        shorts_wait = self._queue.shorts > 0 or not config.yield_only_to_shorts

        def admit(request_id: str) -> bool:
            return self._admit(self._sequences[request_id])

        quotas, load = pack(load, self._candidates(now), shorts_wait, rules, self.chunking, self.latency, admit)
        chunks = []
        for request_id, tokens in quotas:
            sequence = self._sequences[request_id]
            start = sequence.scheduled
            sequence.scheduled += tokens
            sequence.in_flight += 1
            sequence.last_progress = self._advanced = self._iterations + 1
            last = sequence.remaining == 0
            chunks.append(Chunk(request_id, start, tokens, last))
            if sequence.is_long:
                self._sit(sequence)
            if last:
                self._queue.remove(sequence)
            else:
                self._queue.update(sequence, self._line(sequence))
        return chunks, load

    def _candidates(self, now: float) -> Iterator[Candidate]:
        """Prefills that could take tokens now, most urgent first.

        A request whose KV does not fit is skipped, not waited for, until it has been skipped for `admission_age_s`:
        then nobody behind it enters before it does. After `MISFITS` of them nobody else enters in this iteration.
        """
        one_at_a_time = self.config.pipeline_schedule == "microbatch"
        begun, misfits, closed = self._queue.begun, 0, len(self._holders) >= self.config.max_num_seqs
        for sequence in self._queue.ordered(now):
            if sequence.lease is not None:
                begun -= 1
                if one_at_a_time and sequence.in_flight:
                    continue
            else:
                if closed:
                    if not begun:
                        return
                    continue
                if not self._fits(sequence):
                    misfits += 1
                    closed = self._skip(sequence, now) or misfits >= MISFITS
                    continue
            slack = (sequence.deadline_s - now - sequence.work_s) / max(sequence.total_s, 1e-9)
            stalled = self._iterations - (self._advanced if sequence.lease is None else sequence.last_progress)
            yield Candidate(
                sequence.request.id, sequence.scheduled, sequence.remaining, sequence.is_long, slack, stalled
            )
            closed = closed or len(self._holders) >= self.config.max_num_seqs

    def _wanted(self, sequence: Sequence) -> tuple[int, int]:
        """(tokens, blocks that must stay free) of a request that enters."""
        most = sequence.prompt + sequence.request.max_output_tokens
        tokens = min(sequence.known + self.config.reserve_tokens, most, self.ledger.total_tokens)
        headroom = int(self.config.kv_headroom * self.ledger.n_blocks) if sequence.is_long and self._holders else 0
        return tokens, headroom

    def _fits(self, sequence: Sequence) -> bool:
        tokens, headroom = self._wanted(sequence)
        return self.ledger.blocks_for(max(tokens, 1)) + headroom <= self.ledger.free_blocks

    def _skip(self, sequence: Sequence, now: float) -> bool:
        """Passed over for want of KV. True when that has gone on for too long."""
        if sequence.skipped_since is None:
            sequence.skipped_since = now
        return now - sequence.skipped_since >= self.config.admission_age_s

    def _admit(self, sequence: Sequence) -> bool:
        """Reserve KV for a request that is about to get its first tokens."""
        if sequence.lease is not None:
            return True
        lease = self.ledger.reserve(sequence.request.id, *self._wanted(sequence))
        if lease is None:
            return False
        sequence.skipped_since = None
        sequence.lease = lease
        self._holders[sequence.request.id] = sequence
        self._queue.begun += 1
        return True

    def _is_long(self, request: Request) -> bool:
        """Medha's IsLong is a token count made for its GPUs; on a slow machine shorter ones are long: time counts."""
        config = self.config
        if request.prompt_tokens > config.long_tokens:
            return True
        alone_s = self.prefill_times.remaining_s(request.prompt_tokens, request.cached_tokens)
        return 0 < config.long_iterations * config.t_target_s < alone_s

    def _work_s(self, sequence: Sequence) -> float:
        done = sequence.scheduled
        return max(1e-6, self.prefill_times.remaining_s(sequence.known, done))

    def _line(self, sequence: Sequence) -> Line:
        sequence.work_s = self._work_s(sequence)
        line = self.policy.line(sequence.facts(sequence.work_s))
        if sequence is self._incumbent:
            return Line(line.intercept - self.config.quantum * sequence.total_s * line.slope, line.slope)
        return line

    def _sit(self, sequence: Sequence) -> None:
        """The long request that ran last keeps its place by a quantum, lest equally urgent ones alternate."""
        before, self._incumbent = self._incumbent, sequence
        if before is not None and before is not sequence and before.slot >= 0:
            self._queue.update(before, self._line(before))

    # -- decodes ------------------------------------------------------------------------------------------------

    def _begin_decoding(self, sequence: Sequence) -> None:
        self._ready.add(sequence)
        tbt_s = sequence.request.slo.tbt_s
        sequence.decoding = True
        if tbt_s is not None:
            per_stage = tbt_s / self.config.stages
            self._tbt[per_stage] = self._tbt.get(per_stage, 0) + 1

    def _rejoin(self, decodes: DecodeSet) -> None:
        """Decodes whose batch is done are ready for the next. Where two sets meet, the smaller joins the larger."""
        if len(decodes) > len(self._ready):
            self._ready, decodes = decodes, self._ready
        for sequence in list(decodes.members.values()):
            decodes.settle(sequence)
            self._ready.add(sequence)

    @staticmethod
    def _settle(decodes: DecodeSet) -> None:
        for sequence in decodes.members.values():
            decodes.settle(sequence)

    def _feed(self, now: float) -> None:
        """Give KV to decodes that have filled their lease; take it from the youngest when the pool is empty."""
        hungry = sorted({*self._ready.take_full(), *self._parked.values()}, key=lambda s: s.order)
        self._parked = {}
        for sequence in hungry:
            if sequence.lease is None:  # given up for an older one, just now
                continue
            while not self._grow(sequence):
                victim = self._youngest_behind(sequence)
                if victim is None:
                    break
                self._untold.append(self._give_up_kv(victim, now))
            ready = sequence.request.id in self._ready.members
            if sequence.lease.tokens > sequence.computed:
                if ready:
                    self._ready.watch(sequence)
                else:
                    self._ready.add(sequence)
            else:
                if ready:
                    self._ready.remove(sequence)
                self._parked[sequence.request.id] = sequence

    def _grow(self, sequence: Sequence) -> bool:
        lease = sequence.lease
        assert lease is not None
        most = sequence.prompt + sequence.request.max_output_tokens
        need = sequence.computed + 1
        wanted = max(need, min(need + self.config.reserve_tokens, most))
        return self.ledger.grow(lease, wanted) or self.ledger.grow(lease, need)

    def _youngest_behind(self, sequence: Sequence) -> Sequence | None:
        """The youngest request that holds KV, came after `sequence` and is in no batch in flight."""
        behind = [s for s in self._holders.values() if s.order > sequence.order and not self._flying(s)]
        return max(behind, key=lambda s: s.order, default=None)

    def _give_up_kv(self, sequence: Sequence, now: float) -> Event:
        """Preempt by recomputation: free the KV, keep the generated count, queue for prefill of all that is known."""
        if sequence.request.id in self._ready.members:
            self._ready.remove(sequence)
        lost = sequence.computed
        self._parked.pop(sequence.request.id, None)
        self._release(sequence)
        self._untrack_tbt(sequence)
        sequence.decoding = False
        sequence.computed = sequence.scheduled = 0
        if sequence.slot >= 0:
            self._queue.update(sequence, self._line(sequence))
        else:
            self._queue.add(sequence, self._line(sequence))
        return Event("preempted", sequence.request.id, now, lost)

    # -- ends ---------------------------------------------------------------------------------------------------

    def _flying(self, sequence: Sequence) -> bool:
        if sequence.in_flight:
            return True
        return any(sequence.request.id in flight.decodes.members for flight in self._flights.values())

    def _forget(self, sequence: Sequence) -> None:
        if sequence.slot >= 0:
            self._queue.remove(sequence)
        self._parked.pop(sequence.request.id, None)
        self._aborting.pop(sequence.request.id, None)
        self._untrack_tbt(sequence)
        if sequence is self._incumbent:
            self._incumbent = None
        self._release(sequence)
        del self._sequences[sequence.request.id]

    def _release(self, sequence: Sequence) -> None:
        if sequence.lease is not None:
            self.ledger.free(sequence.lease)
            sequence.lease = None
            del self._holders[sequence.request.id]
            self._queue.begun -= sequence.slot >= 0

    def _untrack_tbt(self, sequence: Sequence) -> None:
        """Forget the TBT promise of a request that no longer decodes."""
        tbt_s = sequence.request.slo.tbt_s
        if tbt_s is None or not sequence.decoding:
            return
        per_stage = tbt_s / self.config.stages
        left = self._tbt.get(per_stage, 0) - 1
        if left > 0:
            self._tbt[per_stage] = left
        else:
            self._tbt.pop(per_stage, None)
