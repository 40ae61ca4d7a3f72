"""The engine's executor over many ranks: batches are sent as plans, the ranks' reports become results. No torch.

Several batches are in flight, one for each pipeline stage. The engine's process is not a rank: it schedules while the
ranks compute. It keeps the data from which new ranks go on where others were lost: prompts and generated tokens.
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
from headway.perf.latency.layout import ParallelLayout
from headway.runtime.engine.protocol import FatalError, SubmitRequest
from headway.runtime.executor.messages import (
    FromRank,
    InstanceFromRank,
    InstanceToRank,
    PlanDone,
    RankQuery,
    ToRank,
)
from headway.runtime.executor.plan_stream import QueryTargets
from headway.runtime.executor.plans_in_flight import GroupStream, PlanInFlight, TrackedRequest, make_groups
from headway.runtime.executor.rank_layout import RankPosition, places
from headway.runtime.executor.rank_transport import Frame, HostLauncher, RankLostError, RankTransport
from headway.runtime.executor.restart import RankRestart

_NO_BATCH = -1
"""The batch id of a plan that only carries KV operations: it has no result."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class MultiProcessExecutor:
    """`Executor` over ranks that are ready, reached by a transport.

    restart: starts new ranks when these are lost, and returns their transport when they are ready. None: a loss is
    final.
    """

    def __init__(
        self,
        transport: RankTransport,
        layout: ParallelLayout,
        kv_blocks: int,
        restart: Callable[[], RankTransport] | None = None,
    ) -> None:
        self.layout = layout
        self.plans = self.plan_bytes = 0
        self.probe_s = 1.0
        """After so long a silence, ranks with plans in flight are probed."""
        self.stall_s = 900.0
        """Ranks with plans in flight that send nothing for so long are lost, although their heartbeats arrive."""
        self._transport = transport
        self._places = places(layout)
        self._numbers: dict[str, int] = {}
        self._requests: dict[str, TrackedRequest] = {}
        self._last_number = 0
        self._groups = make_groups(layout, self._numbers)
        self._start_ranks = restart
        self._restart: RankRestart | None = None
        self._lost: LostError | None = None
        self._batches: deque[list[PlanInFlight]] = deque()
        self.peer_addresses: tuple[str, ...] = ()
        """Where other instances reach each rank, if KV moves."""
        self.on_control: Callable[[int, InstanceFromRank], None] | None = None
        """Called for each message of a rank about spans and KV transfers: (rank, message)."""
        self.hosts: HostLauncher | None = None
        """Set where ranks run on several hosts: corrects their clocks, and ends them with this process."""

        self.interrupts: Callable[[], bool] | None = None  # never asked

    # -- the executor's contract --------------------------------------------------------------------------------

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """See `Executor.waits_on`."""
        return self._transport.waits_on if self._restart is None else (self._restart.ready,)

    @property
    def accepts(self) -> bool:
        """Whether the first stage of a group has carried out all that it was given."""
        return bool(self.free)

    @property
    def free(self) -> tuple[int, ...]:
        """See `Executor.free`."""
        if self._lost is not None or self._restart is not None:
            return ()
        # Plans pass the stages in order: once the newest plan has left all embedding ranks, the first stage is free.
        entered = (group.in_flight[-1].pending_ranks if group.in_flight else () for group in self._groups)
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
        """See `Executor.admit`. Ranks that embed get the prompt; the one that samples gets the settings."""
        # With KV kept from an earlier phase, the blocks at the ranks belong to the old number: the request continues
        # it.
        number = self._groups[0].writer.holder_number(request_id) if kept else None
        if number is None:
            self._last_number += 1
            number = self._last_number
        else:
            self._groups[0].writer.keep_number(number)
        request = TrackedRequest(number, bytes(prompt), params, len(self._groups))
        request.output += output
        self._numbers[request_id] = request.number
        self._requests[request_id] = request
        # While ranks restart, `_adopt_ranks` admits all live requests to the new ones.
        if self._restart is None:
            for place in self._places:
                self._admit_to_rank(place, request)

    def submit(self, batch: Batch) -> None:
        """See `Executor.submit`."""
        in_flight = []
        for part in batch.parts:
            group = self._groups[part.group]
            # Before `write`: the plan itself must carry the tokens that this group has not seen.
            foreign = group.unknown_tokens(part, self._requests)
            plan = group.writer.write(part, _query_targets(batch, part.group), foreign)
            ranks = {place.rank for place in group.ranks}
            flight = PlanInFlight(batch.id, part, plan, foreign, ranks, self.layout.stages)
            # In flight before it is sent: an answer must find its plan.
            group.in_flight.append(flight)
            in_flight.append(flight)
            # A first batch after idleness follows no silence: every plan sent restarts the stall clock.
            group.touch(time.monotonic())
            frame = _encoder.encode(plan)
            self.plans += 1
            self.plan_bytes += len(frame)
            for rank in sorted(ranks):
                self._put(rank, (frame,))
        self._batches.append(in_flight)

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """Submit KV operations without a batch, ahead of the next batch. For layouts of one KV group."""
        if ops and self._restart is None:
            self.submit(Batch(id=_NO_BATCH, parts=(GroupBatch(0, DecodeGroup(), (), ops),)))

    def number(self, request_id: str) -> int | None:
        """Return a request's number at the ranks, live or as the owner of KV; None if it has none."""
        return self._numbers.get(request_id, self._groups[0].writer.holder_number(request_id))

    def send_control(self, message: InstanceToRank, *frames: Frame) -> None:
        """Send a message about spans or KV transfers to each rank, to be taken behind all plans submitted so far."""
        head = _encoder.encode(message)
        for place in self._places:
            self._put(place.rank, (head, *frames))

    def result(self, timeout_s: float | None) -> StepResult | None:
        """See `Executor.result`."""
        try:
            if self._restart is not None:
                self._adopt_ranks(self._restart, timeout_s)
                return None
            return self._next(timeout_s)
        except LostError as error:
            self._lost = error
            raise

    def recover(self) -> None:
        """See `Executor.recover`. The old ranks are gone when it returns; new ones are on their way."""
        self._transport.kill()
        if self._start_ranks is None:
            raise self._lost or LostError("these workers cannot be started again")
        self._lost = None
        # No batch in flight survives, and the new ranks' streams start at plan 1 with empty tables.
        self._batches.clear()
        self._groups = make_groups(self.layout, self._numbers)
        self._restart = RankRestart(self._start_ranks)

    def _adopt_ranks(self, restart: RankRestart, timeout_s: float | None) -> None:
        """When the new ranks are ready, admit all live requests to them, with the output so far."""
        try:
            transport = restart.wire(timeout_s)
        except LostError:
            self._restart = None
            raise
        if transport is None:
            return
        self._transport, self._restart = transport, None
        for request in self._requests.values():
            for place in self._places:
                self._admit_to_rank(place, request)

    def _next(self, timeout_s: float | None) -> StepResult | None:
        """The next finished batch. Raises RankLostError when a rank is gone."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            if (batch := _pop_finished(self._batches, self._groups)) is not None:
                result = self._commit(batch)
                if result.batch_id != _NO_BATCH:
                    return result
                continue
            if self._lost is not None:
                raise self._lost
            # Wake at least every `probe_s`: a lost message shows only as silence.
            left_s = self.probe_s if until_s is None else min(self.probe_s, max(0.0, until_s - time.monotonic()))
            if not self._receive(left_s) and until_s is not None and time.monotonic() >= until_s:
                return None

    def _receive(self, timeout_s: float) -> bool:
        """Take a rank's message; without one, probe the ranks that were silent. Returns whether one came."""
        message = self._transport.receive(timeout_s)
        if message is None:
            self._probe()
            return False
        group = self._groups[self._places[message[0]].group]
        group.touch(time.monotonic())
        self._on_message(*message)
        return True

    def poll(self, timeout_s: float) -> None:
        """Process one message of a rank outside `result`. Raises LostError, and then so does every later `result`."""
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
        self._transport.close()
        if self.hosts is not None:
            self.hosts.close()

    def _probe(self) -> None:
        """Probe ranks with plans in flight after a silence: each must be alive and have received all its plans."""
        now = time.monotonic()
        for group in self._groups:
            if now - group.last_contact_s < self.probe_s:
                continue
            group.last_contact_s = now
            for rank in sorted(set().union(*(flight.pending_ranks for flight in group.in_flight))):
                # Heartbeats come from a separate thread and go on while a rank hangs in a computation.
                if now - group.last_progress_s > self.stall_s:
                    raise RankLostError(rank, f"has carried out nothing for {self.stall_s:g} s, though it runs")
                self._send(rank, RankQuery("plans", group.writer.seq))

    # -- measuring ----------------------------------------------------------------------------------------------

    def measure(self, kind: str, first: int, second: int, repeats: int) -> float:
        """Return the seconds of the slowest rank. Only while there are no requests.

        For "exchange", of `first` rows, groups pair up, the first with the last: neighbours may share a host, and their
        link would be the faster one.
        """
        asked = 0
        for place in self._places:
            message = RankQuery(kind, first, second, repeats)
            if kind == "exchange":
                other = self.layout.kvp - 1 - place.group
                if other == place.group:
                    continue
                message = RankQuery("ask" if place.group < other else "visit", first, other, repeats)
            self._send(place.rank, message)
            asked += 1
        slowest = 0.0
        for _ in range(asked):
            received = self._transport.receive(None)
            assert received is not None
            rank, frames = received
            reply = _decoder.decode(frames[0])
            if not isinstance(reply, PlanDone) or reply.measured_s is None:
                raise RankLostError(rank, f"answered a measurement with {reply!r}")
            slowest = max(slowest, reply.measured_s)
        return slowest

    # -- messages from ranks -----------------------------------------------------------------------------------------

    def _on_message(self, rank: int, frames: list[bytes]) -> None:
        message = _decoder.decode(frames[0])
        place = self._places[rank]
        group = self._groups[place.group]
        if isinstance(message, PlanDone) and message.measured_s is None:
            group.record_done(place, message, 0.0 if self.hosts is None else self.hosts.ahead_s(rank))
        elif isinstance(message, PlanDone):
            # Messages of a rank keep their order, so the report of a plan computed before must have arrived before this
            # answer.
            if any(rank in flight.pending_ranks and flight.plan.seq <= message.seq for flight in group.in_flight):
                raise RankLostError(rank, f"has carried out plan {message.seq}, and its report of it was lost")
        elif isinstance(message, FatalError):
            raise RankLostError(rank, f"failed: {message.error}")
        elif isinstance(message, InstanceFromRank) and self.on_control is not None:
            self.on_control(rank, message)
        else:
            raise InvariantError(f"worker {rank} says {message!r}, which was not asked for")

    def _commit(self, batch: list[PlanInFlight]) -> StepResult:
        """Take in the tokens of a batch that all its ranks have carried out; return the engine's result."""
        emitted: list[EmittedToken] = []
        spans: list[tuple[tuple[float, float], ...]] = []
        for flight in batch:
            emitted += self._groups[flight.part.group].commit(flight, self._requests)
            spans.append(tuple(span for span in flight.stage_spans if span is not None))
        # A batch takes as long as its slowest stage: the stages of successive batches overlap.
        elapsed_s = max(end - start for stages in spans for start, end in stages)
        return StepResult(batch[0].batch_id, emitted, elapsed_s, tuple(spans))

    # -- messages to ranks ----------------------------------------------------------------------------------------

    def _admit_to_rank(self, place: RankPosition, request: TrackedRequest) -> None:
        # A sampling rank reads the prompt only for a repetition penalty.
        reads = place.embeds or (place.draws and request.params.repetition_penalty != 1.0)
        request.known_outputs[place.group] = len(request.output)
        message = SubmitRequest(
            id=str(request.number),
            prompt_tokens=len(request.prompt) // 4,
            params=request.params,
            output=tuple(request.output),
        )
        frames: list[Frame] = [_encoder.encode(message)]
        self._put(place.rank, [*frames, request.prompt] if reads else frames)

    def _send(self, rank: int, message: ToRank) -> None:
        self._put(rank, (_encoder.encode(message),))

    def _put(self, rank: int, frames: Sequence[Frame]) -> None:
        """Send, or record the loss of the rank for `result` to raise: callers of `submit` do not expect one."""
        if self._lost is None:
            try:
                self._transport.send(rank, frames)
            except RankLostError as error:
                self._lost = error


def _query_targets(batch: Batch, owner: int) -> QueryTargets:
    """Return the other groups of a batch that attend rows of `owner`'s requests, with the requests in their order."""
    query_targets = ((part.group, tuple(a.request for a in part.assists if a.owner == owner)) for part in batch.parts)
    return tuple((group, names) for group, names in query_targets if names)


def _pop_finished(batches: deque[list[PlanInFlight]], groups: Sequence[GroupStream]) -> list[PlanInFlight] | None:
    """Take the first batch that all its ranks have carried out, and all batches before it in its groups.

    Groups that share no request advance independently, so this may not be the oldest batch.
    """
    for batch in batches:
        # In each group a batch must be the oldest plan: tokens are taken in plan by plan.
        if all(not f.pending_ranks and groups[f.part.group].in_flight[0] is f for f in batch):
            batches.remove(batch)
            return batch
    return None
