"""Drives one `ClusterController` over HTTP instances: streams in, decisions and retries out.

A request whose instance is lost, refuses it or breaks off begins another attempt with the tokens so far. All methods
are called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import cast

from headway.control.controller import ClusterController
from headway.core.errors import HeadwayError, OverloadedError, RequestError, UnavailableError
from headway.policy.placement.contract import ClusterLinks, ClusterState, PlacementPolicy
from headway.runtime.cluster.driver import SettlingLoop
from headway.runtime.cluster.http_backend import HttpBackend, HttpInstance, HttpRequest, LearnedLatency, PrefillServers
from headway.runtime.cluster.http_server import (
    AnswerStream,
    ServerBusyError,
    ServerGoneError,
    StreamedTokens,
    read_answer,
    without_end_token,
)
from headway.runtime.cluster.policies import PlacementChain
from headway.runtime.engine.protocol import FinishReason

_MOST_LOSSES = 6
"""Attempts that may be lost; with one more the request counts as the cause."""
_MOST_REFUSALS = 4
"""Refusals of a request that has no output, for each instance, before its client gets 429."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
"""Seconds before another attempt after a loss, unless its instance is known to be gone; doubled with each."""


class HttpRetries:
    """Counts a request's failed attempts, and begins the next ones."""

    def __init__(
        self,
        instances: int,
        place: Callable[[HttpRequest], None],
        drop: Callable[[HttpRequest, str], None],
        settle: Callable[[], None],
    ) -> None:
        """instances: of the cluster. place: begins another attempt. drop: takes the one under way from the controller.
        settle: called after an attempt that began by itself, at the end of its pause."""
        self._most_refusals = _MOST_REFUSALS * max(1, instances)
        self._place, self._drop, self._settle = place, drop, settle
        self._homeless: list[HttpRequest] = []
        self._timers: set[asyncio.TimerHandle] = set()
        self.total = 0
        """Attempts that followed another one."""

    def wait(self, request: HttpRequest) -> None:
        """Keep a request until `release`: no instance is ready."""
        self._homeless.append(request)

    def release(self) -> None:
        """Place the requests that wait for an instance."""
        homeless, self._homeless = self._homeless, []
        for request in homeless:
            if not request.life.over:
                self._place(request)

    def again(self, request: HttpRequest, why: str, after_s: float = 0.0) -> None:
        """Begin another attempt after a pause."""

        def due() -> None:
            self._timers.discard(timer)
            if not request.life.over:
                self._place(request)
                self._settle()

        self._drop(request, why)
        self.total += 1
        timer = asyncio.get_running_loop().call_later(after_s, due)
        self._timers.add(timer)

    # Each of these returns the error of a request that is not tried again.

    def refused(self, request: HttpRequest, error: ServerBusyError) -> Exception | None:
        """Try again when the instance said: it is too busy."""
        request.life.refuse()
        if request.life.refusals >= self._most_refusals and not request.life.output:
            return OverloadedError(f"all instances are busy: {error}", error.retry_after_s)
        self.again(request, str(error), error.retry_after_s)
        return None

    def lost(self, request: HttpRequest, known: bool) -> Exception | None:
        """Try again: the stream broke off. known: its instance is known to be lost, so that there is no pause."""
        after_s = 0.0 if known else min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0**request.life.losses)
        request.life.lose()
        if request.life.losses > _MOST_LOSSES:
            why = f"{request.life.losses} attempts at the request were lost; it is not tried again"
            return UnavailableError(why, 30.0)
        self.again(request, "its instance is gone", after_s)
        return None

    def stranded(self, request: HttpRequest) -> Exception | None:
        """Try again after a pause: no instance was chosen though there is one."""
        request.stranded += 1
        if request.stranded > _MOST_LOSSES:
            return UnavailableError("no instance can be chosen for the request; see the log", 5.0)
        self.again(request, "its placement failed", _PAUSE_S * request.stranded)
        return None

    def close(self) -> None:
        """Cancel all pauses."""
        for timer in self._timers:
            timer.cancel()


log = logging.getLogger("headway.cluster")


class HttpController:
    """See the module."""

    def __init__(
        self,
        instances: Mapping[int, HttpInstance],
        links: ClusterLinks,
        make: Callable[[], PlacementPolicy],
        latency: LearnedLatency,
        layers: int,
        end_tokens: Iterable[int],
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """make: returns a new policy. end_tokens: of the model. api_key: sent to the instances. clock: seconds, of the
        event loop's clock. Instances count as lost until `joined`. Those of role prefill have the highest
        numbers: policies do not see them."""
        self.instances, self._api_key, self._clock = instances, api_key, clock
        self._end_tokens = frozenset(end_tokens)
        self.requests: dict[str, HttpRequest] = {}
        state = ClusterState([each.initial_instance for each in instances.values() if each.decodes], links)
        self._prefill = PrefillServers(instances)
        self.backend = HttpBackend(instances, latency, self._open, clock)
        self._policies = PlacementChain(make)
        self.controller = ClusterController(state, self.backend, self._policies, layers=layers)

        def prefilling() -> list[int]:
            return [n for n, each in instances.items() if each.queue.unanswered and each.decodes]

        self._loop = SettlingLoop(self.controller, prefilling, self._follow, clock)
        self.retries = HttpRetries(len(instances), self._place, self._drop, self.settle)
        for number in range(len(state.instances)):
            self.controller.lost(number, clock())

    @property
    def able(self) -> bool:
        """Whether an instance takes requests."""
        return any(each.state == "ready" and each.decodes for each in self.instances.values())

    @property
    def unplaced(self) -> int:
        """Requests that are on no instance now."""
        return sum(not request.life.on_instance for request in self.requests.values())

    def figures(self, number: int) -> tuple[int, float]:
        """Return an instance's requests, and the predicted seconds until all that is placed there is prefilled."""
        if not self.instances[number].decodes:
            queue = self.instances[number].queue
            return queue.requests, queue.left_s(self._clock())
        placed = sum(request.life.instance == number for request in self.requests.values())
        return placed, max(0.0, self.controller.cluster.instances[number].free_at_s - self._clock())

    # -- clients ------------------------------------------------------------------------------------------------------

    def ask(self, request: HttpRequest) -> None:
        """Accept a request, and place it if that is possible now."""
        self.requests[request.submit.id] = request
        self._place(request)
        self.settle()

    def leave(self, request: HttpRequest, why: str = "its client left") -> None:
        """Drop a request whose output is not awaited any more. Harmless when it has ended."""
        request.life.fail()
        if self.requests.get(request.submit.id) is request:
            del self.requests[request.submit.id]
        self._drop(request, why)
        self.settle()

    def give_up(self, error: HeadwayError) -> None:
        """Fail all requests: no instance is left."""
        for request in list(self.requests.values()):
            self._fail(request, error)

    def _place(self, request: HttpRequest) -> None:
        """Begin an attempt, or wait for an instance."""
        if not self.able:
            self.retries.wait(request)
            return
        attempt = request.attempt()
        hits = tuple(each.cached_tokens(request, attempt.prompt_tokens) for each in self.instances.values())
        request.cached = hits if any(hits) else ()
        request.controlled = self.controller.arrive(attempt, self._clock(), request, request.cached)

    def _drop(self, request: HttpRequest, why: str) -> None:
        """Take the attempt under way from the controller, which closes its stream."""
        controlled, request.controlled = request.controlled, None
        if controlled is not None:
            self.controller.drop(controlled, why, self._clock())

    def _fail(self, request: HttpRequest, error: Exception | None) -> None:
        """End a request with an error; None: nothing has failed."""
        if error is not None:
            request.fail(error)
            self.leave(request, str(error))

    # -- streams ------------------------------------------------------------------------------------------------------

    def _open(self, request: HttpRequest, number: int) -> None:
        """Send a request to an instance; called by the backend."""
        now = self._clock()
        continuation, target = request.life.place(number), self.instances[number]
        tokens = request.submit.prompt_tokens + len(continuation.output)
        cached = request.cached[number] if request.cached else 0
        target.queue.add(request.name, tokens - cached, now)
        target.cached.use(request.text.keys, target.load.kv_tokens)
        prefill = self._prefill.choose(request.name, tokens, now)
        stream = request.stream = AnswerStream(number, now, prefill)
        receive, broken = partial(self._receive, request, stream), partial(self._broken, request, stream)
        reading = read_answer(request, target, prefill, continuation, self._api_key, receive, broken)
        stream.task = asyncio.get_running_loop().create_task(reading)

    def _receive(self, request: HttpRequest, stream: AnswerStream, piece: StreamedTokens) -> None:
        """Take in a part of an answer."""
        if request.stream is not stream:
            return
        now, life = self._clock(), request.life
        if stream.prefill is None:
            self.instances[stream.instance].note_alive()
        else:
            # Its part is done with the first piece.
            self._prefill.done(stream, request.name, now)
        if life.state == "placed":
            life.accept()
            request.begun(now)
        if piece.finish not in (None, "stop", "length"):
            raise ServerGoneError(f"the instance ended the request ({piece.finish})")
        if not piece.tokens and piece.finish is None:
            return
        tokens, stop = without_end_token(request.submit, self._end_tokens, piece)
        new = life.receive(tokens)
        first, stream.first = not stream.first, True
        if first:
            self.instances[stream.instance].queue.first_token(request.name, now)
        if piece.finish is not None:
            self._finish(request, cast(FinishReason, piece.finish), new, stop, first)
        elif new or first:
            if new:
                request.send(new)
            # A token in the middle of an answer changes no plan.
            if first:
                self._prefilled(request, now)
                self.settle()

    def _prefilled(self, request: HttpRequest, now: float) -> None:
        """Tell the controller of a first token."""
        controlled, entry = request.controlled, request.entry
        assert controlled is not None
        if entry is not None and entry.state == "running":
            self.controller.span_done(entry, now)
        elif controlled.resident and controlled.phase == "prefill":
            self.controller.left_scheduler(controlled, request.attempt_tokens, False, now)

    def _finish(
        self, request: HttpRequest, reason: FinishReason, new: tuple[int, ...], stop: int | None, first: bool
    ) -> None:
        """End a request with all of its output."""
        request.life.finish()
        # The connection ends by itself.
        stream, request.stream = request.stream, None
        request.send(new, reason, stop)
        if stream is not None:
            there = self.instances[stream.instance]
            there.cached.use(request.text.keys, there.load.kv_tokens)
        self.requests.pop(request.submit.id, None)
        controlled, entry, now = request.controlled, request.entry, self._clock()
        if controlled is not None and not controlled.ended:
            if first and entry is not None and entry.state == "running":
                self.controller.span_done(entry, now, (request.name,))
            elif controlled.resident:
                self.controller.left_scheduler(controlled, request.attempt_tokens, True, now)
            # Else the policy has still to enqueue its decode, which ends as it begins (`HttpBackend.done`).
        self.settle()

    def _broken(self, request: HttpRequest, stream: AnswerStream, error: HeadwayError) -> None:
        """Take in the end of a stream without a finish reason: try again, or fail the request."""
        if request.stream is not stream:
            return
        self.instances[stream.instance].queue.remove(request.name, self._clock())
        request.stream = None
        if stream.prefill is not None:
            stream.prefill.queue.remove(request.name, self._clock())
            stream.prefill.probe_now()
        if isinstance(error, ServerBusyError):
            self._fail(request, self.retries.refused(request, error))
        elif isinstance(error, ServerGoneError):
            log.info("%s: %s; it goes on with %d tokens", request.name, error, len(request.life.output))
            self.instances[stream.instance].probe_now()
            self._lost(request, known=False)
        else:
            self._fail(request, error)
        self.settle()

    def _lost(self, request: HttpRequest, known: bool) -> None:
        """Begin another attempt of a request whose stream broke off, or end it where nothing is missing."""
        if request.complete and request.life.state in ("prefilling", "decoding"):
            self._finish(request, "length", (), None, False)
        else:
            self._fail(request, self.retries.lost(request, known))

    # -- instances ----------------------------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """See `HttpCluster.joined`."""
        log.info("instance %d is ready at %s", number, self.instances[number].server.url)
        if not self.instances[number].decodes:
            return
        self.controller.open(self.instances[number].initial_instance, self._clock())
        self.renew()

    def lost(self, number: int) -> None:
        """See `HttpCluster.lost`."""
        for request in list(self.requests.values()):
            stream = request.stream
            if stream is not None and stream.prefill is self.instances[number]:
                stream.close()
                self._broken(request, stream, ServerGoneError(f"instance {number}, which prefills it, is gone"))
        if not self.instances[number].decodes:
            return
        known: dict[str, HttpRequest] = {
            name: controlled.backend_state for name, controlled in self.controller.requests.items()
        }
        for gone in self.controller.lost(number, self._clock()):
            request = known[gone.id]
            if request.life.over:
                continue
            # A request that only waited for the instance has lost nothing.
            if request.life.state in ("queued", "retrying"):
                self.retries.again(request, "its instance is gone")
            else:
                self._lost(request, known=True)
        self.renew()

    def measured(self, number: int) -> None:
        """See `HttpCluster.measured`."""
        if self.instances[number].decodes:
            self.controller.changed((number,), self._clock())

    def drain(self, number: int) -> None:
        """Place nothing new on an instance; `quiet` tells when nothing is left there."""
        if self.instances[number].decodes:
            self.controller.close(number, self._clock())
            self.renew()

    def quiet(self, number: int) -> bool:
        """Whether no request is or will be on an instance."""
        if not self.instances[number].decodes:
            return not self.instances[number].queue.requests
        return self.controller.quiet(number)

    def renew(self) -> None:
        """Let the controller act on a change of membership, which its policies hear of."""
        if self.able:
            self.retries.release()
        self.settle()

    # -- the event loop -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the controller act on all pending events. Raises nothing (`SettlingLoop.settle`)."""
        self._loop.settle()

    def _follow(self) -> bool:
        """Report what came up inside calls of the controller, which is not re-entrant; True if there was any."""
        now, backend = self._clock(), self.backend
        paused, backend.paused[:] = list(backend.paused), []
        for entry, share in paused:
            if entry.state == "running":
                self.controller.span_paused(entry, 0, now, share=share)
        done, backend.done[:] = list(backend.done), []
        for request in done:
            if request.controlled is not None and request.controlled.resident:
                self.controller.left_scheduler(request.controlled, request.attempt_tokens, True, now)
        rejected, backend.rejected[:] = list(backend.rejected), []
        for request, why in rejected:
            request.fail(RequestError(why))
            self.requests.pop(request.submit.id, None)
        unplaced = [
            (name, failed) for name, failed in self._policies.unplaced.items() if name in self.controller.requests
        ]
        for name, failed in unplaced:
            request = self.controller.requests[name].backend_state
            if failed:
                self._fail(request, self.retries.stranded(request))
            else:
                self.retries.again(request, "instances have come or gone")
        return bool(paused or done or rejected or unplaced)

    def close(self) -> None:
        """Cancel all timers, and end all requests."""
        self._loop.close()
        self.retries.close()
        self.give_up(UnavailableError("the server is closing"))
