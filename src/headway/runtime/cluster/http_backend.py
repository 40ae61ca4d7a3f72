"""The controller's backend over HTTP instances: a request enters an instance as one streamed completion; predicted
prefill times come from each server's own queue.

A pause closes the stream; what was computed stays in the instance's prefix cache, if it has one, and the next stream
finds it there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.control.lifecycle import RequestLifecycle
from headway.core.request import Phase, Request, Span
from headway.kv.text_keys import TextKeys
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.policy.placement.contract import HTTP_CAPABILITIES, ClusterInstance, Role
from headway.runtime.cluster.http_server import (
    AnswerStream,
    HttpServer,
    ServedModel,
    ServerGoneError,
    ServerLoad,
    begins_anew,
    sent_salt,
)
from headway.runtime.cluster.instances import ASSUMED_BLOCK, AssumedKeys, InstanceState, shareable, text_of
from headway.runtime.cluster.kv_events import KvEvents
from headway.runtime.cluster.requests import AnswerQueue
from headway.runtime.cluster.server_command import ServerCommand
from headway.runtime.engine.config import GaveUpError, RestartLimit
from headway.runtime.engine.protocol import FinishReason, OutputDelta, SubmitRequest

if TYPE_CHECKING:
    from headway.runtime.cluster.http_client import HttpCluster


class HttpRequest:
    """One request from its acceptance to its end."""

    __slots__ = ("_attempt", "_before", "_first_s", "answer", "cached", "controlled", "entry", "life", "prompt",
                 "stranded", "stream", "submit", "text", "texts")  # fmt: skip

    def __init__(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        self.submit, self.prompt = submit, prompt
        self.text = text_of(submit, prompt, submit.output, ASSUMED_BLOCK)
        """Keys of prompt and answer."""
        self.texts: dict[int, TextKeys] = {}
        """See `text_in`: of the attempt's prompt."""
        self.cached: tuple[int, ...] = ()
        """Tokens that each instance has cached, or is assumed to have, of the attempt's prompt."""
        params = submit.params
        self.life = RequestLifecycle(
            params.max_tokens, params.min_tokens, submit.output, restarts=begins_anew(submit) and params.max_tokens > 1
        )
        self.controlled: ControlledRequest | None = None
        """The controller's state of the attempt under way."""
        self.entry: SpanEntry | None = None
        """The span that computes the prompt, if the policy has committed one."""
        self.stream: AnswerStream | None = None
        self.stranded = 0
        """How often no instance was chosen for it though there was one."""
        self._attempt = 0
        self._before = 0
        self._first_s: float | None = None
        self.answer = AnswerQueue()

    def attempt(self) -> Request:
        """Return another attempt as the controller's request, whose prompt is the prompt and all output so far."""
        self._attempt += 1
        self.controlled, self.entry, self.stream = None, None, None
        self._before = len(self.life.output)
        self.texts.clear()
        submit = self.submit
        return Request(
            id=f"{submit.id}#{self._attempt}",
            arrival_s=submit.received_s,
            prompt_tokens=submit.prompt_tokens + self._before,
            max_output_tokens=max(1, submit.params.max_tokens - self._before),
            slo=submit.slo,
            priority=submit.priority,
        )

    def text_in(self, block_tokens: int) -> TextKeys:
        """Return the keys of the attempt's prompt in blocks of a server's own size, with the salt that it is sent."""
        if block_tokens not in self.texts:
            submit, told = self.submit, self.life.output[: self._before]
            self.texts[block_tokens] = text_of(submit, self.prompt, told, block_tokens, sent_salt(submit))
        return self.texts[block_tokens]

    @property
    def name(self) -> str:
        """Name of the attempt."""
        return f"{self.submit.id}#{self._attempt}"

    @property
    def attempt_tokens(self) -> int:
        """Output tokens since the attempt began."""
        return len(self.life.output) - self._before

    @property
    def complete(self) -> bool:
        """Whether it has as many tokens as it may have: only its end is missing."""
        return len(self.life.output) >= self.submit.params.max_tokens

    def begun(self, now: float) -> None:
        """Record that an instance has accepted it."""
        self._first_s = self._first_s or now

    def send(self, tokens: tuple[int, ...], finish: FinishReason | None = None, stop_token: int | None = None) -> None:
        """Send output to the client."""
        if self.text.keys:
            for token in tokens:
                self.text.append(token)
        first_s, self._first_s = (self._first_s, None) if tokens else (None, self._first_s)
        now = time.monotonic()
        self.answer.put(
            OutputDelta(
                id=self.submit.id, tokens=tokens, finish=finish, stop_token=stop_token, emitted_s=now,
                first_scheduled_s=first_s,
            )
        )  # fmt: skip

    def fail(self, error: Exception) -> None:
        """End the request with an error. No effect when it has ended."""
        if not self.life.over:
            self.life.fail()
            self.answer.put(error)


ALONE = GroupShape(1)
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
        """Of instances that predict prompts themselves: tokens of prompts, and their seconds over the model's."""

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


class HttpInstance:
    """See the module. `watch` runs for as long as it is part of the cluster."""

    def __init__(
        self,
        number: int,
        pool: int,
        server: HttpServer,
        queue: PrefillQueue,
        process: ServerCommand | None = None,
        clock: Callable[[], float] = time.monotonic,
        role: Role = "mixed",
        kv_events: str | None = None,
    ) -> None:
        """process: started by `watch`; None: the server is not the cluster's. kv_events: where it publishes them."""
        self.number, self.pool, self.server, self.queue, self.process = number, pool, server, queue, process
        self.role: Role = role
        self.state: InstanceState = "starting"
        self.model = ServedModel("")
        self.load = ServerLoad()
        self.cached = AssumedKeys()
        self._events = None if kv_events is None else KvEvents(kv_events)
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
    def decodes(self) -> bool:
        """Whether policies place requests on it; the others compute prompts for these."""
        return self.role != "prefill"

    @property
    def initial_instance(self) -> ClusterInstance:
        """The instance without any requests, as policies see it."""
        return ClusterInstance(id=self.number, node=0, role=self.role, capacity=self.load.kv_tokens)

    def cached_tokens(self, request: HttpRequest, prompt_tokens: int) -> int:
        """Return how many tokens of a request's prompt, answer so far included, the server has cached: as it reports,
        or as is assumed until it has reported any."""
        blocks = None if self._events is None else self._events.blocks
        if blocks is None or not blocks.block_tokens:
            return ASSUMED_BLOCK * self.cached.match(shareable(request.text, prompt_tokens, ASSUMED_BLOCK))
        size = blocks.block_tokens
        return size * blocks.match(shareable(request.text_in(size), prompt_tokens, size))

    def _forget_events(self) -> None:
        if self._events is not None:
            self._events.stop()

    def note_alive(self) -> None:
        """Note that the server has sent tokens: it is alive, however late its probes are."""
        self._alive = True

    def probe_now(self) -> None:
        """Have `watch` probe at once: a stream has broken off."""
        self._due.set()

    async def watch(self, listener: HttpCluster) -> None:
        """Start the server if it is ours, probe it, and report what becomes of it, until it is given up or leaves."""
        if self.process is not None:
            await self.process.start()
        while self.state not in ("failed", "left"):
            await self._probe(listener)
            self._due.clear()
            # A second miss is not waited for.
            if self._misses:
                continue
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def _probe(self, listener: HttpCluster) -> None:
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

    async def _measure(self) -> None:
        self.load = await self.server.load()
        self.queue.report(self.load.prefill_s)

    def _missed(self, listener: HttpCluster) -> None:
        self._misses = 0 if self._alive else self._misses + 1
        self._alive = False
        if self._misses >= _MISSES:
            self._misses = 0
            self._lose(listener, f"{self.server.url} does not answer")

    def _lose(self, listener: HttpCluster, why: str) -> None:
        if self.state in ("ready", "draining"):
            self.state = "left" if self.state == "draining" else "lost"
            self.incarnation += 1
            self.load = ServerLoad()
            self.queue.clear()
            self.cached.clear()
            self._forget_events()
            log.warning("instance %d is lost: %s", self.number, why)
            listener.lost(self.number, why)

    async def _restart(self, process: ServerCommand, listener: HttpCluster) -> None:
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
            self._give_up(listener, str(error))
            return
        self.restarts += 1
        # Children of the dead process may still hold the port.
        process.kill()
        await process.start()

    def _give_up(self, listener: HttpCluster, why: str) -> None:
        self.state, self.failure = "failed", why
        log.error("instance %d is given up: %s", self.number, why)
        listener.ended(self.number)

    def leave(self, listener: HttpCluster) -> None:
        """End its part in the cluster, once nothing is left on it. A server that is ours is ended by `close`."""
        self.state = "left"
        self._forget_events()
        self._due.set()
        listener.ended(self.number)

    async def close(self) -> None:
        """End the server if it is ours."""
        self._forget_events()
        if self.process is not None:
            await self.process.stop()


Start = Callable[[HttpRequest, int], None]
"""Opens a request's stream to an instance."""


class HttpBackend(InstanceBackend):
    """See the module. `HttpCluster` empties `paused`, `done` and `rejected` after each call of the controller."""

    capabilities = HTTP_CAPABILITIES

    def __init__(
        self,
        instances: Mapping[int, HttpInstance],
        latency: LearnedLatency,
        start: Start,
        clock: Callable[[], float],
    ) -> None:
        self._instances, self._latency, self._start, self._clock = instances, latency, start, clock
        self.paused: list[tuple[SpanEntry, float]] = []
        """Spans whose streams were closed for a pause, with the share of their time that had gone by."""
        self.done: list[HttpRequest] = []
        """Requests that had ended when the policy enqueued their decode."""
        self.rejected: list[tuple[HttpRequest, str]] = []
        """Requests that the policy refused, with the reason."""

    # -- predictions --------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        if len(spans) > 1:
            raise ActionImpossible("HTTP instances make their own batches")
        span = spans[0]
        if self._instances[span.group[0]].state != "ready":
            raise ActionImpossible(f"instance {span.group[0]} is not there")
        return self._latency.prompt_s(span.group[0], span.end - span.start)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens = request.prompt_tokens - request.cached_tokens
        return tokens, self._latency.prompt_s(group[0], tokens)

    def busy_s(self, group: tuple[int, ...]) -> float:
        now = self._clock()
        left_s = max(self._instances[i].queue.left_s(now) for i in group)
        return now + left_s if left_s else 0.0

    def refresh(self, instance: int) -> SchedulerStats:
        there, now = self._instances[instance], self._clock()
        queue, load = there.queue, there.load
        left_s = queue.left_s(now)
        # Others may use the server too: its own count has their requests.
        running = max(queue.requests, load.running + load.waiting)
        used = round(load.kv_usage * load.kv_tokens)
        return SchedulerStats(now + left_s if left_s else 0.0, queue.queued_tokens, used, running)

    # -- actions ------------------------------------------------------------------------------------------------------

    def begin(self, entry: SpanEntry, now: float) -> None:
        request: HttpRequest = entry.controlled.backend_state
        request.entry = entry
        self._start(request, entry.group[0])

    def pause(self, entry: SpanEntry, now: float) -> None:
        request: HttpRequest = entry.controlled.backend_state
        if request.stream is None or request.stream.first:
            raise ActionImpossible(f"{entry.owner} has its first token")
        began_s, before = request.stream.sent_s, entry.elapsed_share(1)
        self._stop(request)
        request.life.pause()
        # How far it has come the instance does not say: as far as its predicted time goes, and never to the end.
        gone = (now - began_s) / max(entry.predicted_s, 1e-9)
        self.paused.append((entry, min(0.95, before + gone)))

    def stop(self, entry: SpanEntry, now: float) -> None:
        """Do nothing: the request is forgotten next, which closes its stream."""

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        request: HttpRequest = controlled.backend_state
        if request.life.over:
            self.done.append(request)
            return
        if request.stream is not None:
            # A decode goes on in the stream of its prefill, unless it is to go on elsewhere: then it is computed again.
            if request.stream.instance == group[0]:
                return
            self._stop(request)
            request.life.pause()
        self._start(request, group[0])

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        request: HttpRequest = controlled.backend_state
        if why == "moved" and not request.life.over:
            self._stop(request)
            request.life.pause()
        return request.attempt_tokens

    def send(self, kv_slice: KvSlice, now: float) -> None:
        """Never called: `capabilities` has no KV transfer."""
        raise ActionImpossible("HTTP instances move no KV")

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        request: HttpRequest = controlled.backend_state
        self._stop(request)
        for each in self._instances.values():
            each.queue.remove(controlled.request.id, now)
        if why is not None and controlled.rejected:
            self.rejected.append((request, why))
        return False

    def pump(self, now: float) -> None:
        """Do nothing: servers continue by themselves."""

    def _stop(self, request: HttpRequest) -> None:
        """Close a request's stream, if it has one."""
        stream, request.stream = request.stream, None
        if stream is not None:
            stream.close()
            self._instances[stream.instance].queue.remove(request.name, self._clock())
            if stream.prefill is not None:
                stream.prefill.queue.remove(request.name, self._clock())


class PrefillServers:
    """Those of a cluster's instances. Where none is ready, requests are computed whole where they decode."""

    def __init__(self, instances: Mapping[int, HttpInstance]) -> None:
        self._servers = [each for each in instances.values() if not each.decodes]

    def choose(self, request: str, prompt_tokens: int, now: float) -> HttpInstance | None:
        """Return the instance that is to compute a prompt, which counts as queued there; None: none is ready."""
        ready = [each for each in self._servers if each.state == "ready"]
        if not ready:
            return None
        chosen = min(ready, key=lambda each: (each.queue.left_s(now), each.queue.requests, each.number))
        chosen.queue.add(request, prompt_tokens, now)
        return chosen

    def done(self, stream: AnswerStream, request: str, now: float) -> None:
        """Record that the prompt of a stream is computed."""
        prefill, stream.prefill = stream.prefill, None
        if prefill is not None:
            prefill.note_alive()
            prefill.queue.first_token(request, now)
            prefill.queue.remove(request, now)
