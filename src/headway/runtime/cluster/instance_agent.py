"""The part of an engine that makes it an instance of a cluster: spans computed with other instances, beside its
scheduler.

The companion of `EngineCore`, driven by the same loop. A run is computed in `work`, in the loop's own thread; from
inside it the loop is called back: between layers and, every so often, within them and while others are waited for. So
messages are heard (KV that is asked for goes), and between layers the scheduler's iterations go on where the run allows
that. No torch here: `SpanExecution` does the computing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from headway.core.clock import ClockProtocol
from headway.core.errors import HeadwayError
from headway.core.executor import EmittedToken
from headway.core.sampling import SamplingParams
from headway.kv.staged_kv import StagedKv, runs_of
from headway.runtime.cluster.messages import (
    AdmitRequest,
    ComputeSpan,
    ForgetRequest,
    FromInstance,
    HaltDecode,
    KvReserved,
    MeetPeers,
    PauseSpan,
    PeerAddress,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTask,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    ToInstance,
)
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.output_tracker import OutputTracker
from headway.runtime.engine.protocol import SubmitRequest
from headway.runtime.kv_transfer.ends import instance_of
from headway.runtime.kv_transfer.peer import PeerLostError

log = logging.getLogger("headway.engine")

_NAP_S = 0.005
_LOOK_S = 0.002
Slots = Sequence[tuple[int, int]]


class _SavedBytes(Protocol):
    @property
    def kv_bytes(self) -> int: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def kv_bytes_at_end(self) -> int: ...


class SpanExecution(Protocol):
    """What computes spans: `runtime.sequence_parallel.span_executor.SpanExecutor`, or, for several ranks,
    `runtime.sequence_parallel.multi_rank_span_executor.MultiRankSpanExecutor`."""

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None: ...

    def begin(
        self,
        name: str,
        run: SpanTask,
        before: Sequence[SpanTask],
        preemptible: bool,
        drawn: tuple[int, ...],
        room: Callable[[int, bool], Slots],
        look: Callable[[], None],
    ) -> None: ...

    def go(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None], beside: bool) -> bool: ...

    def finish(self, name: str, draw: bool) -> tuple[EmittedToken | None, bool]: ...

    def saved(self, name: str) -> tuple[int, int, _SavedBytes]: ...

    def whole(self, name: str, tokens: int) -> bool: ...

    def check(self, name: str) -> None: ...

    def forget(self, name: str) -> None: ...

    def __contains__(self, name: str) -> bool: ...


class KvTransferManager(Protocol):
    """What moves KV between instances (`runtime.kv_transfer.connector`).

    All is called in the loop's thread.
    """

    def take(self, message: ReserveKv | SendKv) -> None:
        """The router asks for it."""

    def granted(self, name: str) -> None:
        """Custody has given what was asked for under a name."""

    def settle(self, name: str) -> None:
        """KV of a request that lies here is about to be overwritten by another run, or given back."""

    def behind(self, name: str, layers: int) -> None:
        """So many layers of a run under way are done here."""

    def finished(self, name: str) -> None:
        """A run is done here; its KV stays."""

    def turn(self) -> list[FromInstance]:
        """Once in every turn of the loop: what there is to tell."""

    def forget(self, name: str) -> None:
        """Nothing of a request is to be sent or received any more. Before its KV is given back."""


class PeerTable(Protocol):
    """The other instances: `runtime.kv_transfer.peers.PeerNetwork`, or `MultiRankPeers` for several ranks. `number`:
    this instance's."""

    @property
    def number(self) -> int: ...

    def meet(self, peers: Iterable[PeerAddress]) -> None: ...

    def forget(self, scope: str) -> None: ...

    def cease(self, scope: str) -> None: ...


class EngineLoop(Protocol):
    """The engine's loop, as it may be called from inside a span."""

    def send(self, message: FromInstance, measured: bool = False) -> None:
        """Send a message; measured: behind figures of what the pool holds now."""

    def turn(self, step: bool, wait_s: float = 0.0) -> None:
        """Take in messages (waiting for one for so long) and tell what there is; step: the scheduler's as well."""


class _EndedError(Exception):
    """The run under way is to end, and nobody waits for a word of it."""


class _AgentRequest(NamedTuple):
    admit: AdmitRequest
    live: OutputTracker


class _SpanJob:
    """A run from `ComputeSpan` until it is done. grew: it was, and holds more KV than a token's."""

    __slots__ = ("began_s", "begun", "compute", "forgotten", "grew", "pause")

    def __init__(self, compute: ComputeSpan) -> None:
        self.compute = compute
        self.begun = self.pause = self.forgotten = self.grew = False
        self.began_s = 0.0


class InstanceAgent:
    """The agent of one engine.

    `room_s`: how long a run waits for room in the pool.

    Runs are carried out one at a time, in the order in which `ComputeSpan` and `ResumeSpan` come; the router sends them
    to all of a group in the same order, which is why groups that overlap do not wait for each other.
    """

    def __init__(
        self,
        core: EngineCore,
        computes: SpanExecution,
        peers: PeerTable,
        clock: ClockProtocol,
        room_s: float,
        moves: KvTransferManager | None = None,
    ) -> None:
        custody = core.scheduler.custody
        assert custody is not None, "an instance of several KV groups takes no part in runs"
        self._core, self._computes, self._peers, self._clock = core, computes, peers, clock
        self._custody: StagedKv = custody
        self._ledger = core.scheduler.ledgers[0]
        self._room_s, self._moves = room_s, moves
        self._requests: dict[str, _AgentRequest] = {}
        self._jobs: dict[str, _SpanJob] = {}
        self._places: dict[str, list[str]] = {}
        self._asked: set[str] = set()
        self._line: deque[_SpanJob] = deque()
        self._looked_s = float("-inf")

    @property
    def idle(self) -> bool:
        """Whether there is no run to be carried out now."""
        return not self._line

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self, message: ToInstance, prompt: memoryview | None) -> None:
        """A message of the router's. `prompt`: the frame behind `AdmitRequest`. Ids that are unknown are ignored."""
        if isinstance(message, MeetPeers):
            self._peers.meet(message.peers)
        elif isinstance(message, AdmitRequest):
            assert prompt is not None
            self._admit(message, prompt)
        elif isinstance(message, ComputeSpan):
            if message.id in self._requests:
                self._line.append(_SpanJob(message))
                self._jobs.setdefault(message.id, self._line[-1])
        elif isinstance(message, PauseSpan):
            if message.id in self._jobs:
                self._jobs[message.id].pause = True
        elif isinstance(message, ResumeSpan):
            if message.id in self._jobs:
                self._jobs[message.id].pause = False  # one that came too late meant what is paused already
                self._line.append(self._jobs[message.id])
        elif isinstance(message, ForgetRequest):
            self.forget(message.id, message.for_good)
        elif isinstance(message, HaltDecode):
            self._core.stage(message.id)
        elif self._moves is not None:
            self._moves.take(message)

    def submitted(self, submit: SubmitRequest) -> None:
        """A request is about to be given to the scheduler: where it decodes with KV of runs, that becomes its own."""
        if submit.phase != "decode" or submit.id not in self._requests:
            return
        name = submit.id
        known = submit.prompt_tokens + len(submit.output)
        if self._computes.whole(name, known - 1) and self._places.get(name) == [runs_of(name)]:
            self._custody.to_request(name)
        self._give_back(name)
        self._drop(name)

    def forget(self, name: str, for_good: bool = True) -> None:
        """Drop all that is here of a request, its stay in the scheduler included. One that is being computed ends as
        soon as the computation asks. for_good: see the message."""
        if name in self._jobs:
            for job in (self._jobs[name], *self._line):
                job.forgotten = job.forgotten or job.compute.id == name
        self._core.abort(name)
        if for_good:
            self._peers.forget(name)
        if self._moves is not None:
            self._moves.forget(name)
        if not for_good:
            self._peers.cease(name)
        self._give_back(name)
        self._custody.release(name)
        self._drop(name)

    def turn(self, loop: EngineLoop) -> None:
        """In every turn of the loop: room for those who wait, and word of KV that has moved."""
        if self._custody.waiting:
            for name in self._custody.admit():
                if self._moves is not None and name not in self._asked:
                    self._moves.granted(name)
        if self._moves is not None:
            for message in self._moves.turn():
                loop.send(message, measured=isinstance(message, KvReserved))

    def _admit(self, admit: AdmitRequest, prompt: memoryview) -> None:
        info = self._core.info
        if admit.id in self._requests:
            return
        if prompt.nbytes != 4 * admit.prompt_tokens:
            log.error("%s: %d bytes came for %d tokens", admit.id, prompt.nbytes, admit.prompt_tokens)
            return
        ids = np.frombuffer(prompt, dtype=np.int32)
        if ids.size == 0 or int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
            log.error("%s: token ids must be between 0 and %d", admit.id, info.vocab_size - 1)
            return
        room = info.max_model_len - admit.prompt_tokens
        live = OutputTracker(admit.params, len(admit.output), room, info.eos_token_ids)
        self._computes.admit(admit.id, prompt, admit.params, admit.output)
        self._requests[admit.id] = _AgentRequest(admit, live)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def work(self, loop: EngineLoop) -> None:
        """Carry out the next run, if there is one: until it is done, paused, lost or forgotten. Who hears that a span
        is done decides at once where its KV has room, so what is free is said before."""
        if not self._line:
            return
        job = self._line.popleft()
        name = job.compute.id
        if job.forgotten:
            return
        try:
            word = self._done(job) if self._carry_out(job, loop) else self._paused(job)
        except _EndedError:
            return
        except PeerLostError as error:
            self._lose(name, str(error), loop, None if error.end is None else instance_of(error.end))
            return
        except HeadwayError as error:
            self._lose(name, str(error), loop)
            return
        except Exception as error:
            log.exception("a run of %s failed", name)
            self._lose(name, f"it failed: {error}", loop, self._peers.number)
            return
        loop.send(word, measured=job.grew)

    def _carry_out(self, job: _SpanJob, loop: EngineLoop) -> bool:
        compute, name = job.compute, job.compute.id
        beside = compute.beside

        def look() -> None:
            now = self._clock.now()
            if now - self._looked_s < _LOOK_S:
                return
            self._looked_s = now
            loop.turn(False)
            if job.forgotten:
                raise _EndedError
            self._computes.check(name)

        def room(tokens: int, anew: bool) -> Slots:
            return self._room(job, tokens, anew, loop)

        def behind(layers: int) -> None:
            if self._moves is not None:
                self._moves.behind(name, layers)
            loop.turn(beside)
            self._looked_s = self._clock.now()
            if job.forgotten:
                raise _EndedError
            self._computes.check(name)

        if not job.begun:
            job.began_s = self._clock.now()
            if self._moves is not None:
                self._moves.settle(name)
            if compute.home == self._peers.number:
                self._take_up(name)
            live = self._requests[name].live
            if live.first_scheduled_s is None:
                live.first_scheduled_s = job.began_s
            self._computes.begin(name, compute.run, compute.before, compute.preemptible, compute.drawn, room, look)
            job.begun = True
        return self._computes.go(name, lambda: job.pause, behind, beside)

    def _take_up(self, name: str) -> None:
        """What a scheduler has left here is the run's."""
        if name in self._places or not self._custody.to_span(name):
            raise HeadwayError("its KV is not here")
        self._places[name] = [runs_of(name)]
        self._asked.add(runs_of(name))

    def _room(self, job: _SpanJob, tokens: int, anew: bool, loop: EngineLoop) -> Slots:
        """Slots of the pool for a run that is about to begin, of this request's own place or of another one. The
        scheduler goes on while there are none."""
        name, custody = job.compute.id, self._custody
        places = self._places.setdefault(name, [])
        if anew or not places:
            places.append(f"{runs_of(name)}/{job.compute.index}" if anew else runs_of(name))
        place = places[-1]
        custody.request(place, tokens, self._clock.now())
        self._asked.add(place)
        until_s = self._clock.now() + self._room_s
        self.turn(loop)
        while custody.waits(place):
            if self._clock.now() > until_s:
                raise HeadwayError(f"no room for {tokens} tokens of KV within {self._room_s:g} s")
            loop.turn(True, _NAP_S)
            if job.forgotten:
                raise _EndedError
        lease = custody.lease(place)
        assert lease is not None
        block = self._ledger.block_tokens
        return [(first * block, count * block) for first, count in self._ledger.runs(lease)]

    def _done(self, job: _SpanJob) -> SpanTaskDone:
        compute, name = job.compute, job.compute.id
        emitted, moved = self._computes.finish(name, compute.last)
        del self._jobs[name]
        for other in self._line:
            if other.compute.id == name:
                self._jobs.setdefault(name, other)
        if moved:  # from the place before, whose heads were others
            if self._moves is not None:
                self._moves.settle(name)
            self._leave(self._places[name].pop(0))
        if self._moves is not None:
            self._moves.finished(name)
        run, at = compute.run, compute.run.group.index(self._peers.number)
        job.grew = moved or bool(run.keepers) or not run.in_place
        tokens, size = run.end - run.start, len(run.group)
        own = (at + 1) * tokens // size - at * tokens // size
        self._core.computed(*((0, own) if run.in_place else (own, 0)))
        now = self._clock.now()
        delta = None
        if emitted is not None:
            admit, live = self._requests[name]
            live.emitted = compute.run.end - admit.prompt_tokens
            delta = live.take(emitted, now)
        return SpanTaskDone(id=name, index=compute.index, began_s=job.began_s, ended_s=now, delta=delta)

    def _paused(self, job: _SpanJob) -> SpanTaskPaused:
        job.pause = False
        tokens, layer, saved = self._computes.saved(job.compute.id)
        return SpanTaskPaused(
            id=job.compute.id,
            index=job.compute.index,
            tokens=tokens,
            layer=layer,
            kv_bytes=saved.kv_bytes,
            activation_bytes=saved.activation_bytes,
            kv_bytes_at_end=saved.kv_bytes_at_end,
        )

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _lose(self, name: str, why: str, loop: EngineLoop, by: int | None = None) -> None:
        """A run cannot be completed. Nothing of the request is of use any more. by: see `SpanTaskLost`."""
        log.warning("a run of %s is lost: %s", name, why)
        self.forget(name)
        loop.send(SpanTaskLost(name, why, by))

    def _give_back(self, name: str) -> None:
        """The room of a request's runs."""
        for place in self._places.pop(name, ()):
            self._leave(place)

    def _leave(self, place: str) -> None:
        self._custody.release(place)
        self._asked.discard(place)

    def _drop(self, name: str) -> None:
        self._requests.pop(name, None)
        self._jobs.pop(name, None)
        self._computes.forget(name)
