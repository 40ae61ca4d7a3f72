"""A rank's loop: plans in, what it did out. Takes plans early, so that what they wait for is asked for in time."""

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
    """Drives one worker by the engine's plan stream until told to stop.

    A plan is replayed and its checksum compared before anything is computed. When it does not follow from what this
    rank knows, the rank stops there, says so, and goes on from the snapshot that it gets. `kv`: who moves KV to and
    from other instances, if somebody does.
    """

    def __init__(self, worker: ModelWorker, channel: RankChannel, kv: RankKvTransfer | None = None) -> None:
        self._worker = worker
        self._channel = channel
        self._kv = kv
        self._asides: deque[ControlMessage] = deque()
        self._admitted: dict[int, int] = {}
        self._state = StreamState(worker.tables)
        self._queue: deque[tuple[BatchPlan, GroupBatch]] = deque()
        self._heard = self._asked = self._done = self._followed = 0
        self._halted = self.stopped = False
        if kv is not None:
            kv.runs.loop = self

    def serve(self) -> None:
        """Return when told to stop. Raises what the worker raises."""
        while not self.stopped:
            self.turn()

    def turn(self) -> None:
        """Take the next message, or carry out the next plan; waits for one. A run calls it where all ranks of the
        instance do, and may have begun with words behind its own that have come already."""
        if self._due:
            self._attend()
            return
        frames = self._channel.receive(wait=not self._queue)
        if frames is not None:
            self._hear(_decoder.decode(frames[0]), frames[1:])
        elif self._queue:
            self._carry_out(*self._queue.popleft())
        self._attend()

    def glance(self) -> None:
        """From within a run: take what has come, and carry out plans up to one that computes, in which other ranks
        would be waited for."""
        while not self.stopped and (frames := self._channel.receive(wait=False)) is not None:
            self._hear(_decoder.decode(frames[0]), frames[1:])
        self._attend()
        while self._queue and not (self._queue[0][1].tokens or self._queue[0][1].assists or self._leaves):
            self._carry_out(*self._queue.popleft())
            self._attend()

    @property
    def _leaves(self) -> bool:
        """Whether the run under way is to end: what comes behind that word waits until it has."""
        return self._kv is not None and self._kv.runs.over

    def _hear(self, message: ToRank, frames: list[memoryview]) -> None:
        if isinstance(message, BatchPlan):
            self._take(message)
        elif isinstance(message, AdmitToRank):
            prompt = frames[0] if message.has_prompt else None
            name = str(message.request)
            self._admitted[message.request] = self._heard
            self._worker.admit(name, message.prompt_tokens, prompt, message.params, message.output)
        elif isinstance(message, GroupSnapshot):
            self._restore(message)
        elif isinstance(message, RankProbe):
            self._answer(message)
        elif isinstance(message, MeasureRequest):
            seconds = measure(self._worker, message.kind, message.first, message.second, message.repeats)
            self._say(MeasureResult(seconds))
        elif isinstance(message, ControlMessage):
            self._asides.append(message)
        elif isinstance(message, StopRank):
            self.stopped = True
        else:
            raise InvariantError(f"the engine says {message!r} to a rank that is at work")

    def _take(self, plan: BatchPlan) -> None:
        """A plan has come: make a part of it, and ask for the rows that it will need."""
        if self._halted:
            return
        if plan.seq != self._heard + 1:
            self._halt(plan.seq, f"plan {plan.seq} came after plan {self._heard}")
            return
        try:
            part = self._state.part_of(plan)
        except (KeyError, ValueError) as error:
            self._halt(plan.seq, f"plan {plan.seq} does not follow from what is known here: {error}")
            return
        self._heard = plan.seq
        if plan.seq > self._asked:
            self._asked = plan.seq
            self._worker.expect(part)
        self._queue.append((plan, part))

    def _answer(self, probe: RankProbe) -> None:
        """Still here. Should the newest plan have got lost, nothing that follows would tell."""
        self._say(RankAlive(self._done))
        if not self._halted and self._heard < probe.seq:
            self._halt(probe.seq, f"plan {probe.seq} was sent, and {self._heard} was the last to come")

    def _carry_out(self, plan: BatchPlan, part: GroupBatch) -> None:
        worker, state = self._worker, self._state
        try:
            runs = worker.replay(part.kv_ops)
            for number, known, tokens in plan.told:
                worker.hear(str(number), known, tokens)
            check = state.advance(runs, worker.kv_sum(part.decodes))
        except (InvariantError, KeyError) as error:
            self._halt(plan.seq, f"plan {plan.seq} cannot be replayed: {error}")
            return
        if check != plan.check:
            self._halt(
                plan.seq, f"the state's checksum after plan {plan.seq} is {plan.check:08x}, and here {check:08x}"
            )
            return
        self._followed = plan.seq
        for request in plan.forget:
            if plan.seq > self._admitted.get(request, 0):  # else it is in use again, and this was of who had it before
                worker.forget(str(request))
                self._admitted.pop(request, None)
        if plan.seq <= self._done:
            worker.skip(part)
            return
        asks = tuple((group, tuple(map(str, numbers))) for group, numbers in plan.asks)
        emitted = worker.run(part, asks)
        self._done = plan.seq
        if self._kv is not None:
            self._kv.computed(part)
        logprobs = tuple(one.logprobs for one in emitted)
        tokens = tuple(one.token for one in emitted)
        reported = logprobs if any(one is not None for one in logprobs) else ()
        self._say(PlanDone(plan.seq, worker.began_s, time.monotonic(), tokens, reported))

    def _attend(self) -> None:
        """What concerns KV that moves, as far as the plans before it have been followed."""
        while self._kv is not None and self._due:
            self._kv.hear(self._asides.popleft().body)

    @property
    def _due(self) -> bool:
        return bool(self._asides) and self._asides[0].after <= self._followed and not self._leaves

    def _halt(self, seq: int, why: str) -> None:
        self._queue.clear()
        self._halted = True
        self._say(PlanDesync(seq, self._done, why))

    def _restore(self, snapshot: GroupSnapshot) -> None:
        """Begin again behind `snapshot.seq`; plans up to the last one that was carried out only move cursors."""
        held = {str(request): runs for request, _, runs, _ in snapshot.requests if runs}
        bases = {str(request): base for request, _, _, base in snapshot.requests if base}
        tables = BlockTables.of(self._worker.tables.allocator.n_blocks, held)
        self._worker.restore(
            tables, {str(request): known for request, known, _, _ in snapshot.requests if known}, bases
        )
        self._state = StreamState(tables, snapshot.said, snapshot.check)
        for epoch, members in snapshot.groups:
            self._state.epochs.use(epoch, tuple(map(str, members)))
        self._heard = self._followed = snapshot.seq
        self._halted = False

    def _say(self, message: FromRank) -> None:
        self._channel.send(_encoder.encode(message))


def failure(error: BaseException) -> RankFailed:
    """An error as the engine is told of it."""
    return RankFailed(f"{type(error).__name__}: {error}")
