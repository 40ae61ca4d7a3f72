"""The part of an engine that makes it an instance of a cluster: span tasks, what they take from the prefix cache, and
KV transfers, beside its scheduler.

Driven by the same loop as `EngineCore`. A task is computed in `work`, in the loop's own thread, and calls the loop back
between layers and, every few ms, within them and during waits for peers. So messages are handled meanwhile (requested
KV is sent), and between layers the scheduler's iterations continue where the task allows that. No torch here:
`SpanExecutor` does the computing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from headway.core.batch import ClockProtocol, KvOp
from headway.core.errors import HeadwayError, RequestError
from headway.kv.block_manager import BlockManager, KvLease
from headway.kv.staged_kv import StagedKv, span_kv_name
from headway.kv.text_keys import TextKeys
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    FromInstance,
    MeetPeers,
    PauseRequest,
    PeerLostError,
    ReserveKv,
    ResumeSpan,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
    ToInstance,
    instance_of,
)
from headway.runtime.engine.requests import OutputTracker
from headway.runtime.kv_transfer.connector import SaveKv

if TYPE_CHECKING:
    # Where the instance is several processes, its ranks compute and have the connections.
    from headway.runtime.engine.service import EngineService
    from headway.runtime.kv_transfer.multi_rank import MultiRankKvTransfer, MultiRankPeers, MultiRankSpanExecutor
    from headway.runtime.kv_transfer.peers import PeerNetwork
    from headway.runtime.kv_transfer.port import KvPort
    from headway.runtime.sequence_parallel.spans import SpanExecutor

Slots = Sequence[tuple[int, int]]
"""Slots of the KV pool, as (first, count)."""


# The scheduler's side of KV transfers: reservations for KV that will arrive, in order of request, and what has arrived
# or may be sent.
#
# The worker's side is a port. The place of a request's KV follows from
# its owner: the scheduler (as far as it has computed), `StagedKv` (all of it), or span tasks (layer by layer).

_UNTOLD = 1024
"""Number of KV operations that may wait for a batch to carry them; with more they are replayed without one."""


class KvConnectorScheduler:
    """The KV transfers of one engine. All methods are called in the loop's thread.

    `settle` finishes reading a request's KV before its slots are overwritten or freed; `layers_are_there` sends what a
    task has made available: a layer of it is computed, or all of it."""

    def __init__(
        self,
        core: EngineCore,
        port: KvPort | MultiRankKvTransfer,
        replay: Callable[[tuple[KvOp, ...]], None],
        clock: ClockProtocol,
    ) -> None:
        """replay: the executor's, for KV operations that no batch carries."""
        staged_kv = core.scheduler.staged_kv
        assert staged_kv is not None, "KV does not move between instances of several KV groups"
        self._scheduler, self._staged_kv, self._block_manager = (
            core.scheduler,
            staged_kv,
            core.scheduler.block_managers[0],
        )
        self._port, self._replay, self._clock = port, replay, clock
        self._asked: dict[str, ReserveKv] = {}
        self._words: list[FromInstance] = []
        self._came: dict[str, int] = {}
        self.settle, self.layers_are_there = port.settle, port.layers_are_there
        core.kv_incomplete = self.kv_incomplete

    def take(self, message: ReserveKv | SendKv) -> None:
        """Handle a reservation or a transfer that the controller asks for."""
        name = message.id
        # What is there already goes at once; the rest follows as `turn` and `layers_are_there` find more.
        if isinstance(message, SendKv):
            self._port.send(SaveKv(name, message.piece, message.to), message.start, message.end)
            self._advance(name)
            return
        try:
            self._staged_kv.request(name, message.tokens, self._clock.now())
            self._asked[name] = message
        except RequestError as error:
            self._words.append(SpanTaskLost(name, str(error)))

    def granted(self, name: str) -> None:
        """Open the blocks that `StagedKv` has given to a reservation."""
        self._came[name] = self._asked[name].tokens
        self._port.receive(name, self._asked[name].tokens, self._block_manager.where(name))

    def kv_incomplete(self, name: str, tokens: int) -> bool:
        """Whether KV of the first `tokens` tokens is missing for a decode that is about to begin.

        If nothing is missing, the KV becomes the scheduler's, which extends it.
        """
        if self._port.awaits(name) or self._came.get(name, tokens) < tokens:
            return True
        self._came.pop(name, None)
        return False

    def turn(self) -> list[FromInstance]:
        """Return the messages for the controller. Called once in every turn of the loop."""
        for name in self._port.sending():
            self._advance(name)
        # `ReserveKv` only once the worker's side is open: a sender may push as soon as it is sent.
        words, self._words, ended = self._words, [], self._port.finished()
        words += [self._asked.pop(name) for name in self._port.opened() if name in self._asked]
        words += ended
        if self._block_manager.pending_ops > _UNTOLD:
            self._replay(self._block_manager.drain_ops())
        return words

    def forget(self, name: str) -> None:
        """End all transfers of a request. Called before its KV is freed."""
        self._asked.pop(name, None)
        self._came.pop(name, None)
        self._port.forget(name)

    def _advance(self, name: str) -> None:
        """Send the available part of the slices that were requested."""
        # A scheduled request first: its staged KV, if it had any, has become the scheduler's.
        if name in self._scheduler:
            self._port.tokens_are_there(name, self._scheduler.progress(name), self._block_manager.where(name))
        elif (lease := self._staged_kv.lease(name)) is not None and not self._port.awaits(name):
            self._port.tokens_are_there(name, lease.tokens, self._block_manager.where(name))
        else:
            self._port.layers_are_there(name)


class CachedSlots(NamedTuple):
    """A cached prefix in the KV pool."""

    tokens: int
    slots: Sequence[tuple[int, int]]
    """Slots of these tokens, in order, as runs (first, count)."""


class SpanPrefixes:
    """Prefixes of prompts whose spans this instance computes, in the cache of its pool."""

    def __init__(self, block_manager: BlockManager) -> None:
        self._block_manager, self._cache = block_manager, block_manager.cache

    @contextmanager
    def held(self, admit: SubmitRequest, prompt: memoryview, tokens: int, beside: int) -> Iterator[CachedSlots]:
        """Keep what is cached of a prompt's first `tokens` tokens from eviction within the `with` block: nothing where
        `beside` tokens, the copy's, have no room then."""
        if self._cache is None or not admit.prefix_cache:
            yield CachedSlots(0, ())
            return
        size = self._block_manager.block_tokens
        tip = self._cache.hold(self._keys(admit, prompt)[: tokens // size])
        if self._block_manager.free_blocks < self._block_manager.blocks_for(beside):
            self._cache.end(tip)
            tip = self._cache.hold(())
        self._cache.looked_up(known_tokens(admit), tip.depth)
        try:
            runs = self._cache.index.runs(tip)
            yield CachedSlots(tip.depth * size, [(first * size, count * size) for first, count in runs])
        finally:
            self._cache.end(tip)

    def leave(self, admit: SubmitRequest, prompt: memoryview, lease: KvLease) -> None:
        """Let the blocks of a lease, which has a prompt's KV in the order of its tokens, stay cached once it is
        freed."""
        if self._cache is None or not admit.prefix_cache:
            return
        name, known = lease.request, known_tokens(admit)
        self._cache.register(name, self._keys(admit, prompt), known, brings_kv=True)
        self._block_manager.join_cache(lease)
        self._block_manager.note_computed(name, known)
        self._cache.forget(name)

    def _keys(self, admit: SubmitRequest, prompt: memoryview) -> list[bytes]:
        text = TextKeys(prompt, self._block_manager.block_tokens, admit.cache_salt)
        for token in admit.output:
            text.append(token)
        return text.keys


def known_tokens(admit: SubmitRequest) -> int:
    """Return the tokens of a request's prompt and of the output that it came with."""
    return admit.prompt_tokens + len(admit.output)


log = logging.getLogger("headway.engine")

_NAP_S = 0.005
"""Seconds of one wait for messages while a task waits for blocks."""
_LOOK_S = 0.002
"""Least seconds between two calls of the loop from within a layer."""


class _EndedError(Exception):
    """The task under way was forgotten: it ends without a message."""


class _AgentRequest(NamedTuple):
    admit: SubmitRequest
    prompt: memoryview
    live: OutputTracker


class _SpanJob:
    """A span task from `ComputeSpan` until it is done."""

    __slots__ = ("began_s", "begun", "compute", "forgotten", "grew", "pause")

    def __init__(self, compute: ComputeSpan) -> None:
        # `_cached_before` replaces it where not all is cached that was.
        self.compute = compute
        # grew: it is done, and took more KV than that of one token.
        self.begun = self.pause = self.forgotten = self.grew = False
        self.began_s = 0.0


class InstanceAgent:
    """The agent of one engine.

    Tasks are carried out one at a time, in the order in which `ComputeSpan` and `ResumeSpan` come; the controller sends
    them to all of a group in the same order, so groups that overlap cannot wait for each other.
    """

    def __init__(
        self,
        core: EngineCore,
        computes: SpanExecutor | MultiRankSpanExecutor,
        peers: PeerNetwork | MultiRankPeers,
        clock: ClockProtocol,
        room_s: float,
        moves: KvConnectorScheduler | None = None,
    ) -> None:
        """room_s: seconds for which a task waits for blocks of the pool."""
        staged_kv = core.scheduler.staged_kv
        assert staged_kv is not None, "an instance of several KV groups takes no part in runs"
        self._core, self._computes, self._peers, self._clock = core, computes, peers, clock
        self._staged_kv: StagedKv = staged_kv
        self._block_manager = core.scheduler.block_managers[0]
        self._prefixes = SpanPrefixes(self._block_manager)
        self._room_s, self._moves = room_s, moves
        self._requests: dict[str, _AgentRequest] = {}
        self._jobs: dict[str, _SpanJob] = {}
        self._places: dict[str, list[str]] = {}
        self._asked: set[str] = set()
        self._line: deque[_SpanJob] = deque()
        self._looked_s = float("-inf")

    @property
    def idle(self) -> bool:
        """Whether no task is queued."""
        return not self._line

    # -- messages -----------------------------------------------------------------------------------------------------

    def take(self, message: ToInstance | AbortRequest, prompt: memoryview | None) -> None:
        """Handle a message of the controller. prompt: the frame behind `SubmitRequest`. Unknown ids are ignored."""
        if isinstance(message, MeetPeers):
            self._peers.meet(message.peers)
        elif isinstance(message, SubmitRequest):
            assert prompt is not None
            self._admit(message, prompt)
        elif isinstance(message, ComputeSpan):
            if message.id in self._requests:
                self._line.append(_SpanJob(message))
                self._jobs.setdefault(message.id, self._line[-1])
        elif isinstance(message, PauseRequest):
            if message.id in self._jobs:
                self._jobs[message.id].pause = True
            else:
                self._core.stage(message.id)
        elif isinstance(message, ResumeSpan):
            # Also clears a pause request that came after the task had paused.
            if message.id in self._jobs:
                self._jobs[message.id].pause = False
                self._line.append(self._jobs[message.id])
        elif isinstance(message, AbortRequest):
            self.forget(message.id, message.for_good)
        elif self._moves is not None:
            self._moves.take(message)

    def submitted(self, submit: SubmitRequest) -> None:
        """Prepare a request that is about to be given to the scheduler: KV of its span tasks becomes the request's."""
        if submit.phase != "decode" or submit.id not in self._requests:
            return
        name = submit.id
        known = submit.prompt_tokens + len(submit.output)
        # Only KV of all tokens in one place and in their order; the newest token has none yet (`known - 1`).
        if self._computes.whole_tokens(name) == known - 1 and self._places.get(name) == [span_kv_name(name)]:
            self._staged_kv.to_request(name)
        self._give_back(name)
        self._drop(name)

    def forget(self, name: str, for_good: bool = True) -> None:
        """Drop everything of a request here, its residency on the scheduler included.

        A task that is being computed ends at the next callback. for_good: see `AbortRequest`.
        """
        if name in self._jobs:
            for job in (self._jobs[name], *self._line):
                job.forgotten = job.forgotten or job.compute.id == name
        self._core.abort(name)
        # Transfers end before the blocks are freed below: a peer's late bytes must not reach another request's slots.
        if for_good:
            self._peers.forget(name)
        if self._moves is not None:
            self._moves.forget(name)
        self._give_back(name)
        self._staged_kv.release(name)
        self._drop(name)

    def turn(self, loop: EngineService) -> None:
        """Grant blocks to waiting reservations, and report transfers. Called in every turn of the loop."""
        if self._staged_kv.waiting:
            for name in self._staged_kv.admit():
                if self._moves is not None and name not in self._asked:
                    self._moves.granted(name)
        if self._moves is not None:
            for message in self._moves.turn():
                loop.send(message, measured=isinstance(message, ReserveKv))

    def _admit(self, admit: SubmitRequest, prompt: memoryview) -> None:
        info = self._core.info
        if admit.id in self._requests:
            return
        # 4 bytes per token id (int32).
        if prompt.nbytes != 4 * admit.prompt_tokens:
            log.error("%s: %d bytes came for %d tokens", admit.id, prompt.nbytes, admit.prompt_tokens)
            return
        ids = np.frombuffer(prompt, dtype=np.int32)
        if ids.size == 0 or int(ids.min()) < 0 or int(ids.max()) >= info.vocab_size:
            log.error("%s: token ids must be between 0 and %d", admit.id, info.vocab_size - 1)
            return
        # Not `max_model_len`: a group holds more than this instance's pool.
        room = info.context_tokens - admit.prompt_tokens
        live = OutputTracker(admit.params, len(admit.output), room, info.eos_token_ids)
        self._computes.admit(admit.id, prompt, admit.params, admit.output)
        self._requests[admit.id] = _AgentRequest(admit, prompt, live)

    # -- runs ---------------------------------------------------------------------------------------------------------

    def work(self, loop: EngineService) -> None:
        """Carry out the next task, if there is one, until it is done, paused, lost or forgotten."""
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
        # A stats snapshot precedes SpanTaskDone: the controller chooses the KV target as soon as it gets that.
        loop.send(word, measured=job.grew)

    def _carry_out(self, job: _SpanJob, loop: EngineService) -> bool:
        compute, name = job.compute, job.compute.id
        beside = compute.beside

        def look() -> None:
            now = self._clock.now()
            if now - self._looked_s < _LOOK_S:
                return
            self._looked_s = now
            # No iteration of the scheduler here: the model is in the middle of a layer.
            loop.turn(False)
            if job.forgotten:
                raise _EndedError
            self._computes.check(name)

        def room(tokens: int, anew: bool) -> Slots:
            return self._room(job, tokens, anew, loop)

        def behind(layers: int) -> None:
            if self._moves is not None:
                self._moves.layers_are_there(name)
            loop.turn(beside)
            self._looked_s = self._clock.now()
            if job.forgotten:
                raise _EndedError
            self._computes.check(name)

        if not job.begun:
            job.began_s = self._clock.now()
            # KV of this request that is still being sent may lie in slots that the task writes.
            if self._moves is not None:
                self._moves.settle(name)
            if compute.home == self._peers.number:
                self._take_up(name)
            live = self._requests[name].live
            if live.first_scheduled_s is None:
                live.first_scheduled_s = job.began_s
            # Held until it is copied: the scheduler's iterations go on while the task waits for blocks.
            with self._cached_before(job) as task:
                self._computes.begin(task, room, look)
                job.begun = True
                return self._computes.go(name, lambda: job.pause, behind)
        return self._computes.go(name, lambda: job.pause, behind)

    @contextmanager
    def _cached_before(self, job: _SpanJob) -> Iterator[ComputeSpan]:
        """Yield the task with the slots of the cached KV before it, which is kept from eviction meanwhile, where this
        instance is the one to have that; else the task as it came.

        A group of one computes what was evicted since the controller's decision, and all where the pool has no room for
        the task beside what it would copy; with others it raises HeadwayError."""
        compute = job.compute
        if not compute.cached or compute.before[0].group != (self._peers.number,):
            yield compute
            return
        request, wanted = self._requests[compute.id], compute.before[0].end
        # All of the prefix is copied, then spread over the group.
        beside = max(wanted, -(-compute.run.end // len(compute.run.group)))
        with self._prefixes.held(request.admit, request.prompt, wanted, beside) as (found, slots):
            if found < wanted and len(compute.run.group) > 1:
                raise HeadwayError(f"{wanted - found} of {wanted} cached tokens are gone, or no room is beside them")
            if found < wanted:
                before = (msgspec.structs.replace(compute.before[0], end=found),) if found else ()
                run = msgspec.structs.replace(compute.run, start=found)
                job.compute = msgspec.structs.replace(compute, run=run, before=before, cached=bool(found))
            yield msgspec.structs.replace(job.compute, cached_slots=tuple(slots))

    def _take_up(self, name: str) -> None:
        """Give the KV that a scheduler has left here to the request's span tasks."""
        if name in self._places or not self._staged_kv.to_span(name):
            raise HeadwayError("its KV is not here")
        self._places[name] = [span_kv_name(name)]
        self._asked.add(span_kv_name(name))

    def _room(self, job: _SpanJob, tokens: int, anew: bool, loop: EngineService) -> Slots:
        """Return slots of the pool, (first, count), for a task that is about to begin; anew: in a place of its own.

        The scheduler continues while the task waits for blocks: its requests' ends free them. Raises HeadwayError after
        `room_s`.
        """
        name, staged_kv = job.compute.id, self._staged_kv
        places = self._places.setdefault(name, [])
        if anew or not places:
            places.append(span_kv_name(name, job.compute.index if anew else None))
        place = places[-1]
        staged_kv.request(place, tokens, self._clock.now())
        self._asked.add(place)
        until_s = self._clock.now() + self._room_s
        self.turn(loop)
        while staged_kv.waits(place):
            if self._clock.now() > until_s:
                raise HeadwayError(f"no room for {tokens} tokens of KV within {self._room_s:g} s")
            loop.turn(True, _NAP_S)
            if job.forgotten:
                raise _EndedError
        lease = staged_kv.lease(place)
        assert lease is not None
        block = self._block_manager.block_tokens
        return [(first * block, count * block) for first, count in self._block_manager.where(lease.request)]

    def _done(self, job: _SpanJob) -> SpanTaskDone:
        compute, name = job.compute, job.compute.id
        emitted, moved = self._computes.finish(name)
        del self._jobs[name]
        for other in self._line:
            if other.compute.id == name:
                self._jobs.setdefault(name, other)
        # The KV has got a new layout in a second place; transfers out of the first one end before it is freed.
        if moved:
            if self._moves is not None:
                self._moves.settle(name)
            self._leave(self._places[name].pop(0))
        if self._moves is not None:
            self._moves.layers_are_there(name)
        run, at = compute.run, compute.run.group.index(self._peers.number)
        job.grew = moved or bool(run.keepers) or not run.in_place
        # This instance's share, so that the shares of the group add up to the task's tokens.
        tokens, size = run.end - run.start, len(run.group)
        own = (at + 1) * tokens // size - at * tokens // size
        self._core.computed(*((0, own) if run.in_place else (own, 0)))
        now = self._clock.now()
        delta = None
        if emitted is not None:
            admit, _, live = self._requests[name]
            live.emitted = compute.run.end - admit.prompt_tokens
            delta = live.take(emitted, now)
        cached = compute.before[0].end if compute.cached else 0
        return SpanTaskDone(
            id=name, index=compute.index, began_s=job.began_s, ended_s=now, cached_tokens=cached,
            saved_s=self._core.prefixes.saved_s(cached), delta=delta,
        )  # fmt: skip

    def _paused(self, job: _SpanJob) -> SpanTaskPaused:
        job.pause = False
        return self._computes.saved(job.compute.id, job.compute.index)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _lose(self, name: str, why: str, loop: EngineService, by: int | None = None) -> None:
        """Drop the request of a task that cannot be completed, and report that. by: see `SpanTaskLost`."""
        log.warning("a run of %s is lost: %s", name, why)
        self.forget(name)
        loop.send(SpanTaskLost(name, why, by))

    def _give_back(self, name: str) -> None:
        """Free the blocks of a request's span tasks; those of a whole prompt stay cached."""
        places, request = self._places.pop(name, []), self._requests.get(name)
        whole = request is not None and self._computes.whole_tokens(name) == known_tokens(request.admit)
        for place in places:
            lease = self._staged_kv.lease(place)
            if request is not None and whole and lease is not None and len(places) == 1:
                self._prefixes.leave(request.admit, request.prompt, lease)
            self._leave(place)

    def _leave(self, place: str) -> None:
        self._staged_kv.release(place)
        self._asked.discard(place)

    def _drop(self, name: str) -> None:
        self._requests.pop(name, None)
        self._jobs.pop(name, None)
        self._computes.forget(name)
