"""A rank's message loop: receives plans, carries them out, reports. Receives for queued plans are posted early."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from headway.core.batch import GroupBatch
from headway.core.errors import InvariantError
from headway.kv.block_allocator import BlockTables
from headway.runtime.executor.measure import measure
from headway.runtime.executor.messages import (
    AdmitToRank,
    BatchPlan,
    ControlMessage,
    FromRank,
    GroupSnapshot,
    MeasureRequest,
    MeasureResult,
    PlanDesync,
    PlanDone,
    RankAlive,
    RankFailed,
    RankProbe,
    StopRank,
    ToRank,
)
from headway.runtime.executor.plan_stream import StreamState
from headway.runtime.executor.rank_transport import RankChannel
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.rank_transfer import RankKvTransfer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class RankLoop:
    """Drives one worker by the engine's plan stream until `StopRank`.

    A plan is replayed and its checksums compared before anything is computed. When it does not follow from this rank's
    state, the rank stops there, sends `PlanDesync`, and continues from the `GroupSnapshot` sent in reply. kv: moves KV
    to and from other instances; None where KV does not move.
    """

    def __init__(self, worker: ModelWorker, channel: RankChannel, kv: RankKvTransfer | None = None) -> None:
        self._worker = worker
        self._channel = channel
        self._kv = kv
        self._control_messages: deque[ControlMessage] = deque()
        self._admitted: dict[int, int] = {}
        self._state = StreamState(worker.tables)
        self._queue: deque[tuple[BatchPlan, GroupBatch]] = deque()
        self._received_seq = self._expected_seq = self._computed_seq = self._replayed_seq = 0
        self._desynced = self.stopped = False
        if kv is not None:
            kv.runs.loop = self

    def serve(self) -> None:
        """Run until `StopRank`. Raises what the worker raises."""
        while not self.stopped:
            self.step()

    def step(self) -> None:
        """Process the next message or carry out the next plan; blocks while there is neither.

        Also called from within a span, at points that all ranks of the instance reach.
        """
        # Control messages are ordered with plans: this one precedes the plans that were sent behind it.
        if self._control_is_due:
            self._take_control_messages()
            return
        frames = self._channel.receive(wait=not self._queue)
        if frames is not None:
            self._on_message(_decoder.decode(frames[0]), frames[1:])
        elif self._queue:
            self._carry_out(*self._queue.popleft())
        self._take_control_messages()

    def poll(self) -> None:
        """Process messages that have arrived, and carry out plans up to the first that computes. Never blocks.

        Called from within a span. A plan that computes would wait for other ranks, which may still be in the span.
        """
        while not self.stopped and (frames := self._channel.receive(wait=False)) is not None:
            self._on_message(_decoder.decode(frames[0]), frames[1:])
        self._take_control_messages()
        # Plans without rows only replay block operations, which never wait for other ranks.
        while self._queue and not (self._queue[0][1].tokens or self._queue[0][1].assists or self._span_is_ending):
            self._carry_out(*self._queue.popleft())
            self._take_control_messages()

    @property
    def _span_is_ending(self) -> bool:
        """Whether the span under way is to end: later messages are deferred until it has ended."""
        return self._kv is not None and self._kv.runs.over

    def _on_message(self, message: ToRank, frames: list[memoryview]) -> None:
        if isinstance(message, BatchPlan):
            self._enqueue(message)
        elif isinstance(message, AdmitToRank):
            prompt = frames[0] if message.has_prompt else None
            name = str(message.request)
            self._admitted[message.request] = self._received_seq
            self._worker.admit(name, message.prompt_tokens, prompt, message.params, message.output)
        elif isinstance(message, GroupSnapshot):
            self._restore(message)
        elif isinstance(message, RankProbe):
            self._answer_probe(message)
        elif isinstance(message, MeasureRequest):
            seconds = measure(self._worker, message.kind, message.first, message.second, message.repeats)
            self._send(MeasureResult(seconds))
        elif isinstance(message, ControlMessage):
            self._control_messages.append(message)
        elif isinstance(message, StopRank):
            self.stopped = True
        else:
            raise InvariantError(f"the engine says {message!r} to a rank that is at work")

    def _enqueue(self, plan: BatchPlan) -> None:
        """Queue a received plan, and post the receives for the rows that it needs."""
        if self._desynced:
            return
        # Plans in flight behind a lost one arrive first: they are dropped above until the snapshot has come.
        if plan.seq != self._received_seq + 1:
            self._desync(plan.seq, f"plan {plan.seq} came after plan {self._received_seq}")
            return
        try:
            part = self._state.part_of(plan)
        except (KeyError, ValueError) as error:
            self._desync(plan.seq, f"plan {plan.seq} does not follow from what is known here: {error}")
            return
        self._received_seq = plan.seq
        # After a resync, plans come again whose receives are posted already: a second receive would take a later plan's
        # rows.
        if plan.seq > self._expected_seq:
            self._expected_seq = plan.seq
            self._worker.expect(part)
        self._queue.append((plan, part))

    def _answer_probe(self, probe: RankProbe) -> None:
        """Answer a probe. A lost newest plan is noticed here: no later plan would show the gap."""
        self._send(RankAlive(self._computed_seq))
        if not self._desynced and self._received_seq < probe.seq:
            self._desync(probe.seq, f"plan {probe.seq} was sent, and {self._received_seq} was the last to come")

    def _carry_out(self, plan: BatchPlan, part: GroupBatch) -> None:
        worker, state = self._worker, self._state
        try:
            # Blocks first, then foreign tokens: both count in the checksum that is compared before anything is
            # computed.
            runs = worker.replay(part.kv_ops)
            for number, known, tokens in plan.foreign_tokens:
                worker.learn_tokens(str(number), known, tokens)
            check = state.advance(runs, worker.kv_sum(part.decodes))
        except (InvariantError, KeyError) as error:
            self._desync(plan.seq, f"plan {plan.seq} cannot be replayed: {error}")
            return
        if check != plan.state_checksum:
            self._desync(
                plan.seq,
                f"the state's checksum after plan {plan.seq} is {plan.state_checksum:08x}, and here {check:08x}",
            )
            return
        self._replayed_seq = plan.seq
        for request in plan.forget:
            # A request that was admitted behind this plan has the number of the one that ended.
            if plan.seq > self._admitted.get(request, 0):
                worker.forget(str(request))
                self._admitted.pop(request, None)
        # Sent again after a snapshot, but computed here before: its messages to other ranks must not be sent twice.
        if plan.seq <= self._computed_seq:
            worker.skip(part)
            return
        query_targets = tuple((group, tuple(map(str, numbers))) for group, numbers in plan.query_targets)
        emitted = worker.run(part, query_targets)
        self._computed_seq = plan.seq
        if self._kv is not None:
            self._kv.computed(part)
        logprobs = tuple(one.logprobs for one in emitted)
        tokens = tuple(one.token for one in emitted)
        # An empty tuple stands for no log-probabilities at all: most plans need none on the wire.
        reported = logprobs if any(one is not None for one in logprobs) else ()
        self._send(PlanDone(plan.seq, worker.began_s, time.monotonic(), tokens, reported))

    def _take_control_messages(self) -> None:
        """Process control messages of KV transfers whose preceding plans have been replayed."""
        while self._kv is not None and self._control_is_due:
            self._kv.on_message(self._control_messages.popleft().body)

    @property
    def _control_is_due(self) -> bool:
        waiting = self._control_messages
        return bool(waiting) and waiting[0].after <= self._replayed_seq and not self._span_is_ending

    def _desync(self, seq: int, why: str) -> None:
        # Queued plans are sent again behind the snapshot.
        self._queue.clear()
        self._desynced = True
        self._send(PlanDesync(seq, self._computed_seq, why))

    def _restore(self, snapshot: GroupSnapshot) -> None:
        """Start over after plan `snapshot.seq`. Plans computed here before only move cursors when sent again."""
        held = {str(request): runs for request, _, runs, _ in snapshot.requests if runs}
        bases = {str(request): base for request, _, _, base in snapshot.requests if base}
        tables = BlockTables.of(self._worker.tables.allocator.n_blocks, held)
        self._worker.restore(
            tables, {str(request): known for request, known, _, _ in snapshot.requests if known}, bases
        )
        # The worker and the stream share one copy of the tables.
        self._state = StreamState(tables, snapshot.plans_checksum, snapshot.state_checksum)
        for epoch, members in snapshot.groups:
            self._state.epochs.use(epoch, tuple(map(str, members)))
        self._received_seq = self._replayed_seq = snapshot.seq
        self._desynced = False

    def _send(self, message: FromRank) -> None:
        self._channel.send(_encoder.encode(message))


def failure(error: BaseException) -> RankFailed:
    """Return the message that reports an error to the engine."""
    return RankFailed(f"{type(error).__name__}: {error}")
