"""The engine's executor over many ranks: batches become plans, what ranks report becomes results. No torch.

Several batches are in flight, one a stage. The engine is no rank: it schedules while they compute. It keeps what a
rank would need to start over (prompts, what was generated, where the plan stream stood when the last batch was done).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headway.core.batch import Batch, DecodeGroup, GroupBatch, KvOp
from headway.core.errors import InvariantError, LostError
from headway.core.executor import EmittedToken, StepResult
from headway.core.sampling import SamplingParams
from headway.kv.block_allocator import BlockTables
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.executor.messages import (
    AdmitToRank,
    BatchPlan,
    ControlMessage,
    ControlReply,
    FromRank,
    GroupSnapshot,
    MeasureRequest,
    MeasureResult,
    PlanDesync,
    PlanDone,
    RankAlive,
    RankFailed,
    RankProbe,
    ToRank,
)
from headway.runtime.executor.plan_stream import Asks, PlanWriter, StreamState, Told, replay
from headway.runtime.executor.rank_layout import RankPosition, places
from headway.runtime.executor.rank_transport import Frame, HostLauncher, RankLostError, RankTransport
from headway.runtime.executor.restart import RankRestart

_MOST_RESYNCS = 8
"""A rank that asks so often without carrying out a plan in between will not recover."""

_NO_BATCH = -1
"""Of a plan that only carries KV operations: nobody waits for its result."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class _TrackedRequest:
    """What the engine keeps of a live request, for ranks that start over. `heard`, for each group: how many of its
    output tokens the group knows, as of its last batch that is done."""

    __slots__ = ("heard", "number", "output", "params", "prompt")

    def __init__(self, number: int, prompt: bytes, params: SamplingParams, groups: int) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.output: list[int] = []
        self.heard = [0] * groups

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4


class _PlanInFlight:
    """A plan that not all ranks of its group have carried out."""

    __slots__ = ("batch_id", "names", "part", "passed", "plan", "spans", "told", "waiting")

    def __init__(
        self, batch_id: int, part: GroupBatch, plan: BatchPlan, passed: Told, ranks: set[int], stages: int
    ) -> None:
        self.batch_id = batch_id
        self.part = part
        self.passed = passed
        self.plan = plan
        self.waiting = ranks
        self.names = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        self.spans: list[tuple[float, float] | None] = [None] * stages
        self.told: PlanDone | None = None


class _GroupStream:
    """One group's stream: its writer, its plans in flight, and the state that follows those that are done. `heard_s`,
    `moved_s`: when it was last asked or heard, and when it last got or said something; groups run freely."""

    def __init__(self, ranks: tuple[RankPosition, ...], kv_blocks: int, numbers: dict[str, int]) -> None:
        self.ranks = ranks
        self.writer = PlanWriter(kv_blocks, numbers)
        self.settled = StreamState(BlockTables(kv_blocks))
        self.bases: dict[str, int] = {}
        self.seq = 0
        self.flights: deque[_PlanInFlight] = deque()
        self.resyncs: dict[int, int] = {}
        self.heard_s = self.moved_s = 0.0


class MultiProcessExecutor:
    """`Executor` over the ranks behind a wire, all of which are ready. `rewire` starts new ones, when these are lost,
    and returns when they are ready; without it nothing recovers."""

    def __init__(
        self,
        wire: RankTransport,
        layout: ParallelLayout,
        kv_blocks: int,
        rewire: Callable[[], RankTransport] | None = None,
    ) -> None:
        self.layout = layout
        self.plans = self.plan_bytes = self.resyncs = 0
        self.probe_s = 1.0
        self.stall_s = 900.0
        self._wire = wire
        self._places = places(layout)
        self._numbers: dict[str, int] = {}
        self._requests: dict[str, _TrackedRequest] = {}
        self._given = 0
        self._kv_blocks = kv_blocks
        self._groups = self._fresh_groups()
        self._rewire = rewire
        self._restart: RankRestart | None = None
        self._lost: LostError | None = None
        self._batches: deque[tuple[int, list[_PlanInFlight]]] = deque()
        self.peer_addresses: tuple[str, ...] = ()
        """Where each rank hears other instances, if they do."""
        self.hears: Callable[[int, bytes], None] | None = None
        """Who is told of what ranks say of KV that moves: (rank, what)."""
        self.hosts: HostLauncher | None = None
        """Set where ranks run on several hosts: their clocks differ, and they end with us."""

    # -- the executor's contract --------------------------------------------------------------------------------

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """See `Executor.waits_on`."""
        return self._wire.waits_on if self._restart is None else (self._restart.ready,)

    @property
    def accepts(self) -> bool:
        """Whether the first stage of a group has carried out all that it was given."""
        return bool(self.free)

    @property
    def free(self) -> tuple[int, ...]:
        """See `Executor.free`."""
        if self._lost is not None or self._restart is not None:
            return ()
        entered = (group.flights[-1].waiting if group.flights else () for group in self._groups)
        return tuple(
            index for index, waiting in enumerate(entered) if not any(self._places[rank].embeds for rank in waiting)
        )

    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        """See `Executor.admit`. Who embeds gets the prompt; who samples the settings, and the prompt if they ask it."""
        number = self._groups[0].writer.holder(request_id) if kept else None
        if number is None:
            self._given += 1
            number = self._given
        else:
            self._groups[0].writer.spare(number)
        request = _TrackedRequest(number, bytes(prompt), params, len(self._groups))
        request.output += output
        self._numbers[request_id] = request.number
        self._requests[request_id] = request
        if self._restart is None:
            for place in self._places:
                self._introduce(place, request)

    def submit(self, batch: Batch) -> None:
        """See `Executor.submit`."""
        flights = []
        for part in batch.parts:
            group = self._groups[part.group]
            passed = self._untold(part)
            plan = group.writer.write(part, _asks(batch, part.group), passed)
            ranks = {place.rank for place in group.ranks}
            flight = _PlanInFlight(batch.id, part, plan, passed, ranks, self.layout.stages)
            group.flights.append(flight)
            flights.append(flight)
            group.heard_s = group.moved_s = time.monotonic()
            frame = _encoder.encode(plan)
            self.plans += 1
            self.plan_bytes += len(frame)
            for rank in sorted(ranks):
                self._put(rank, (frame,))
        self._batches.append((batch.id, flights))

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """KV operations that were made since the last batch, ahead of the next one's. Of one KV group."""
        if ops and self._restart is None:
            self.submit(Batch(id=_NO_BATCH, parts=(GroupBatch(0, DecodeGroup(), (), ops),)))

    def number(self, request_id: str) -> int | None:
        """By what number ranks know a request, live or as who holds KV; None: they do not."""
        return self._numbers.get(request_id, self._groups[0].writer.holder(request_id))

    def aside(self, body: bytes) -> None:
        """Something for whoever moves KV at each rank, behind all that was submitted."""
        for place in self._places:
            self._send(place.rank, ControlMessage(self._groups[place.group].writer.seq, body))

    def result(self, timeout_s: float | None) -> StepResult | None:
        """See `Executor.result`."""
        try:
            if self._restart is not None:
                self._take_over(self._restart, timeout_s)
                return None
            return self._next(timeout_s)
        except LostError as error:
            self._lost = error
            raise

    def recover(self) -> None:
        """See `Executor.recover`. The old ranks are gone when it returns; new ones are on their way."""
        self._wire.kill()
        if self._rewire is None:
            raise self._lost or LostError("these workers cannot be started again")
        self._lost = None
        self._batches.clear()
        self._groups = self._fresh_groups()
        self._restart = RankRestart(self._rewire)

    def _fresh_groups(self) -> list[_GroupStream]:
        return [
            _GroupStream(tuple(place for place in self._places if place.group == group), self._kv_blocks, self._numbers)
            for group in range(self.layout.kvp)
        ]

    def _take_over(self, restart: RankRestart, timeout_s: float | None) -> None:
        """When the new ranks are ready, tell them of all requests and what they have said so far."""
        try:
            wire = restart.wire(timeout_s)
        except LostError:
            self._restart = None
            raise
        if wire is None:
            return
        self._wire, self._restart = wire, None
        for request in self._requests.values():
            for place in self._places:
                self._introduce(place, request)

    def _next(self, timeout_s: float | None) -> StepResult | None:
        """The next finished batch. Raises RankLostError when a rank is gone."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if self._finished():
                result = self._settle(self._take_finished())
                if result.batch_id != _NO_BATCH:
                    return result
                continue
            if self._lost is not None:
                raise self._lost
            left_s = self.probe_s if until_s is None else min(self.probe_s, max(0.0, until_s - time.monotonic()))
            if not self._receive(left_s) and until_s is not None and time.monotonic() >= until_s:
                return None

    def _receive(self, timeout_s: float) -> bool:
        """Hear a rank's message, or ask after those who are silent."""
        message = self._wire.receive(timeout_s)
        if message is None:
            self._probe()
            return False
        group = self._groups[self._places[message[0]].group]
        group.heard_s = group.moved_s = time.monotonic()
        self._hear(*message)
        return True

    def attend(self, timeout_s: float) -> None:
        """Hear what a rank says within so many seconds, while no result is asked for. Raises LostError, as `result`
        does then too."""
        if self._lost is not None:
            raise self._lost
        try:
            self._receive(timeout_s)
        except LostError as error:
            self._lost = error
            raise

    def forget(self, request_id: str) -> None:
        """See `Executor.forget`."""
        self._requests.pop(request_id, None)
        number = self._numbers.pop(request_id, None)
        if number is not None:
            for group in self._groups:
                group.writer.forget(number)

    def close(self) -> None:
        """See `Executor.close`."""
        if self._restart is not None:
            self._restart.abandon()
        self._wire.close()
        if self.hosts is not None:
            self.hosts.close()

    def _probe(self) -> None:
        """After a silence, ask every rank that owes something whether it is there and has all its plans."""
        now = time.monotonic()
        for group in self._groups:
            if now - group.heard_s < self.probe_s:
                continue
            group.heard_s = now
            for rank in sorted(set().union(*(flight.waiting for flight in group.flights))):
                if now - group.moved_s > self.stall_s:
                    raise RankLostError(rank, f"has carried out nothing for {self.stall_s:g} s, though it runs")
                self._send(rank, RankProbe(group.writer.seq))

    # -- measuring ----------------------------------------------------------------------------------------------

    def measure(self, kind: str, first: int, second: int, repeats: int) -> float:
        """Seconds of the slowest rank. Only while there are no requests. For "exchange", of `first` rows, groups pair
        up, the first with the last: of neighbours, who may share a host, the others' links would not be seen."""
        asked = 0
        for place in self._places:
            message = MeasureRequest(kind, first, second, repeats)
            if kind == "exchange":
                other = self.layout.kvp - 1 - place.group
                if other == place.group:
                    continue
                message = MeasureRequest("ask" if place.group < other else "visit", first, other, repeats)
            self._send(place.rank, message)
            asked += 1
        slowest = 0.0
        for _ in range(asked):
            heard = self._wire.receive(None)
            assert heard is not None
            rank, frames = heard
            said = _decoder.decode(frames[0])
            if not isinstance(said, MeasureResult):
                raise RankLostError(rank, f"answered a measurement with {said!r}")
            slowest = max(slowest, said.seconds)
        return slowest

    # -- what ranks say -----------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        return any(map(self._carried_out, self._batches))

    def _carried_out(self, batch: tuple[int, list[_PlanInFlight]]) -> bool:
        """Whether all its ranks are done, and all batches before it in its groups are settled. Groups that share no
        request run freely: theirs are not in order of submission."""
        return all(not f.waiting and self._groups[f.part.group].flights[0] is f for f in batch[1])

    def _take_finished(self) -> list[_PlanInFlight]:
        batch = next(filter(self._carried_out, self._batches))
        self._batches.remove(batch)
        return batch[1]

    def _hear(self, rank: int, frames: list[bytes]) -> None:
        said = _decoder.decode(frames[0])
        place = self._places[rank]
        group = self._groups[place.group]
        if isinstance(said, PlanDone):
            self._done(group, place, said)
        elif isinstance(said, PlanDesync):
            self._resync(group, place, said)
        elif isinstance(said, RankAlive):
            if any(rank in flight.waiting and flight.plan.seq <= said.done for flight in group.flights):
                raise RankLostError(rank, f"has carried out plan {said.done}, and what it said of it was lost")
        elif isinstance(said, ControlReply):
            if self.hears is not None:
                self.hears(rank, said.body)
        elif isinstance(said, RankFailed):
            raise RankLostError(rank, f"failed: {said.error}")
        else:
            raise InvariantError(f"worker {rank} says {said!r}, which nobody asked for")

    def _done(self, group: _GroupStream, place: RankPosition, said: PlanDone) -> None:
        flight = next((flight for flight in group.flights if flight.plan.seq == said.seq), None)
        if flight is None or place.rank not in flight.waiting:
            raise InvariantError(f"worker {place.rank} has carried out plan {said.seq}, which is not in flight")
        flight.waiting.remove(place.rank)
        group.resyncs.pop(place.rank, None)
        before = flight.spans[place.stage]
        ahead_s = 0.0 if self.hosts is None else self.hosts.ahead_s(place.rank)
        span = (said.start_s + ahead_s, said.end_s + ahead_s)
        flight.spans[place.stage] = span if before is None else (min(before[0], span[0]), max(before[1], span[1]))
        if place.draws:
            flight.told = said

    def _settle(self, flights: list[_PlanInFlight]) -> StepResult:
        """A batch is done everywhere: bring the settled state up to it and tell the engine."""
        emitted: list[EmittedToken] = []
        spans: list[tuple[tuple[float, float], ...]] = []
        for flight in flights:
            group = self._groups[flight.part.group]
            assert group.flights.popleft() is flight
            assert flight.told is not None
            group.settled.part_of(flight.plan)
            group.settled.advance(replay(group.settled.tables, flight.plan), flight.part.decodes.kv_sum)
            group.seq = flight.plan.seq
            index = flight.part.group
            for number, blocks, start in flight.plan.ops:
                if start:
                    group.bases[str(number)] = start
                elif not blocks:
                    group.bases.pop(str(number), None)
            for name, known, tokens in flight.passed:
                if name in self._requests:
                    request = self._requests[name]
                    request.heard[index] = max(request.heard[index], known + len(tokens) - request.prompt_tokens)
            logprobs = flight.told.logprobs or (None,) * len(flight.names)
            for name, token, reported in zip(flight.names, flight.told.tokens, logprobs, strict=True):
                emitted.append(EmittedToken(name, token, reported))
                if name in self._requests:
                    self._requests[name].output.append(token)
                    self._requests[name].heard[index] += 1
            spans.append(tuple(span for span in flight.spans if span is not None))
        elapsed_s = max(end - start for stages in spans for start, end in stages)
        return StepResult(flights[0].batch_id, emitted, elapsed_s, tuple(spans))

    def _resync(self, group: _GroupStream, place: RankPosition, said: PlanDesync) -> None:
        """Give a rank the state as of the last batch that is done, and the plans since."""
        self.resyncs += 1
        count = group.resyncs[place.rank] = group.resyncs.get(place.rank, 0) + 1
        if count > _MOST_RESYNCS:
            raise RankLostError(place.rank, f"does not follow the plan stream: {said.why}")
        state, tables = group.settled, group.settled.tables
        known = {str(r.number): r.prompt_tokens + r.heard[place.group] for r in self._requests.values()}
        names = dict.fromkeys((*known, *tables.owners()))
        holders = set(tables.owners())
        self._send(
            place.rank,
            GroupSnapshot(
                seq=group.seq,
                said=state.said,
                check=state.check,
                requests=tuple(
                    (int(n), known.get(n, 0), tables.runs(n) if n in holders else (), group.bases.get(n, 0))
                    for n in names
                ),
                groups=tuple((epoch, tuple(map(int, members))) for epoch, members in state.epochs.items()),
            ),
        )
        for flight in group.flights:
            self._send(place.rank, flight.plan)

    def _untold(self, part: GroupBatch) -> Told:
        """What a group has not heard of the requests that it begins to hold: tokens generated in other groups. Nothing
        of theirs is in flight here, so what has come back is all that there is."""
        told = []
        for op in part.kv_ops:
            request = self._requests.get(op.request)
            if op.verb == "reserve" and request is not None:
                heard = request.heard[part.group]
                if heard < len(request.output):
                    told.append((op.request, request.prompt_tokens + heard, tuple(request.output[heard:])))
        return tuple(told)

    # -- what ranks hear ----------------------------------------------------------------------------------------

    def _introduce(self, place: RankPosition, request: _TrackedRequest) -> None:
        reads = place.embeds or (place.draws and request.params.repetition_penalty != 1.0)
        params = request.params if place.draws else None
        request.heard[place.group] = len(request.output)
        message = AdmitToRank(request.number, len(request.prompt) // 4, params, reads, tuple(request.output))
        frames: list[Frame] = [_encoder.encode(message)]
        self._put(place.rank, [*frames, request.prompt] if reads else frames)

    def _send(self, rank: int, message: ToRank) -> None:
        self._put(rank, (_encoder.encode(message),))

    def _put(self, rank: int, frames: Sequence[Frame]) -> None:
        """What cannot be sent is noted for `result` to raise: only there may a loss come out."""
        if self._lost is None:
            try:
                self._wire.send(rank, frames)
            except RankLostError as error:
                self._lost = error


def _asks(batch: Batch, owner: int) -> Asks:
    """Which other groups of a batch attend rows of `owner`'s requests, in the order in which they do."""
    asks = ((part.group, tuple(a.request for a in part.assists if a.owner == owner)) for part in batch.parts)
    return tuple((group, names) for group, names in asks if names)
