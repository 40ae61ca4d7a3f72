"""Drives one `ClusterController` over HTTP instances: streams in, decisions and retries out.

A request whose instance is lost, refuses it or breaks off begins another attempt with the tokens so far. All methods
are called on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from typing import cast

from headway.control.controller import ClusterController
from headway.core.errors import HeadwayError, InvariantError, OverloadedError, RequestError, UnavailableError
from headway.policy.placement.base import PlacementPolicy
from headway.policy.placement.view import ClusterLinks, ClusterState
from headway.runtime.cluster.policies import PlacementChain, may_of
from headway.runtime.engine.protocol import FinishReason
from headway.runtime.http_cluster.completion_body import completion_body, request_headers
from headway.runtime.http_cluster.http_backend import HttpBackend
from headway.runtime.http_cluster.http_instance import HttpInstance
from headway.runtime.http_cluster.http_request import AnswerStream, HttpRequest
from headway.runtime.http_cluster.http_server import ServerBusyError, ServerGoneError, StreamedTokens
from headway.runtime.http_cluster.prefill_queue import LearnedLatency

log = logging.getLogger("headway.cluster")

_MOST_LOSSES = 6
"""Attempts that may be lost; with one more the request counts as the cause."""
_MOST_REFUSALS = 4
"""Refusals of a request that has no output, for each instance, before its client gets 429."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
"""Seconds before another attempt after a loss, unless its instance is known to be gone; doubled with each."""
_LARGE_PROMPT = 1 << 16
"""Bytes of a prompt that is written as JSON in a thread."""


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
        event loop's clock. Instances count as lost until `joined`."""
        self.instances, self._api_key, self._clock = instances, api_key, clock
        self._end_tokens = frozenset(end_tokens)
        self.requests: dict[str, HttpRequest] = {}
        self._homeless: list[HttpRequest] = []
        """Requests that wait until an instance is ready."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._settling = False
        self.retries_total = 0
        state = ClusterState([each.initial_instance for each in instances.values()], links)
        self.backend = HttpBackend(instances, latency, self._open, clock)
        self._policies = PlacementChain(make, lambda name, number: self._may(name, number))
        self.machine = ClusterController(state, self.backend, self._policies, layers=layers)
        self._may = may_of(self.machine)
        for number in instances:
            self.machine.lost(number, clock())

    @property
    def able(self) -> bool:
        """Whether an instance takes requests."""
        return any(each.state == "ready" for each in self.instances.values())

    @property
    def unplaced(self) -> int:
        """Requests that are on no instance now."""
        return sum(not request.life.on_instance for request in self.requests.values())

    def placed(self, number: int) -> int:
        """Return the number of requests that an instance has now."""
        return sum(request.life.instance == number for request in self.requests.values())

    def free_in_s(self, number: int) -> float:
        """Return the predicted seconds until all that is placed on an instance is prefilled."""
        return max(0.0, self.machine.cluster.instances[number].free_at_s - self._clock())

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
            self._homeless.append(request)
            return
        attempt = request.attempt()
        request.controlled = self.machine.arrive(attempt, self._clock(), request)

    def _again(self, request: HttpRequest, after_s: float) -> None:
        """Begin another attempt after a pause."""

        def due() -> None:
            self._timers.discard(timer)
            if not request.life.over and self.requests.get(request.submit.id) is request:
                self._place(request)
                self.settle()

        self.retries_total += 1
        timer = asyncio.get_running_loop().call_later(after_s, due)
        self._timers.add(timer)

    def _drop(self, request: HttpRequest, why: str) -> None:
        """Take the attempt under way from the controller, which closes its stream."""
        controlled, request.controlled = request.controlled, None
        if controlled is not None:
            self.machine.drop(controlled, why, self._clock())

    def _fail(self, request: HttpRequest, error: Exception) -> None:
        request.fail(error)
        self.leave(request, str(error))

    # -- streams ------------------------------------------------------------------------------------------------------

    def _open(self, request: HttpRequest, number: int) -> None:
        """Send a request to an instance; called by the backend."""
        now = self._clock()
        continuation = request.life.place(number)
        stream = request.stream = AnswerStream(number, now)
        tokens = request.submit.prompt_tokens + len(continuation.output)
        self.instances[number].queue.add(request.name, tokens, now)
        headers = request_headers(request.submit, request.life.attempts, self._api_key)
        prompt, model = request.prompt, self.instances[number].model.id

        async def run() -> None:
            try:
                arguments = (request.submit, prompt, model, continuation)
                if memoryview(prompt).nbytes > _LARGE_PROMPT:
                    body = await asyncio.to_thread(completion_body, *arguments)
                else:
                    body = completion_body(*arguments)
                async with aclosing(self.instances[number].server.complete(body, headers)) as pieces:  # type: ignore[type-var]
                    async for piece in pieces:
                        self._heard(request, stream, piece)
            except HeadwayError as error:
                self._broke(request, stream, error)
            except Exception:
                log.exception("the cluster has failed at %s", request.name)
                self._broke(request, stream, InvariantError("the cluster has failed at this request; see its log"))

        stream.task = asyncio.get_running_loop().create_task(run())

    def _heard(self, request: HttpRequest, stream: AnswerStream, piece: StreamedTokens) -> None:
        """Take in a part of an answer."""
        if request.stream is not stream:
            return
        now, life = self._clock(), request.life
        self.instances[stream.instance].heard()
        if life.state == "placed":
            life.accept()
            request.begun(now)
        if piece.finish not in (None, "stop", "length"):
            raise ServerGoneError(f"the instance ended the request ({piece.finish})")
        if not piece.tokens and piece.finish is None:
            return
        tokens, stop = self._without_end(request, piece)
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

    def _without_end(self, request: HttpRequest, piece: StreamedTokens) -> tuple[tuple[int, ...], int | None]:
        """Return an event's tokens without the end token that vLLM reports as the last, and that token."""
        params = request.submit.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_tokens)
        if piece.finish == "stop" and piece.tokens and piece.tokens[-1] in ends:
            return piece.tokens[:-1], piece.tokens[-1]
        return piece.tokens, None

    def _prefilled(self, request: HttpRequest, now: float) -> None:
        """Tell the controller of a first token."""
        controlled, entry = request.controlled, request.entry
        assert controlled is not None
        if entry is not None and entry.state == "running":
            self.machine.span_done(entry, now)
        elif controlled.resident and controlled.phase == "prefill":
            self.machine.left_scheduler(controlled, request.attempt_tokens, False, now)

    def _finish(
        self, request: HttpRequest, reason: FinishReason, new: tuple[int, ...], stop: int | None, first: bool
    ) -> None:
        """End a request with all of its output."""
        request.life.finish()
        # The connection ends by itself.
        request.stream = None
        request.send(new, reason, stop)
        self.requests.pop(request.submit.id, None)
        controlled, entry, now = request.controlled, request.entry, self._clock()
        if controlled is not None and not controlled.ended:
            if first and entry is not None and entry.state == "running":
                self.machine.span_done(entry, now, (request.name,))
            elif controlled.resident:
                self.machine.left_scheduler(controlled, request.attempt_tokens, True, now)
            # Else the policy has still to enqueue its decode, which ends as it begins (`HttpBackend.done`).
        self.settle()

    def _broke(self, request: HttpRequest, stream: AnswerStream, error: HeadwayError) -> None:
        """Take in the end of a stream without a finish reason: try again, or fail the request."""
        if request.stream is not stream:
            return
        self.instances[stream.instance].queue.remove(request.name, self._clock())
        request.stream = None
        if isinstance(error, ServerBusyError):
            self._refused(request, error)
        elif isinstance(error, ServerGoneError):
            log.info("%s: %s; it goes on with %d tokens", request.name, error, len(request.life.output))
            self.instances[stream.instance].probe_now()
            self._lost(request, min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0**request.life.losses))
        else:
            self._fail(request, error)
        self.settle()

    def _refused(self, request: HttpRequest, error: ServerBusyError) -> None:
        request.life.refuse()
        most = _MOST_REFUSALS * max(1, len(self.instances))
        if request.life.refusals >= most and not request.life.output:
            self._fail(request, OverloadedError(f"all instances are busy: {error}", error.retry_after_s))
            return
        self._drop(request, str(error))
        self._again(request, error.retry_after_s)

    def _lost(self, request: HttpRequest, after_s: float) -> None:
        """Begin another attempt of a request whose instance is gone, or end it where nothing is missing."""
        if request.complete and request.life.state in ("prefilling", "decoding"):
            self._finish(request, "length", (), None, False)
            return
        request.life.lose()
        if request.life.losses > _MOST_LOSSES:
            why = f"{request.life.losses} attempts at the request were lost; it is not tried again"
            self._fail(request, UnavailableError(why, 30.0))
            return
        self._drop(request, "its instance is gone")
        self._again(request, after_s)

    # -- instances ----------------------------------------------------------------------------------------------------

    def joined(self, number: int) -> None:
        """See `InstanceListener.joined`."""
        log.info("instance %d is ready at %s", number, self.instances[number].server.url)
        self.machine.open(self.instances[number].initial_instance, self._clock())
        self.renew()

    def lost(self, number: int) -> None:
        """See `InstanceListener.lost`."""
        known: dict[str, HttpRequest] = {
            name: controlled.backend_state for name, controlled in self.machine.requests.items()
        }
        for gone in self.machine.lost(number, self._clock()):
            request = known[gone.id]
            if request.life.over:
                continue
            # A request that only waited for the instance has lost nothing.
            if request.life.state in ("queued", "retrying"):
                self._again(request, 0.0)
            else:
                self._lost(request, 0.0)
        self.renew()

    def measured(self, number: int) -> None:
        """See `InstanceListener.measured`."""
        self.machine.changed((number,), self._clock())

    def drain(self, number: int) -> None:
        """Place nothing new on an instance; `quiet` tells when nothing is left there."""
        self.machine.close(number, self._clock())
        self.renew()

    def quiet(self, number: int) -> bool:
        """Whether no request is or will be on an instance."""
        return self.machine.quiet(number)

    def renew(self) -> None:
        """Begin with a new policy after a change of membership; what the old one had not placed goes to it."""
        for name in self._policies.renew():
            self._replace(name)
        if self.able:
            homeless, self._homeless = self._homeless, []
            for request in homeless:
                if not request.life.over:
                    self._place(request)
        self.settle()

    def _replace(self, name: str) -> None:
        """Give a request that no policy has placed to the newest one."""
        controlled = self.machine.requests.get(name)
        if controlled is not None:
            request: HttpRequest = controlled.backend_state
            self._drop(request, "instances have come or gone")
            self._again(request, 0.0)

    # -- the event loop -----------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the controller act on all pending events. Called again from inside, it does nothing: the outer call goes
        round until nothing is pending."""
        if self._settling:
            return
        self._settling = True
        try:
            while True:
                now = self._clock()
                # Remaining prefill time shrinks with the clock, not with an event.
                self.machine.changed((n for n, each in self.instances.items() if each.queue.unanswered), now)
                wake_s = self.machine.settle(now)
                if not self._follow():
                    break
        finally:
            self._settling = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if wake_s is not None:
            delay_s = max(0.0, wake_s - self._clock())
            self._alarm = asyncio.get_running_loop().call_later(delay_s, self._woken, wake_s)

    def _woken(self, at_s: float) -> None:
        self._alarm = None
        # A timer may fire a clock tick early.
        self.machine.woken(max(at_s, self._clock()))
        self.settle()

    def _follow(self) -> bool:
        """Report what came up inside calls of the controller, which is not re-entrant; True if there was any."""
        now, backend = self._clock(), self.backend
        paused, backend.paused[:] = list(backend.paused), []
        for entry, share in paused:
            if entry.state == "running":
                self.machine.span_paused(entry, 0, now, share=share)
        done, backend.done[:] = list(backend.done), []
        for request in done:
            if request.controlled is not None and request.controlled.resident:
                self.machine.left_scheduler(request.controlled, request.attempt_tokens, True, now)
        rejected, backend.rejected[:] = list(backend.rejected), []
        for request, why in rejected:
            request.fail(RequestError(why))
            self.requests.pop(request.submit.id, None)
        # Requests that no policy owns: their placement raised, or named instances that are gone.
        stranded, self._policies.stranded[:] = list(self._policies.stranded), []
        for name in stranded:
            controlled = self.machine.requests.get(name)
            if controlled is not None:
                self._strand(controlled.backend_state)
        return bool(paused or done or rejected or stranded)

    def _strand(self, request: HttpRequest) -> None:
        """Place a request again after a pause; one that is never placed fails."""
        request.stranded += 1
        if request.stranded > _MOST_LOSSES:
            self._fail(request, UnavailableError("no instance can be chosen for the request; see the log", 5.0))
            return
        self._drop(request, "its placement failed")
        self._again(request, _PAUSE_S * request.stranded)

    def close(self) -> None:
        """Cancel all timers, and end all requests."""
        for timer in (self._alarm, *self._timers):
            if timer is not None:
                timer.cancel()
        self.give_up(UnavailableError("the server is closing"))
