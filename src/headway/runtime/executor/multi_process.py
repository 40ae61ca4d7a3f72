"""The engine's executor over many ranks: it sends batches as plans, collects the ranks' reports, and starts and
restarts the ranks. No torch.

Several batches are in flight, one for each pipeline stage. The engine's process is not a rank: it schedules while the
ranks compute. It keeps the data from which new ranks go on where others were lost: prompts and generated tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
from typing_extensions import override

from headway import __version__
from headway.core.batch import Batch, DecodeGroup, EmittedToken, Executor, GroupBatch, KvOp, StepResult
from headway.core.errors import ConfigError, InvariantError, LostError
from headway.core.files import ScratchFolder
from headway.core.request import SamplingParams
from headway.perf.hardware import ParallelLayout
from headway.runtime.engine.liveness import HeartbeatMonitor, IterationDeadline, IterationProgress, StarvationCheck
from headway.runtime.engine.protocol import EndProcess, FatalError, SubmitRequest
from headway.runtime.executor.plans import (
    CONTROL_IDENTITY,
    HEARTBEAT_IDENTITY,
    BatchPlan,
    ForeignTokens,
    Frame,
    FromRank,
    InstanceFromRank,
    InstanceToRank,
    LoadedRank,
    MeasuredSeconds,
    MeasureRank,
    PlanDone,
    PlanWriter,
    QueryTargets,
    RankConfig,
    RankHello,
    RankLostError,
    RankPosition,
    RankWelcome,
    ToRank,
    places,
)
from headway.runtime.launcher.processes import RANK, ProcessHandle, RankProcess
from headway.runtime.launcher.ray_hosts import RayHosts


class TrackedRequest:
    """A live request's data at the engine, for ranks that start over."""

    __slots__ = ("known_outputs", "number", "output", "params", "prompt")

    def __init__(self, number: int, prompt: bytes, params: SamplingParams, groups: int) -> None:
        self.number = number
        self.prompt = prompt
        self.params = params
        self.output: list[int] = []
        self.known_outputs = [0] * groups
        """For each KV group: how many output tokens it holds as of its last committed plan."""

    @property
    def prompt_tokens(self) -> int:
        """A token id has 4 bytes."""
        return len(self.prompt) // 4


class PlanInFlight:
    """A plan that not all ranks of its group have carried out."""

    __slots__ = (
        "batch_id", "foreign_tokens", "names", "part", "pending_ranks", "plan", "predicted_s", "result", "stage_spans"
    )  # fmt: skip

    def __init__(
        self, batch: Batch, part: GroupBatch, plan: BatchPlan, foreign: ForeignTokens, ranks: set[int], stages: int
    ) -> None:
        self.batch_id, self.predicted_s = batch.id, batch.predicted_s
        self.part = part
        self.plan = plan
        self.foreign_tokens = foreign
        self.pending_ranks = ranks
        self.names = [*part.decodes.members, *(chunk.request for chunk in part.prefills if chunk.last)]
        """The requests that get a token, in the order of the tokens in `result`."""
        self.stage_spans: list[tuple[float, float] | None] = [None] * stages
        """For each pipeline stage: first begin and last end among its ranks, in seconds of our clock."""
        self.result: PlanDone | None = None
        """The report of the rank that samples."""

    def emitted(self) -> list[EmittedToken]:
        """The tokens that were drawn. The plan has been carried out."""
        assert self.result is not None
        logprobs = self.result.logprobs or (None,) * len(self.names)
        return [EmittedToken(*each) for each in zip(self.names, self.result.tokens, logprobs, strict=True)]


class GroupStream:
    """One group's plan stream. Groups that share no request advance independently."""

    def __init__(self, index: int, ranks: tuple[RankPosition, ...], numbers: Mapping[str, int]) -> None:
        self.index = index
        self.ranks = ranks
        self.writer = PlanWriter(numbers)
        self.in_flight: deque[PlanInFlight] = deque()
        self.contact_s = 0.0
        """When a rank last got a plan or sent anything."""

    def record_done(self, place: RankPosition, done: PlanDone, ahead_s: float) -> None:
        """Take in a rank's report. ahead_s is added to its times. Raises RankLostError where it is not of the plan that
        the rank is to carry out next: messages of a rank keep their order, so one has been lost."""
        flight = next((flight for flight in self.in_flight if place.rank in flight.pending_ranks), None)
        if flight is None or flight.plan.seq != done.seq:
            due = "none" if flight is None else flight.plan.seq
            raise RankLostError(place.rank, f"has carried out plan {done.seq}, and its report of {due} was due")
        flight.pending_ranks.remove(place.rank)
        before = flight.stage_spans[place.stage]
        span = (done.start_s + ahead_s, done.end_s + ahead_s)
        # A stage lasts from the first begin to the last end of its tensor-parallel ranks.
        flight.stage_spans[place.stage] = span if before is None else (min(before[0], span[0]), max(before[1], span[1]))
        if place.draws:
            flight.result = done

    def commit(self, flight: PlanInFlight, requests: Mapping[str, TrackedRequest]) -> list[EmittedToken]:
        """Take in the tokens of the oldest plan, which all ranks have carried out, and return them."""
        assert self.in_flight.popleft() is flight
        for name, known, tokens in flight.foreign_tokens:
            if name in requests:
                outputs = requests[name].known_outputs
                # `known` and `tokens` count from the prompt's first token, known_outputs from the first output token.
                outputs[self.index] = max(outputs[self.index], known + len(tokens) - requests[name].prompt_tokens)
        emitted = flight.emitted()
        for one in emitted:
            if one.request in requests:
                requests[one.request].output.append(one.token)
                requests[one.request].known_outputs[self.index] += 1
        return emitted

    def unknown_tokens(self, part: GroupBatch, requests: Mapping[str, TrackedRequest]) -> ForeignTokens:
        """Tokens generated in other groups of the requests that this group begins to hold with `part`.

        None of their batches are in flight in this group, so all that has come back is all that there is.
        """
        unknown = []
        for op in part.kv_ops:
            request = requests.get(op.request)
            if op.verb == "reserve" and request is not None:
                known = request.known_outputs[self.index]
                if known < len(request.output):
                    unknown.append((op.request, request.prompt_tokens + known, tuple(request.output[known:])))
        return tuple(unknown)


def make_groups(layout: ParallelLayout, numbers: Mapping[str, int]) -> list[GroupStream]:
    """Empty streams of all KV groups of a layout."""
    ranks = places(layout)
    return [
        GroupStream(group, tuple(place for place in ranks if place.group == group), numbers)
        for group in range(layout.kvp)
    ]


_NO_BATCH = -1
"""The batch id of a plan that only carries KV operations: it has no result."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


_SPAN_S = 900.0
"""How long plans of an instance may wait for a layer of a span, whose time nothing predicts."""


class MultiProcessExecutor(Executor):
    """`Executor` over ranks that are ready, reached by a transport.

    restart: starts new ranks when these are lost, and returns their transport at once. None: a loss is final. deadline:
    for how long ranks that have plans may send nothing.
    """

    def __init__(
        self,
        transport: ProcessTransport,
        layout: ParallelLayout,
        restart: Callable[[], ProcessTransport] | None = None,
        deadline: IterationDeadline = IterationDeadline(10.0, 20.0),  # noqa: B008
    ) -> None:
        self.layout = layout
        self.plans = self.plan_bytes = 0
        self._deadline = deadline
        self._transport = transport
        self._places = places(layout)
        self._numbers: dict[str, int] = {}
        self._requests: dict[str, TrackedRequest] = {}
        self._last_number = 0
        self._groups = make_groups(layout, self._numbers)
        self._start_ranks = restart
        self._starting = False
        """Whether new ranks start, in place of some that were lost."""
        self._lost: LostError | None = None
        self._batches: deque[list[PlanInFlight]] = deque()
        self.peer_addresses: tuple[str, ...] = ()
        """Where other instances reach each rank, if KV moves."""
        self.on_control: Callable[[int, InstanceFromRank], None] | None = None
        """Called for each message of a rank about spans and KV transfers: (rank, message)."""
        self.hosts: RayHosts | None = None
        """Set where ranks run on several hosts: corrects their clocks, and ends them with this process."""

    # -- the executor's contract --------------------------------------------------------------------------------

    @property
    @override
    def waits_on(self) -> tuple[Any, ...]:
        return self._transport.waits_on

    @property
    def accepts(self) -> bool:
        """Whether the first stage of a group has carried out all that it was given."""
        return bool(self.free)

    @property
    @override
    def free(self) -> tuple[int, ...]:
        if self._lost is not None or self._starting:
            return ()
        # Plans pass the stages in order: once the newest plan has left all embedding ranks, the first stage is free.
        entered = (group.in_flight[-1].pending_ranks if group.in_flight else () for group in self._groups)
        return tuple(
            index for index, waiting in enumerate(entered) if not any(self._places[rank].embeds for rank in waiting)
        )

    @override
    def admit(
        self,
        request_id: str,
        prompt: memoryview,
        params: SamplingParams,
        output: tuple[int, ...] = (),
        kept: bool = False,
    ) -> None:
        """Ranks that embed get the prompt; the one that samples gets the settings."""
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
        if not self._starting:
            for place in self._places:
                self._admit_to_rank(place, request)

    @override
    def submit(self, batch: Batch) -> None:
        in_flight = []
        for part in batch.parts:
            group = self._groups[part.group]
            # Before `write`: the plan itself must carry the tokens that this group has not seen.
            foreign = group.unknown_tokens(part, self._requests)
            plan = group.writer.write(part, _query_targets(batch, part.group), foreign)
            ranks = {place.rank for place in group.ranks}
            flight = PlanInFlight(batch, part, plan, foreign, ranks, self.layout.stages)
            # In flight before it is sent: an answer must find its plan.
            group.in_flight.append(flight)
            in_flight.append(flight)
            # A first batch after idleness follows no silence: every plan sent restarts the clock.
            group.contact_s = time.monotonic()
            frame = _encoder.encode(plan)
            self.plans += 1
            self.plan_bytes += len(frame)
            for rank in sorted(ranks):
                self._put(rank, (frame,))
        self._batches.append(in_flight)

    def replay(self, ops: tuple[KvOp, ...]) -> None:
        """Submit KV operations without a batch, ahead of the next batch. For layouts of one KV group."""
        if ops and not self._starting:
            self.submit(Batch(id=_NO_BATCH, parts=(GroupBatch(0, DecodeGroup(), (), ops),)))

    def number(self, request_id: str) -> int | None:
        """Return a request's number at the ranks, live or as the owner of KV; None if it has none."""
        return self._numbers.get(request_id, self._groups[0].writer.holder_number(request_id))

    def send_control(self, message: InstanceToRank, *frames: Frame) -> None:
        """Send a message about spans or KV transfers to each rank, to be taken behind all plans submitted so far."""
        head = _encoder.encode(message)
        for place in self._places:
            self._put(place.rank, (head, *frames))

    @override
    def result(self, timeout_s: float | None) -> StepResult | None:
        try:
            if self._starting:
                self._adopt_ranks(timeout_s)
                return None
            return self._next(timeout_s)
        except LostError as error:
            self._lost = error
            raise

    @override
    def recover(self) -> None:
        """The old ranks are gone when it returns; new ones are on their way."""
        self._transport.kill()
        if self._start_ranks is None:
            raise self._lost or LostError("these workers cannot be started again")
        self._lost = None
        # No batch in flight survives, and the new ranks' streams start at plan 1 with empty tables.
        self._batches.clear()
        self._groups = make_groups(self.layout, self._numbers)
        try:
            self._transport, self._starting = self._start_ranks(), True
        except OSError as error:  # the server starts another engine
            raise LostError(f"the workers could not start again: {error}") from error

    def _adopt_ranks(self, timeout_s: float | None) -> None:
        """When the new ranks are ready, admit all live requests to them, with the output so far."""
        try:
            if self._transport.start(timeout_s) is None:
                return
        except ConfigError as error:
            self._starting = False
            raise LostError(f"the workers could not start again: {error}") from error
        self._starting = False
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
            # A rank that hangs, or a lost message, shows only as silence.
            left_s = _LOOK_S if until_s is None else min(_LOOK_S, max(0.0, until_s - time.monotonic()))
            if not self._receive(left_s) and until_s is not None and time.monotonic() >= until_s:
                return None

    def _receive(self, timeout_s: float) -> bool:
        """Take a rank's message; without one, look for groups that are silent. Returns whether one came."""
        message = self._transport.receive(timeout_s)
        if message is None:
            self._check_progress(time.monotonic())
            return False
        self._touch(self._places[message[0]].group, time.monotonic())
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

    @override
    def forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        number = self._numbers.pop(request_id, None)
        if number is not None:
            for group in self._groups:
                group.writer.forget(number)

    @override
    def close(self) -> None:
        self._transport.close()
        if self.hosts is not None:
            self.hosts.close()

    def _touch(self, group: int, now: float) -> None:
        """Note that a rank of a group has sent something: those that wait for it in a batch have time again."""
        self._groups[group].contact_s = now
        for batch in self._batches:
            if any(flight.part.group == group for flight in batch):
                for flight in batch:
                    self._groups[flight.part.group].contact_s = now

    def _check_progress(self, now: float) -> None:
        """Raise RankLostError where a group has plans in flight and has sent nothing for too long: heartbeats come from
        a separate thread, and go on while a rank hangs in a computation or waits for a message that was lost."""
        # Each batch passes through all stages, and takes about as long in each; it may wait for those of other groups.
        predicted_s = self.layout.stages * sum(
            flight.predicted_s for group in self._groups for flight in group.in_flight
        )
        limit_s = self._deadline.allowed_s(IterationProgress(predicted_s=predicted_s))
        limit_s = limit_s if self.on_control is None else max(limit_s, _SPAN_S)
        for group in self._groups:
            # None: it has carried out its part of a batch, and other groups have not.
            waiting = sorted(set[int]().union(*(flight.pending_ranks for flight in group.in_flight)))
            late = waiting and now - group.contact_s > limit_s
            if late and not any(self._transport.starved(rank, limit_s, now) for rank in waiting):
                raise RankLostError(waiting[0], f"has carried out nothing for {limit_s:g} s, though it runs")

    # -- measuring ----------------------------------------------------------------------------------------------

    def measure(self, kind: str, first: int, second: int, repeats: int) -> float:
        """Return the seconds of the slowest rank. Only while there are no requests.

        For "exchange", of `first` rows, groups pair up, the first with the last: neighbours may share a host, and their
        link would be the faster one.
        """
        asked = 0
        for place in self._places:
            message = MeasureRank(kind, first, second, repeats)
            if kind == "exchange":
                other = self.layout.kvp - 1 - place.group
                if other == place.group:
                    continue
                message = MeasureRank("ask" if place.group < other else "visit", first, other, repeats)
            self._send(place.rank, message)
            asked += 1
        slowest = 0.0
        for _ in range(asked):
            received = self._transport.receive(None)
            assert received is not None
            rank, frames = received
            reply = _decoder.decode(frames[0])
            if not isinstance(reply, MeasuredSeconds):
                raise RankLostError(rank, f"answered a measurement with {reply!r}")
            slowest = max(slowest, reply.seconds)
        return slowest

    # -- messages from ranks -----------------------------------------------------------------------------------------

    def _on_message(self, rank: int, frames: list[bytes]) -> None:
        message = _decoder.decode(frames[0])
        place = self._places[rank]
        group = self._groups[place.group]
        if isinstance(message, PlanDone):
            group.record_done(place, message, 0.0 if self.hosts is None else self.hosts.ahead_s(rank))
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


# Ranks as processes: started by forkserver with torch preloaded, connected over ZeroMQ. No torch here.
#
# The forkserver imports once and each rank is a fork of it, so that ten ranks start nearly as quickly as one.

_GRACE_S = 3.0
"""How long `close` waits for ranks to stop before it kills them."""
_LOOK_S = 0.5
"""Interval between two checks for silent ranks."""


class ProcessTransport:
    """The engine's end to the ranks of a layout, started at construction and ready after `start`.

    Messages to one rank arrive in order, and so do those from one rank.

    hosts: launches the ranks that run on other hosts. Each rank sends heartbeats from a separate thread; one that hangs
    or is cut off counts as lost after `config.timeout_s`.
    """

    def __init__(self, config: RankConfig, hosts: RayHosts | None = None) -> None:
        self._folder = ScratchFolder("headway-ranks-")
        self._directory = self._folder.path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # Sending to a rank without a connection is an error, not a silent drop.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that was cut off may be back before that is noticed
        if hosts is None:
            endpoint = f"ipc://{self._directory}/ranks"
            self._socket.bind(endpoint)
        else:
            endpoint = hosts.open(self._socket)
        settings = msgspec.json.encode(config)
        self.processes: list[ProcessHandle] = []
        self._hellos: dict[int, RankHello] = {}
        self._poller = zmq.Poller()
        for rank in range(config.engine.layout.accelerators):
            remote = None if hosts is None else hosts.launch(rank, endpoint, settings, RANK)
            self.processes.append(RankProcess(rank, endpoint, settings) if remote is None else remote)
        for readable in self.waits_on:
            self._poller.register(readable, zmq.POLLIN)
        self._timeout_s = config.timeout_s
        self._starved = StarvationCheck()
        self._pulse = HeartbeatMonitor(
            range(len(self.processes)), config.start_timeout_s, time.monotonic(), self._local_pid
        )

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """Sockets and file descriptors for a `zmq.Poller`: readable when `receive` has something, or a rank is gone."""
        return (self._socket, *(process.sentinel for process in self.processes))

    def start(self, timeout_s: float | None = None) -> list[LoadedRank] | None:
        """Wait until all ranks have connected and loaded. Returns their reports, by rank; None: not in `timeout_s`, and
        it is to be called again.

        Raises ConfigError, with the rank's own message, when one cannot start.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        loaded: list[LoadedRank] = []
        try:
            while len(loaded) < len(self.processes):
                message = self.receive(None if until is None else max(0.0, until - time.monotonic()))
                if message is None:
                    return None
                self._greet(*message)
                loaded = [hello.loaded for _, hello in sorted(self._hellos.items()) if hello.loaded is not None]
            if len({one.mark for one in loaded}) > 1:
                raise ConfigError("the workers have loaded different checkpoints: " + ", ".join(r.mark for r in loaded))
        except RankLostError as error:
            self.close()
            raise ConfigError(
                f"{error} while starting (its log says more; out of memory ends with signal 9)"
            ) from error
        except BaseException:
            self.close()
            raise
        # Until here the longer start time-out applied.
        self._pulse.timeout_s = self._timeout_s
        return loaded

    def _greet(self, rank: int, frames: list[bytes]) -> None:
        """Take a message of a rank that starts. Once all have connected, welcome them. Raises ConfigError."""
        try:
            hello = _decoder.decode(frames[0])
        except msgspec.ValidationError as error:
            raise ConfigError(f"worker {rank} is of another version than this engine's: {error}") from None
        if isinstance(hello, FatalError):
            raise ConfigError(hello.error if hello.final else f"worker {rank} failed while starting: {hello.error}")
        if not isinstance(hello, RankHello):
            raise ConfigError(f"worker {rank} sent {hello!r} while starting")
        if hello.version != __version__:
            raise ConfigError(f"worker {rank} is of version {hello.version}, the engine of {__version__}")
        self._hellos[rank] = hello
        if hello.loaded is None and len(self._hellos) == len(self.processes):
            for each in self._hellos:
                self.send(each, (_encoder.encode(RankWelcome(self._hellos[0].store_port)),))

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """Send one message. Never blocks. Raises RankLostError."""
        try:
            self._socket.send_multipart([b"%d" % rank, *frames], copy=False)
        except zmq.ZMQError as error:
            self.processes[rank].join(1.0)  # its connection ends a moment before it does
            self._check_ended()
            raise RankLostError(rank, f"cannot be reached ({error})") from error

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        """Return (rank, frames) of the next message; None when none comes in time. Raises RankLostError, behind the
        messages that the rank sent before it ended."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                # A rank has up to three connections; any message on any of them counts as a sign of life.
                rank = int(name.removeprefix(HEARTBEAT_IDENTITY).removeprefix(CONTROL_IDENTITY))
                self._pulse.record_beat(rank, time.monotonic())
                if not name.startswith(HEARTBEAT_IDENTITY):
                    return rank, frames
                continue
            except zmq.Again:
                self._check_silence()
            left_s = _LOOK_S if until is None else max(0.0, min(_LOOK_S, until - time.monotonic()))
            ready = dict(self._poller.poll(round(left_s * 1000.0)))
            # Only with an empty socket: what a rank sent before it ended is delivered first.
            if self._socket not in ready:
                self._check_ended()
                if until is not None and time.monotonic() >= until:
                    return None

    def starved(self, rank: int, limit_s: float, now: float) -> bool:
        """Whether a rank that has missed a time limit waits for a core (`StarvationCheck`)."""
        return self._starved.excuses(self._local_pid(rank), limit_s, now)

    def kill(self) -> None:
        """Kill all ranks at once, and wait until they are gone."""
        for process in self.processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """Send all ranks `EndProcess`, kill those that do not end, and wait until they are gone. May be called
        repeatedly."""
        if self._socket.closed:
            return
        for rank, process in enumerate(self.processes):
            if process.ended is None:
                try:
                    self._socket.send_multipart([b"%d" % rank, _encoder.encode(EndProcess())])
                except zmq.ZMQError:
                    process.kill()
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.ended is None:
                process.kill()
                process.join()
        self._socket.close()
        self._context.destroy(linger=0)
        self._folder.close()

    def _local_pid(self, rank: int) -> int | None:
        return self.processes[rank].local_pid

    def _check_ended(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.ended is not None:
                raise RankLostError(rank, process.ended)

    def _check_silence(self) -> None:
        silent = self._pulse.silent(time.monotonic())
        if silent is not None:
            raise RankLostError(silent, f"sent no heartbeat for {self._pulse.timeout_s:g} s: it hangs or is cut off")
