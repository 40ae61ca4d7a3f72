"""The controller's backend over HTTP instances: a request enters an instance as one streamed completion; predicted
prefill times come from each server's own queue.

An instance serves whole requests. Its own scheduler decides which prompts wait for others there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec
import numpy as np

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controller import ClusterController
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.core.errors import HeadwayError, OverloadedError, RequestError
from headway.core.request import Phase, Request, Span
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.contract import HTTP_CAPABILITIES, ClusterInstance, Role
from headway.runtime.cluster.http_server import (
    AnswerStream,
    HttpServer,
    ServedModel,
    ServerBusyError,
    ServerGoneError,
    ServerLoad,
    StreamedTokens,
    begins_anew,
    open_session,
    read_answer,
    sent_salt,
    without_end_token,
)
from headway.runtime.cluster.instances import ASSUMED_BLOCK, AssumedKeys, InstanceState, RetryLimits, shareable
from headway.runtime.cluster.kv_events import KvEvents
from headway.runtime.cluster.requests import (
    AttemptTable,
    BackendEvent,
    ClusterRequest,
    ClusterRequests,
    InstanceTable,
    RequestAttempt,
    RequestReleased,
)
from headway.runtime.cluster.server_command import ServerCommand
from headway.runtime.engine.config import GaveUpError, RestartLimit
from headway.runtime.engine.protocol import EngineInfo, EngineStats, FinishReason, OutputDelta, SubmitRequest

if TYPE_CHECKING:
    from headway.runtime.cluster.client import InstanceRoster


ALONE = GroupShape(1)
_WHOLE = "HTTP instances serve whole requests"
_LEARNING_RATE = 0.3
"""Weight of the newest measurement, after the first."""
_LEAST_LEFT = 0.05
"""Least share of the predicted time that is left while a prompt is computed, however late it is."""


class LearnedLatency(GroupLatency):
    """A latency model times the instances' mean factor: what a policy plans with. One for each cluster."""

    def __init__(self, base: GroupLatency) -> None:
        self.base = base
        self._factors: dict[int, float] = {}
        """Measured over predicted seconds of each instance that was measured: its own prediction, if it has one."""
        self._reported: dict[int, tuple[list[int], list[float]]] = {}
        """By instance that predicts prompts itself: tokens of prompts, and their seconds over the model's."""

    @property
    def source(self) -> str:
        return f"{self.base.source}, times {self.factor():.3g} as measured"

    def factor(self, instance: int | None = None, tokens: int = 0) -> float:
        """Return an instance's factor for prompts of so many tokens; the mean of all where it is not known, or for
        None."""
        known = self._factors.keys() | self._reported.keys()
        if instance in known:
            return self._reported_ratio(instance, tokens) * self._factors.get(instance, 1.0)
        return sum(self.factor(each, tokens) for each in known) / len(known) if known else 1.0

    def relative(self, instance: int, tokens: int) -> float:
        """Return an instance's factor for prompts of so many tokens over the mean of all."""
        return self.factor(instance, tokens) / max(self.factor(None, tokens), 1e-9)

    def _reported_ratio(self, instance: int | None, tokens: int) -> float:
        """Return what an instance predicts over what the model does; 1 where it predicts nothing."""
        points = None if instance is None else self._reported.get(instance)
        return 1.0 if points is None else float(np.interp(tokens, *points))

    def report(self, instance: int, points: Sequence[tuple[int, float]]) -> None:
        """Take in what an instance predicts: tokens of prompts, ascending, and their seconds alone. None: nothing."""
        ratios = [seconds / max(self.base.prefill_s(0, tokens, ALONE), 1e-9) for tokens, seconds in points]
        if (self._reported.pop(instance, None) is None) == bool(points):
            # what was measured was over another prediction
            self._factors.pop(instance, None)
        if points:
            self._reported[instance] = [tokens for tokens, _ in points], ratios

    def forget(self, instance: int) -> None:
        """Forget what an instance that is gone predicted, and its factor: the mean is of the others."""
        self._reported.pop(instance, None)
        self._factors.pop(instance, None)

    def learn(self, instance: int, prompt_tokens: int, measured_s: float) -> None:
        """Take in the time of a prompt that an instance computed alone."""
        predicted_s = self.base.prefill_s(0, prompt_tokens, ALONE) * self._reported_ratio(instance, prompt_tokens)
        ratio = measured_s / max(predicted_s, 1e-9)
        before = self._factors.get(instance)
        self._factors[instance] = ratio if before is None else before + _LEARNING_RATE * (ratio - before)

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return self.base.prefill_s(past, tokens, group) * self.factor(tokens=past + tokens)

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        first = self.base.solve_tokens(past, budget_s / self.factor(tokens=past), group)
        return self.base.solve_tokens(past, budget_s / self.factor(tokens=past + first), group)

    def prompt_s(self, instance: int, prompt_tokens: int) -> float:
        """Return the seconds of a whole prompt, alone on an instance."""
        return self.base.prefill_s(0, prompt_tokens, ALONE) * self.factor(instance, prompt_tokens)


class PrefillQueue:
    """Prompts on one instance without a first token, and when they are expected to be computed.

    They count as computed one after another: where they share iterations, the last one ends at the same time."""

    def __init__(self, instance: int, latency: LearnedLatency) -> None:
        self._instance, self._latency = instance, latency
        self._waiting: dict[str, tuple[int, float]] = {}
        """Prompt tokens and predicted seconds, by request."""
        self._resident: set[str] = set()
        self._since_s = 0.0
        """Since when the present prompts are computed."""
        self._alone: tuple[str, float] | None = None
        """The request that has been alone since it was sent, and when that was."""

    def add(self, request: str, prompt_tokens: int, now: float) -> None:
        """Add a request that was sent to the instance."""
        # With decodes beside it, a prompt takes longer than the model says.
        self._alone = None if self._resident else (request, now)
        if not self._waiting:
            self._since_s = now
        self._waiting[request] = (prompt_tokens, self._latency.prompt_s(self._instance, prompt_tokens))
        self._resident.add(request)

    def first_token(self, request: str, now: float) -> None:
        """Record that a prompt is computed. Harmless when repeated."""
        tokens, _ = self._waiting.pop(request, (0, 0.0))
        if tokens and self._alone is not None and self._alone[0] == request:
            self._latency.learn(self._instance, tokens, now - self._alone[1])
        self._since_s = now

    def remove(self, request: str, now: float) -> None:
        """Remove a request that has ended or left. Harmless when repeated."""
        if self._waiting.pop(request, None) is not None:
            self._since_s = now
        self._resident.discard(request)

    def report(self, points: Sequence[tuple[int, float]]) -> None:
        """See `LearnedLatency.report`."""
        self._latency.report(self._instance, points)

    def clear(self) -> None:
        """Remove all requests: the instance is gone."""
        self._waiting.clear()
        self._resident.clear()
        self._latency.forget(self._instance)

    def prompt_s(self, tokens: int) -> float:
        """Return the seconds of a whole prompt, alone."""
        return self._latency.prompt_s(self._instance, tokens)

    @property
    def requests(self) -> int:
        """Number of requests on the instance."""
        return len(self._resident)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens without a first token."""
        return sum(tokens for tokens, _ in self._waiting.values())

    @property
    def unanswered(self) -> int:
        """Number of requests without a first token."""
        return len(self._waiting)

    def left_s(self, now: float) -> float:
        """Return the predicted seconds until all prompts are computed; 0.0 without any."""
        total = sum(seconds for _, seconds in self._waiting.values())
        return max(total - (now - self._since_s), _LEAST_LEFT * total)


log = logging.getLogger("headway.cluster")

EVERY_S = 0.4
"""Seconds between two probes."""
_MISSES = 2
"""Probes in a row without an answer, after which an instance is lost, unless it has sent tokens meanwhile."""
_LOAD_EVERY = 4
"""Probes between two readings of the load: a metrics page takes vLLM some 20 ms."""
_MOST_RESTARTS = 3
_MOST_REFUSALS = 4
"""Refusals of a request that has no output, for each instance, before its client gets 429."""


class HttpInstanceSettings(msgspec.Struct, frozen=True):
    """Where one instance is."""

    pool: int
    url: str
    process: ServerCommand | None = None
    """The command that starts it; None: the server is not the cluster's."""
    role: Role = "mixed"
    """`prefill`: it computes prompts for the others, which read their KV."""
    kv_events: str | None = None
    """Where it publishes vLLM's KV events; None: what it has cached is assumed."""


class HttpInstance:
    """A server behind HTTP as the controller sees it (`instances.LiveInstance` is the native one). `look_after` runs
    for as long as it is part of the cluster."""

    limits: ClassVar[RetryLimits] = RetryLimits(losses=6, runs=7)
    returns_s: ClassVar[float] = 5.0
    """See `LiveInstance.returns_s`: it may have stalled."""
    node = host = 0

    def __init__(
        self,
        number: int,
        settings: HttpInstanceSettings,
        latency: LearnedLatency,
        facts: EngineInfo,
        token_bytes: int,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """facts: of the checkpoint. token_bytes: of one token's KV. api_key: sent to the server."""
        self.number, self.pool, self.url, self.api_key = number, settings.pool, settings.url, api_key
        self.process, self.role = settings.process, settings.role
        self.queue = PrefillQueue(number, latency)
        self._facts, self._token_bytes = facts, token_bytes
        self.server: HttpServer
        """Set before the instance is ready."""
        self.state: InstanceState = "starting"
        self.model = ServedModel("")
        self.info: EngineInfo | None = None
        """What it serves; None before it is ready."""
        self.load = ServerLoad()
        self.cached = AssumedKeys()
        self._events = None if settings.kv_events is None else KvEvents(settings.kv_events)
        self.restarts = 0
        self.incarnation = 0
        self.failure: str | None = None
        """Why it was given up."""
        self._clock = clock
        self._limit = RestartLimit(_MOST_RESTARTS, "its server")
        self._probes = self._misses = 0
        self._alive = False
        self._due = asyncio.Event()

    @property
    def seen(self) -> bool:
        """Whether policies place requests on it; the others compute prompts for these."""
        return self.role != "prefill"

    @property
    def required(self) -> bool:
        """Whether the cluster waits for it at the start: it has started it."""
        return self.process is not None

    @property
    def serves(self) -> bool:
        """Whether it can be given work."""
        return self.state == "ready"

    @property
    def pid(self) -> int:
        """Process id of its server; 0 where that is not the cluster's."""
        return 0 if self.process is None else self.process.pid

    @property
    def initial_instance(self) -> ClusterInstance:
        """The instance without any requests, as policies see it."""
        return ClusterInstance(id=self.number, node=0, role=self.role, capacity=self.load.kv_tokens)

    @property
    def stats(self) -> EngineStats:
        """The newest scrape; running: or its own requests that are newer."""
        load = self.load
        return EngineStats(
            running=max(load.running, self.queue.requests - load.waiting),
            waiting=load.waiting,
            kv_tokens_used=round(load.kv_usage * load.kv_tokens),
            kv_tokens_total=load.kv_tokens,
            prefill_tokens_total=load.prompt_tokens_total,
            decode_tokens_total=load.generation_tokens_total,
            engine_restarts_total=self.restarts,
        )

    def cached_tokens(self, asked: ClusterRequest) -> int:
        """Return how many tokens of a request's prompt, answer so far included, the server has cached: as it reports,
        or as is assumed until it has reported any."""
        blocks, tokens = None if self._events is None else self._events.blocks, asked.submit.prompt_tokens
        tokens += len(asked.told)
        if blocks is None or not blocks.block_tokens:
            return ASSUMED_BLOCK * self.cached.match(shareable(asked.text(ASSUMED_BLOCK), tokens, ASSUMED_BLOCK))
        size = blocks.block_tokens
        return size * blocks.match(shareable(asked.text(size, sent_salt(asked.submit)), tokens, size))

    def keep(self, asked: ClusterRequest) -> None:
        """Note that the server computes, or has computed, a request's prompt and the answer so far."""
        self.cached.use(asked.text(ASSUMED_BLOCK).keys, self.load.kv_tokens)

    def _forget_events(self) -> None:
        if self._events is not None:
            self._events.stop()

    def note_alive(self) -> None:
        """Note that the server has sent tokens: it is alive, however late its probes are."""
        self._alive = True

    def probe_now(self) -> None:
        """Have `watch` probe at once: a stream has broken off."""
        self._due.set()

    async def look_after(self, listener: InstanceRoster) -> None:
        """Start the server if it is ours, probe it, and report what becomes of it, until it is given up or leaves."""
        if self.process is not None:
            await self.process.start()
        async with open_session() as session:
            self.server = HttpServer(self.url, session, self.api_key)
            while self.state not in ("failed", "left"):
                await self._probe(listener)
                self._due.clear()
                # A second miss is not waited for.
                if not self._misses:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(EVERY_S):
                            await self._due.wait()
        self._forget_events()
        listener.ended(self.number)
        await self.close()

    async def _probe(self, listener: InstanceRoster) -> None:
        process = self.process
        if process is not None and process.ended:
            await self._restart(process, listener)
            return
        if not await self.server.healthy():
            self._missed(listener)
            return
        self._misses, self._alive = 0, False
        self._probes += 1
        try:
            if self.state in ("starting", "lost"):
                self.model = await self.server.model()
                await self._measure()
                self.info = self._described()
                self.state = "ready"
                self._limit.record_up(self._clock())
                listener.joined(self.number)
                # The cluster may have refused it.
                if self._events is not None and self.state == "ready":
                    self._events.start()
            elif self._probes % _LOAD_EVERY == 0:
                await self._measure()
                listener.measured(self.number)
        except ServerGoneError as error:
            log.debug("instance %d: %s", self.number, error)
            self._missed(listener)

    def _described(self) -> EngineInfo:
        longest = self.model.max_model_len or self._facts.max_model_len
        kv_tokens = self.load.kv_tokens or longest
        return msgspec.structs.replace(
            self._facts,
            max_model_len=longest,
            context_tokens=longest,
            kv_tokens_total=kv_tokens,
            kv_bytes=kv_tokens * self._token_bytes,
            kv_block_tokens=self.load.block_tokens,
        )

    async def _measure(self) -> None:
        self.load = await self.server.load()
        self.queue.report(self.load.prefill_s)

    def _missed(self, listener: InstanceRoster) -> None:
        self._misses = 0 if self._alive else self._misses + 1
        self._alive = False
        if self._misses >= _MISSES:
            self._misses = 0
            self._lose(listener, f"{self.url} does not answer")

    def _lose(self, listener: InstanceRoster, why: str) -> None:
        if self.state == "ready":
            self.state = "lost"
            self.incarnation += 1
            self.load = ServerLoad()
            self.queue.clear()
            self.cached.clear()
            self._forget_events()
            listener.lost(self.number, why)

    async def _restart(self, process: ServerCommand, listener: InstanceRoster) -> None:
        """Start the server again after its process has ended."""
        why = f"the server has ended; {process.last_words()}"
        first = self.state == "starting" and not self.incarnation
        self._lose(listener, why)
        if self.state == "left":
            return
        try:
            if first:
                raise GaveUpError(why)
            self._limit.spend(self._clock(), why)
        except GaveUpError as error:
            self.fail(str(error))
            return
        self.restarts += 1
        # Children of the dead process may still hold the port.
        process.kill()
        await process.start()

    def fail(self, why: str) -> None:
        """Give it up."""
        self.state, self.failure = "failed", why
        log.error("instance %d is given up: %s", self.number, why)

    def drain(self) -> None:
        """End its part in the cluster: nothing is left on it. `look_after` ends a server that is ours."""
        if self.state != "failed":
            self.state = "left"
        self._due.set()

    async def close(self) -> None:
        """End the server if it is ours."""
        self._forget_events()
        if self.process is not None:
            await self.process.stop()

    def end(self) -> None:
        """Kill the server if it is ours. For callers without an event loop."""
        if self.process is not None and not self.process.ended:
            self.process.kill()


class HttpBackend(InstanceBackend):
    """See the module."""

    capabilities = HTTP_CAPABILITIES
    heard: Callable[[RequestAttempt, AnswerStream, StreamedTokens], None]
    """Called with each part of an answer."""
    broken: Callable[[RequestAttempt, AnswerStream, HeadwayError], None]
    """Called with the error that ended a stream."""

    def __init__(self, registry: InstanceTable[HttpInstance], clock: Callable[[], float]) -> None:
        self.registry, self.attempts, self._clock = registry, AttemptTable(), clock
        self.events: deque[BackendEvent] = deque()
        """What has happened during calls, in order: `ClusterDriver` takes it after each of them."""

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        raise ActionImpossible(_WHOLE)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens = request.prompt_tokens - request.cached_tokens
        return tokens, self.registry[group[0]].queue.prompt_s(tokens)

    def busy_s(self, group: tuple[int, ...]) -> float:
        return max(self.refresh(i).free_at_s for i in group)

    def refresh(self, instance: int) -> SchedulerStats:
        there, now = self.registry.get(instance), self._clock()
        if there is None:
            return SchedulerStats()
        queue, load = there.queue, there.load
        left_s = queue.left_s(now)
        # Others may use the server too: its own count has their requests.
        running = max(queue.requests, load.running + load.waiting)
        used = round(load.kv_usage * load.kv_tokens)
        return SchedulerStats(now + left_s if left_s else 0.0, queue.queued_tokens, used, running)

    # -- actions ------------------------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry, now: float) -> None:
        """Never called, nor is `pause`: `capabilities` has no spans."""
        raise ActionImpossible(_WHOLE)

    def pause(self, entry: SpanEntry, now: float) -> None:
        raise ActionImpossible(_WHOLE)

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        self._open(controlled.backend_state, group[0])

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        attempt: RequestAttempt = controlled.backend_state
        return attempt.said

    def send(self, kv_slice: KvSlice, now: float) -> None:
        """Never called: `capabilities` has no KV transfer."""
        raise ActionImpossible(_WHOLE)

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        attempt: RequestAttempt = controlled.backend_state
        self.abandon(attempt)
        for each in self.registry:
            each.queue.remove(controlled.request.id, now)
        self.attempts.remove(attempt)
        self.events.append(RequestReleased(attempt, why))
        return True

    # -- for the driver -----------------------------------------------------------------------------------------------

    def check(self, submit: SubmitRequest) -> None:
        """Raise RequestError for what a server cannot be asked for."""
        if submit.params.logprobs is not None or submit.params.prompt_logprobs is not None:
            raise RequestError("log-probabilities are not passed on by a cluster of HTTP instances", "logprobs")

    def meet(self) -> None:
        """Do nothing: servers do not know each other."""

    def lost(self, number: int) -> bool:
        """Return whether a lost instance was ended from here: never."""
        return False

    def gives_way(self, ages: Mapping[str, int]) -> tuple[RequestAttempt, bool] | None:
        """None: servers find room for KV by themselves."""
        return None

    def counts(self) -> dict[str, int]:
        """Return nothing: the counts are of native instances."""
        return {}

    def expecting(self) -> list[int]:
        """Return the instances with prompts to compute, whose remaining time has to be refreshed."""
        return [each.number for each in self.registry if each.queue.unanswered and each.seen]

    def abandon(self, attempt: RequestAttempt) -> None:
        """Close an attempt's stream, if it has one."""
        stream, attempt.stream, attempt.at = attempt.stream, None, None
        if stream is not None:
            stream.close()
            self.closed(stream, attempt)

    def closed(self, stream: AnswerStream, attempt: RequestAttempt) -> None:
        """Take a request whose stream has ended out of the queues of its servers."""
        for each in (stream.target, stream.prefill):
            if each is not None:
                each.queue.remove(attempt.request.id, self._clock())

    def _open(self, attempt: RequestAttempt, number: int) -> None:
        """Send a request to an instance."""
        now, asked, target, name = self._clock(), attempt.asked, self.registry[number], attempt.request.id
        output = () if begins_anew(asked.submit) else tuple(asked.told)
        tokens = asked.submit.prompt_tokens + len(output)
        target.queue.add(name, tokens - (attempt.cached[number] if attempt.cached else 0), now)
        target.keep(asked)
        attempt.at = number
        asked.sends += 1
        stream = attempt.stream = AnswerStream(target, now, self._prefill_server(name, tokens, now), len(output))
        heard, broken = partial(self.heard, attempt, stream), partial(self.broken, attempt, stream)
        stream.task = asyncio.get_running_loop().create_task(read_answer(asked, stream, output, heard, broken))

    def _prefill_server(self, request: str, prompt_tokens: int, now: float) -> HttpInstance | None:
        """Return the instance that is to compute a prompt for another, which counts as queued there; None: none is
        ready, and the prompt is computed where it decodes."""
        ready = [each for each in self.registry if not each.seen and each.state == "ready"]
        if not ready:
            return None
        chosen = min(ready, key=lambda each: (each.queue.left_s(now), each.queue.requests, each.number))
        chosen.queue.add(request, prompt_tokens, now)
        return chosen


class HttpAnswers:
    """Handles what streams bring; after each piece the controller is settled if it may have to act."""

    def __init__(
        self,
        controller: ClusterController,
        backend: HttpBackend,
        requests: ClusterRequests,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._controller, self._backend, self._requests = controller, backend, requests
        self._settle, self._clock = settle, clock
        backend.heard, backend.broken = self._receive, self._broken

    def measured(self, number: int) -> None:
        """See `InstanceRoster`."""
        if self._backend.registry[number].seen:
            self._controller.changed((number,), self._clock())

    def close(self) -> None:
        """Do nothing: streams end with their requests."""

    def _receive(self, attempt: RequestAttempt, stream: AnswerStream, piece: StreamedTokens) -> None:
        """Take in a part of an answer."""
        if attempt.stream is not stream:
            return
        now, asked, target, name = self._clock(), attempt.asked, stream.target, attempt.request.id
        if stream.prefill is None:
            target.note_alive()
        else:
            # Its part is done with the first piece.
            stream.prefill.note_alive()
            stream.prefill.queue.first_token(name, now)
            stream.prefill.queue.remove(name, now)
            stream.prefill = None
        if not asked.answered and asked.first_s is None:
            asked.first_s = now
        if piece.finish not in (None, "stop", "length"):
            raise ServerGoneError(f"the instance ended the request ({piece.finish})")
        if not piece.tokens and piece.finish is None:
            return
        assert target.info is not None
        tokens, stop = without_end_token(asked.submit, frozenset(target.info.eos_token_ids), piece)
        new = stream.take(asked, tokens)
        first, stream.first = not stream.first, True
        if first:
            target.queue.first_token(name, now)
        if new or piece.finish is not None:
            finish = cast(FinishReason | None, piece.finish)
            asked.tell(OutputDelta(id=asked.submit.id, tokens=new, finish=finish, stop_token=stop, emitted_s=now))
        if piece.finish is not None:
            attempt.finished = True
            # The connection ends by itself.
            attempt.stream = attempt.at = None
            target.keep(asked)
        controlled = attempt.controlled
        if attempt.finished and controlled.resident:
            self._controller.left_scheduler(controlled, attempt.said, True, now)
        # A token in the middle of an answer changes no plan.
        if first or attempt.finished:
            self._settle()

    def _broken(self, attempt: RequestAttempt, stream: AnswerStream, error: HeadwayError) -> None:
        """Take in the end of a stream without a finish reason: try again, or fail the request."""
        if attempt.stream is not stream:
            return
        asked, requests = attempt.asked, self._requests
        self._backend.closed(stream, attempt)
        attempt.stream = None
        if stream.prefill is not None:
            stream.prefill.probe_now()
        if isinstance(error, ServerBusyError):
            asked.refusals += 1
            if asked.refusals >= _MOST_REFUSALS * len(self._backend.registry) and not asked.told:
                requests.fail(asked, OverloadedError(f"all instances are busy: {error}", error.retry_after_s))
            else:
                requests.retry(attempt, str(error), after_s=error.retry_after_s)
        elif isinstance(error, ServerGoneError):
            stream.target.probe_now()
            requests.retry(attempt, str(error), later=True)
        else:
            requests.fail(asked, error)
        self._settle()
