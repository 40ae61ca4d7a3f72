"""The requests that a live cluster has accepted: begun, tried again after a loss, ended; what KV they hold and need."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headway.control.controller import ClusterController
from headway.control.kv import KvClaim, gives_way, kv_needs
from headway.core.errors import InvariantError, UnavailableError
from headway.runtime.cluster.requests import AttemptTable, ClusterRequest, InstanceRegistry, RequestAttempt
from headway.runtime.engine.protocol import (
    ChunkSample,
    EngineSamples,
    FromInstance,
    IterationSample,
    KvArrived,
    SpanTaskDone,
    TransferSample,
)

MOST_RUNS_LOST = 16
"""Lost tasks, with or without an instance, after which a request is given up."""
PAUSE_S = 0.25
"""Seconds that a request waits after its first lost task, unless membership changes sooner: peers notice a loss before
the end of the process is seen. Doubled with each further loss, up to 5 s."""


class RetryQueue:
    """Requests between two attempts."""

    def __init__(self, ring: Callable[[], None], most_losses: int) -> None:
        """ring: called when a pause is over. most_losses: instances that may be lost with a request on them; with one
        more it counts as the cause."""
        self._ring, self._most_losses = ring, most_losses
        self._due: list[ClusterRequest] = []
        self._waiting: dict[str, ClusterRequest] = {}
        self._pausing: dict[str, tuple[ClusterRequest, asyncio.TimerHandle]] = {}
        self.lost_tokens = 0
        """Tokens whose KV was lost and has to be computed again."""

    def count(self, attempt: RequestAttempt) -> None:
        """Count the tokens of a failed attempt."""
        # One that never began has lost nothing.
        if attempt.runs or attempt.at is not None:
            self.lost_tokens += attempt.kv_tokens

    def soon(self, asked: ClusterRequest) -> None:
        """Try again at once."""
        self._due.append(asked)

    def later(self, asked: ClusterRequest) -> None:
        """Try again when instances have come or gone, or after a pause."""
        asked.runs_lost += 1
        pause_s = min(5.0, PAUSE_S * 2.0 ** (asked.runs_lost - 1))
        timer = asyncio.get_running_loop().call_later(pause_s, self._paused, asked.submit.id)
        self._pausing[asked.submit.id] = asked, timer

    def wait(self, asked: ClusterRequest) -> None:
        """Keep a request until the cluster can place requests again."""
        asked.name = ""
        self._waiting[asked.submit.id] = asked

    def release(self, able: bool) -> None:
        """End all pauses after a change of membership. able: requests can be placed; end the other waits too."""
        # A lost instance is known now: a pause had only been waiting for that.
        for asked, timer in self._pausing.values():
            timer.cancel()
            self._due.append(asked)
        self._pausing.clear()
        if able:
            self._due += self._waiting.values()
            self._waiting.clear()

    def take(self) -> list[ClusterRequest]:
        """Return the requests that are due, each once."""
        due, self._due = self._due, []
        return due

    def forget(self, asked: ClusterRequest) -> None:
        """Drop a request that has ended."""
        name = asked.submit.id
        self._waiting.pop(name, None)
        if name in self._pausing:
            self._pausing.pop(name)[1].cancel()

    def lost_with(self, asked: ClusterRequest) -> Exception | None:
        """Count an instance that was lost with a request on it; return the error if that was one too many."""
        asked.losses += 1
        if asked.losses <= self._most_losses:
            return None
        why = f"{asked.losses} instances were lost with the request on them; it is not tried again"
        return UnavailableError(why, 30.0)

    def given_up(self, asked: ClusterRequest) -> Exception | None:
        """Return the error of a request that lost too many tasks; None: it may be tried again."""
        if asked.runs_lost < MOST_RUNS_LOST:
            return None
        return UnavailableError(f"runs of the request were lost {asked.runs_lost} times; try again later", 5.0)

    def close(self) -> None:
        """Cancel all timers."""
        for _, timer in self._pausing.values():
            timer.cancel()

    def _paused(self, name: str) -> None:
        if name in self._pausing:
            self._due.append(self._pausing.pop(name)[0])
            self._ring()


def kv_claim(attempt: RequestAttempt, blocks: Callable[[int, int], int]) -> KvClaim:
    """Return the claim of an attempt, at most what it can come to. blocks: rounds (instance, tokens) up to blocks."""
    known = attempt.kv_tokens
    # The whole prompt's from the begin of its first span on: `KvAdmission` has reserved that.
    if attempt.entry is not None and attempt.runs:
        has = kv_needs(attempt.entry)
    elif attempt.spread:
        has = dict.fromkeys(attempt.spread, -(-known // len(attempt.spread)))
    else:
        has = dict.fromkeys(attempt.whole, known)
    needs, turns = {}, {}
    for number, reserved in attempt.room.items():
        # Beside the instance's share of spans, if it has one: the two lie apart.
        tokens = blocks(number, reserved.tokens)
        if reserved.granted:
            has[number] = tokens + has.get(number, 0)
        else:
            needs[number], turns[number] = tokens, reserved.serial
    if attempt.at is not None:
        has[attempt.at] = max(known, has.get(attempt.at, 0))
        needs[attempt.at] = needs.get(attempt.at, 0) + attempt.asked.left
    has = {number: blocks(number, tokens) for number, tokens in has.items()}
    return KvClaim(attempt.request.id, has, needs, turns, attempt.at is not None and not turns)


log = logging.getLogger("headway.cluster")


class LiveRequests:
    """All requests without a complete answer, by their clients' ids."""

    def __init__(
        self,
        controller: ClusterController,
        registry: InstanceRegistry,
        attempts: AttemptTable,
        most_losses: int,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """most_losses: instances that may be lost with a request on them; with one more the request counts as the
        cause. settle: lets the controller act on what is pending."""
        self._controller, self._registry, self._settle, self._clock = controller, registry, settle, clock
        self.attempts = attempts
        self.asked: dict[str, ClusterRequest] = {}
        self.retries = RetryQueue(settle, most_losses)
        self.not_placeable: str | None = None
        """Why no request can be placed; None: requests can be placed."""
        self.longest = 0
        """Tokens of the longest request that the instances there now hold; 0: not limited."""

    @property
    def waiting(self) -> int:
        """Requests that have not begun anywhere."""
        begun = sum(1 for each in self.attempts if each.at is not None or each.runs)
        return len(self.asked) - begun

    @property
    def unanswered(self) -> int:
        """Requests without a first token."""
        return sum(1 for asked in self.asked.values() if not asked.answered)

    @property
    def running(self) -> int:
        """Requests with a span under way."""
        return sum(1 for attempt in self.attempts if attempt.running)

    # -- clients ------------------------------------------------------------------------------------------------------

    def leave(self, asked: ClusterRequest, why: str = "its client left") -> None:
        """Drop a request whose output is not awaited any more. Harmless when the request has ended."""
        if self.asked.pop(asked.submit.id, None) is None:
            return
        self.retries.forget(asked)
        attempt = self.attempts.named(asked.name)
        if attempt is None:
            return
        try:
            self._controller.drop(attempt.controlled, why, self._clock())
        except Exception:
            # The controller's own clean-up did not finish: free the instances directly, or their KV would leak.
            log.exception("the controller has failed at letting go of %s", attempt.wire)
            self._registry.forget(attempt)
            self.attempts.remove(attempt)
        self._settle()

    def fail(self, asked: ClusterRequest, error: Exception) -> None:
        """End a request with an error."""
        asked.fail(error)
        self.leave(asked)

    def fail_all(self, error: Exception) -> None:
        """Fail all requests: no instance is left, and none will join."""
        for asked in list(self.asked.values()):
            self.fail(asked, error)

    # -- attempts -----------------------------------------------------------------------------------------------------

    def begin(self, asked: ClusterRequest) -> None:
        """Accept a request, and begin the first or another attempt at it; fail it if the controller raises."""
        self.asked[asked.submit.id] = asked
        # Without a usable set of instances a policy would raise, and the instances there may be too few to hold the
        # request: it waits for the next change of membership.
        if self.not_placeable is not None or 0 < self.longest < asked.tokens:
            self.retries.wait(asked)
            return
        if (error := self.retries.given_up(asked)) is not None:
            self.fail(asked, error)
            return
        attempt = RequestAttempt(asked, asked.try_again())
        with self.isolate(attempt, f"placing {asked.submit.id}"):
            # One that failed behind a prefix begins without: its instance may have no room for a copy.
            attempt.cached = () if asked.prefix_failed else self._registry.cached_tokens(asked)
            self.attempts.add(attempt)
            attempt.controlled = self._controller.arrive(attempt.request, self._clock(), attempt, attempt.cached)

    def retry(self, attempt: RequestAttempt, why: str, later: bool = False) -> None:
        """Drop a failed attempt and queue the next one.

        later: begin it after a pause, or as soon as membership changes; otherwise in the same settling.
        """
        log.info("%s: %s; it begins again with %d tokens said", attempt.request.id, why, len(attempt.asked.told))
        self._controller.drop(attempt.controlled, why, self._clock())
        attempt.asked.prefix_failed |= bool(attempt.prefix)
        self.retries.count(attempt)
        if later:
            self.retries.later(attempt.asked)
        else:
            self.retries.soon(attempt.asked)

    def gives_way(self) -> tuple[RequestAttempt, bool] | None:
        """Return the attempt to begin again so that the others can have their KV (`control.kv`), and
        whether that lets another go on; None: all can go on."""
        age = {name: number for number, name in enumerate(self.asked)}
        attempts = sorted(self.attempts, key=lambda attempt: age.get(attempt.asked.submit.id, -1))
        found = gives_way(
            [kv_claim(attempt, self._registry.kv_blocks) for attempt in attempts], self._registry.kv.total
        )
        attempt = None if found is None else self.attempts.named(found[0])
        return None if found is None or attempt is None else (attempt, found[1])

    def begin_due(self) -> bool:
        """Begin the attempts that are due; return whether there were any."""
        begun = False
        for asked in self.retries.take():
            # The identity check: an id may be in use again.
            if not asked.over and self.asked.get(asked.submit.id) is asked:
                begun = True
                self.begin(asked)
        return begun

    def ended(self, attempt: RequestAttempt) -> None:
        """Forget a request whose last output, or error, has been sent."""
        self.asked.pop(attempt.asked.submit.id, None)

    @contextmanager
    def isolate(self, attempt: RequestAttempt | None, name: str) -> Iterator[None]:
        """Context in which an error fails its own request (HTTP 500) and nothing else.

        The error is the controller's, not that of the instance whose message is handled.
        """
        try:
            yield
        except Exception:
            log.exception("the controller has failed at %s", name)
            if attempt is not None:
                self.fail(attempt.asked, _own_failure())


def _own_failure() -> InvariantError:
    return InvariantError("the controller has failed at this request; its log says at what. Others go on")


def samples_of(number: int, message: FromInstance, attempt: RequestAttempt) -> EngineSamples | None:
    """Return the samples of a message of instance `number`; None for one that ends neither task nor slice."""
    name = attempt.asked.submit.id
    match message:
        case KvArrived():
            return EngineSamples(transfers=(TransferSample(name, message.source, message.began_s, message.ended_s),))
        case SpanTaskDone():
            return EngineSamples((_task(name, number, message, attempt),))
    return None


def _task(name: str, number: int, message: SpanTaskDone, attempt: RequestAttempt) -> IterationSample:
    begun_s = message.began_s
    # A group that decodes in place: the task is one token.
    if attempt.step is not None or message.index >= len(attempt.runs):
        return IterationSample(0, 0, begun_s, begun_s, message.ended_s, 0.0, 1)
    span = attempt.runs[message.index]
    prompt = max(span.end, attempt.request.prompt_tokens)
    limit = "rest of the prompt" if span.end >= prompt else "host or KV shard"
    # What the group computes together counts once: each instance shows its part.
    share = -(-(span.end - span.start) // len(span.group))
    start = min(span.end, span.start + share * span.group.index(number))
    chunk = ChunkSample(name, start, min(share, span.end - start), prompt - start, limit)
    return IterationSample(0, 0, begun_s, begun_s, message.ended_s, 0.0, 0, (chunk,))
