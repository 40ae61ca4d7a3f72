"""A rank's message loop: receives plans, carries them out, reports. Receives for queued plans are posted early."""

from __future__ import annotations

import time
from collections import deque

import msgspec

from headway.core.batch import GroupBatch
from headway.core.errors import InvariantError
from headway.runtime.engine.protocol import EndProcess, FatalError, SubmitRequest
from headway.runtime.executor.measure import measure
from headway.runtime.executor.messages import (
    BatchPlan,
    FromRank,
    InstanceToRank,
    PlanDone,
    RankQuery,
    ToRank,
)
from headway.runtime.executor.plan_stream import PlanReader
from headway.runtime.executor.rank_transport import RankChannel
from headway.runtime.executor.worker import ModelWorker
from headway.runtime.kv_transfer.rank_transfer import RankKvTransfer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class RankLoop:
    """Drives one worker by the engine's plan stream until `EndProcess`.

    A rank that has missed a plan fails, and the engine starts its ranks again. kv: moves KV to and from other
    instances; None where KV does not move.
    """

    def __init__(self, worker: ModelWorker, channel: RankChannel, kv: RankKvTransfer | None = None) -> None:
        self._worker = worker
        self._channel = channel
        self._kv = kv
        # With the plan that each follows, and the frame behind it.
        self._control_messages: deque[tuple[int, InstanceToRank, memoryview | None]] = deque()
        self._admitted: dict[int, int] = {}
        self._plans = PlanReader()
        self._queue: deque[tuple[BatchPlan, GroupBatch]] = deque()
        self._computed_seq = self._replayed_seq = 0
        self.stopped = False
        if kv is not None:
            kv.runs.loop = self

    def serve(self) -> None:
        """Run until `EndProcess`. Raises what the worker raises."""
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
        elif isinstance(message, SubmitRequest) and message.phase != "spans":
            self._admitted[int(message.id)] = self._plans.seq
            prompt = frames[0] if frames else None
            self._worker.admit(message.id, message.prompt_tokens, prompt, message.params, message.output)
        elif isinstance(message, RankQuery):
            self._send(PlanDone(self._computed_seq, measured_s=self._answer(message)))
        elif isinstance(message, EndProcess):
            self.stopped = True
        elif isinstance(message, InstanceToRank):
            self._control_messages.append((self._plans.seq, message, frames[0] if frames else None))
        else:
            raise InvariantError(f"the engine says {message!r} to a rank that is at work")

    def _enqueue(self, plan: BatchPlan) -> None:
        """Queue a received plan, and post the receives for the rows that it needs."""
        part = self._plans.part_of(plan)
        self._worker.expect(part)
        self._queue.append((plan, part))

    def _answer(self, query: RankQuery) -> float:
        """Return the answer to a query. A lost newest plan is noticed here: no later plan would show the gap."""
        if query.kind != "plans":
            return measure(self._worker, query.kind, query.first, query.second, query.repeats)
        if self._plans.seq < query.first:
            raise InvariantError(f"plan {query.first} was sent, and {self._plans.seq} was the last to come")
        return 0.0

    def _carry_out(self, plan: BatchPlan, part: GroupBatch) -> None:
        worker = self._worker
        worker.replay(part.kv_ops)
        for number, known, tokens in plan.foreign_tokens:
            worker.learn_tokens(str(number), known, tokens)
        self._replayed_seq = plan.seq
        for request in plan.forget:
            # A request that was admitted behind this plan has the number of the one that ended.
            if plan.seq > self._admitted.get(request, 0):
                worker.forget(str(request))
                self._admitted.pop(request, None)
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
            _, message, frame = self._control_messages.popleft()
            self._kv.on_message(message, frame)

    @property
    def _control_is_due(self) -> bool:
        waiting = self._control_messages
        return bool(waiting) and waiting[0][0] <= self._replayed_seq and not self._span_is_ending

    def _send(self, message: FromRank) -> None:
        self._channel.send(_encoder.encode(message))


def failure(error: BaseException) -> FatalError:
    """Return the message that reports an error to the engine."""
    return FatalError(f"{type(error).__name__}: {error}", final=False)
