"""A cluster's requests, the attempts at them and when these begin again, their clients' deltas, and the instances by
number. Native instances and servers behind HTTP share all but `InstanceRegistry`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import msgspec

from headway.control.controller import ClusterController
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.control.kv import KvLoad, KvReservations
from headway.core.errors import InvariantError, UnavailableError
from headway.core.request import Request, SpanTask
from headway.kv.text_keys import TextKeys
from headway.runtime.cluster.instances import LiveInstance, RetryLimits, shares, text_of
from headway.runtime.engine.protocol import AbortRequest, MeetPeers, OutputDelta, SendKv, SubmitRequest
from headway.runtime.engine.requests import rejection_error

if TYPE_CHECKING:
    from headway.runtime.cluster.http_backend import HttpBackend, HttpInstance
    from headway.runtime.cluster.http_server import AnswerStream
    from headway.runtime.cluster.native_backend import LiveBackend

log = logging.getLogger("headway.cluster")


@contextmanager
def time_limit(submit: SubmitRequest, expire: Callable[[], None]) -> Iterator[None]:
    """Call `expire` when a request's time-out has passed since its arrival, if it has one, and not after the block."""
    timer: asyncio.TimerHandle | None = None
    if submit.timeout_s is not None:
        timer = asyncio.get_running_loop().call_at(submit.received_s + submit.timeout_s, expire)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


class ClusterRequest:
    """One request. After a loss, another attempt continues after the output that was sent to the client."""

    __slots__ = ("_answer", "_texts", "answered", "attempt", "cached_tokens", "first_s", "losses", "name", "over",
                 "prefix_failed", "prompt", "refusals", "runs_lost", "saved_s", "sends", "submit", "told")  # fmt: skip

    def __init__(self, submit: SubmitRequest, prompt: bytes | memoryview) -> None:
        self.submit, self.prompt = submit, prompt
        self.told: list[int] = list(submit.output)
        """Output tokens that the client has, those of before this cluster's start included."""
        self.answered = False
        """Whether any output was sent since it was accepted."""
        self.attempt = 0
        """Number of attempts so far."""
        self.runs_lost = 0
        """How often a task of it was lost, with or without an instance."""
        self.losses = 0
        """Number of instances that were lost with it on them."""
        self.name = ""
        """Name of the attempt under way; empty: it waits for instances."""
        self.over = False
        """Whether its last output, or its error, was sent."""
        self.first_s: float | None = None
        """Time at which its first task began; None again once a delta has carried it."""
        self.cached_tokens, self.saved_s = 0, 0.0
        """Tokens with which spans of the attempt under way began, and the seconds that these would have taken; 0 again
        once a delta has carried them."""
        self.prefix_failed = False
        """Whether an attempt was lost whose spans began behind a cached prefix."""
        self.refusals = 0
        """How often an instance was too busy for it, since the last token."""
        self.sends = 0
        """How often it was sent to a server."""
        self._answer: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()
        self._texts: dict[tuple[int, str | None], tuple[TextKeys, int]] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt and of all output that may come."""
        return self.submit.prompt_tokens + self.submit.params.max_tokens

    @property
    def left(self) -> int:
        """Number of output tokens that may still come."""
        return self.submit.params.max_tokens - len(self.told)

    def try_again(self) -> Request:
        """Return another attempt as a request of its own, whose prompt is the prompt and all output so far."""
        self.attempt += 1
        self.cached_tokens, self.saved_s = 0, 0.0
        submit = self.submit
        self.name = f"{submit.id}#{self.attempt}"
        return Request(
            id=self.name,
            arrival_s=submit.received_s,
            prompt_tokens=submit.prompt_tokens + len(self.told),
            max_output_tokens=self.left,
            slo=submit.slo,
            priority=submit.priority,
        )

    def tell(self, delta: OutputDelta) -> None:
        """Send an instance's output to the client, under the client's request id."""
        if self.over:
            return
        if delta.tokens:
            self.refusals = 0
        first_s = delta.first_scheduled_s if self.first_s is None else self.first_s
        cached, saved_s = delta.cached_tokens or self.cached_tokens, delta.saved_s or self.saved_s
        self.first_s, self.cached_tokens, self.saved_s = None, 0, 0.0
        self.told.extend(delta.tokens)
        self.answered = True
        self.over = delta.finish is not None
        sent = {"id": self.submit.id, "first_scheduled_s": first_s, "cached_tokens": cached, "saved_s": saved_s}
        self._answer.put_nowait(msgspec.structs.replace(delta, **sent))

    def fail(self, error: Exception) -> None:
        """End the request with an error. Harmless when it has ended."""
        if not self.over:
            self.over = True
            self._answer.put_nowait(error)

    async def next_delta(self) -> OutputDelta:
        """Return the next delta, once there is one. Raises the error that the request failed with."""
        item = await self._answer.get()
        error = item if isinstance(item, Exception) else rejection_error(item)
        if error is not None:
            raise error
        assert isinstance(item, OutputDelta)
        return item

    def text(self, block_tokens: int, salt: str | None = None) -> TextKeys:
        """Return the keys of its prompt and of what its client has of the answer. salt: see `text_of`."""
        submit, told = self.submit, self.told
        text, known = self._texts.get((block_tokens, salt), (None, 0))
        if text is None:
            text = text_of(submit, self.prompt, told, block_tokens, salt)
        else:
            for token in told[known:] if shares(submit) else ():
                text.append(token)
        self._texts[block_tokens, salt] = text, len(told)
        return text


class KvMovement(NamedTuple):
    """KV of a request on its way to one instance."""

    sources: set[int]
    """Instances whose part has not arrived."""
    then: Callable[[], None]
    """Called when all parts have."""


class ReservedKv:
    """Blocks for a request's KV on one instance, asked for or reserved."""

    __slots__ = ("granted", "serial", "tokens")

    def __init__(self, serial: int, tokens: int) -> None:
        """serial: see `ReserveKv`."""
        self.serial, self.tokens = serial, tokens
        self.granted = False


class RequestAttempt:
    """The state of one attempt at a request: its tasks, its KV, its residency and its migrations."""

    __slots__ = ("admitted", "asked", "at", "base", "cached", "controlled", "count", "early", "entry", "finished",
                 "gathers", "halts", "home", "left", "moving", "prefix", "request", "restarts", "room", "running",
                 "runs", "spread", "step", "steps", "stopping", "stream", "together", "token", "unsent", "wanted",
                 "whole")  # fmt: skip

    controlled: ControlledRequest

    def __init__(self, asked: ClusterRequest, request: Request) -> None:
        # `request` is what the policy sees.
        self.asked, self.request = asked, request
        self.restarts = 0
        """How often the request has restarted on another scheduler, under another id on the instances."""
        self.base = len(asked.told)
        """Output tokens that earlier attempts had emitted; they are part of this attempt's prompt."""
        self.cached: tuple[int, ...] = ()
        """Tokens of the prompt that each instance had cached when it began (`RequestArrived.cached`)."""
        self.admitted: set[int] = set()
        """Instances that have the prompt."""
        self.runs: list[SpanTask] = []
        """Tasks of the prompt's spans that have begun, in order."""
        self.prefix: tuple[SpanTask, ...] = ()
        """A made-up task for KV that they began with, from the prefix cache of one instance."""
        self.running: set[int] = set()
        """Instances that have not reported the end or the pause of the task under way."""
        self.entry: SpanEntry | None = None
        """The span under way."""
        self.stream: AnswerStream | None = None
        """The connection to the server that computes it."""
        self.spread: tuple[int, ...] = ()
        """The group over which the KV is distributed."""
        self.whole: set[int] = set()
        """Instances that have all of the KV, ready to decode."""
        self.at: int | None = None
        """The instance on whose scheduler the request is resident."""
        self.gathers = False
        """Whether the KV is being gathered on one instance, for a decode there."""
        self.wanted: tuple[int, ...] = ()
        """The group that is to decode the request; (): none for now."""
        # stopping: it is to be off its instance, and is not yet; halts: `PauseRequest` was sent for that.
        self.stopping = self.halts = False
        self.step: int | None = None
        """Number of the task that computes the next token, while a group decodes in place."""
        self.count = 0
        """Number of all tasks so far, over all groups."""
        self.token: SpanTask | None = None
        """The task of that step."""
        self.steps: list[SpanTask] = []
        """Tasks from which the layout of the KV follows while a group decodes."""
        self.home: int | None = None
        """The instance where a scheduler left the KV, until a task has taken it up."""
        self.left: set[int] = set()
        """Instances that dropped their part, and may get one again."""
        self.finished = False
        """Whether the last output token has been emitted."""
        self.room: dict[int, ReservedKv] = {}
        """Reservations of blocks, by instance."""
        self.unsent: list[tuple[int, SendKv]] = []
        """(sender, message) that wait for a reservation."""
        self.moving: dict[int, KvMovement] = {}
        """Movements under way, by number."""
        self.together: dict[tuple[int, int, int], list[KvSlice] | None] = {}
        """Slices by (target, first token, end) that one movement from all holders stands for; None: it has arrived."""
        self.early: list[KvSlice] = []
        """Slices that arrived before their span was complete on the whole group."""

    @property
    def wire(self) -> str:
        """Id on the instances. Another one after each restart: what the earlier attempt still reports is ignored."""
        return self.request.id + "'" * self.restarts

    @property
    def said(self) -> int:
        """Number of output tokens of this attempt."""
        return len(self.asked.told) - self.base

    @property
    def kv_tokens(self) -> int:
        """Tokens that have KV once the prompt is computed: all but the last known one."""
        # The newest token gets its KV in the iteration that computes the next one.
        return self.request.prompt_tokens + max(0, self.said - 1)

    def rename(self) -> None:
        """Take a new id on the instances: messages under the old one are ignored from now on."""
        self.restarts += 1
        self.admitted.clear()
        self.left.clear()

    def places(self) -> set[int]:
        """Return the instances whose loss ends this attempt."""
        found = {*self.running, *self.spread, *self.whole, *self.room}
        if self.at is not None:
            found.add(self.at)
        if self.stream is not None and self.stream.prefill is not None:
            found.add(self.stream.prefill.number)
        return found

    def may_lose(self, number: int) -> bool:
        """Whether an instance has a task, a reservation or a transfer for this attempt that it can fail at.

        A loss report without any of them is late: the request has continued without the lost part.
        """
        return number in self.running or number in self.room or bool(self.moving)


class AttemptTable:
    """The attempts under way, by the request's name (the policy's); ids on the instances have marks behind it."""

    def __init__(self) -> None:
        self._of: dict[str, RequestAttempt] = {}

    def __iter__(self) -> Iterator[RequestAttempt]:
        return iter(list(self._of.values()))

    def __len__(self) -> int:
        return len(self._of)

    def named(self, name: str) -> RequestAttempt | None:
        """Return the attempt with the name that the policy uses."""
        return self._of.get(name)

    def get(self, wire: str) -> RequestAttempt | None:
        """Return the attempt with that id; None: it was given up, and the message about it is late."""
        attempt = self._of.get(wire.rstrip("'"))
        return None if attempt is None or attempt.wire != wire else attempt

    def add(self, attempt: RequestAttempt) -> None:
        """Add an attempt that begins."""
        self._of[attempt.request.id] = attempt

    def remove(self, attempt: RequestAttempt) -> None:
        """Remove an attempt that has ended. Harmless when repeated."""
        self._of.pop(attempt.request.id, None)


Instance = TypeVar("Instance", bound="LiveInstance | HttpInstance")


class InstanceTable(Generic[Instance]):
    """The instances in the cluster, whatever their state, by number."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._of = {instance.number: instance for instance in instances}

    def __iter__(self) -> Iterator[Instance]:
        return iter(sorted(self._of.values(), key=lambda instance: instance.number))

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, number: int) -> Instance:
        return self._of[number]

    def get(self, number: int) -> Instance | None:
        """None: there is no such instance."""
        return self._of.get(number)

    def add(self, instance: Instance) -> None:
        """Add an instance."""
        self._of[instance.number] = instance

    def remove(self, number: int) -> None:
        """Remove an instance."""
        del self._of[number]

    def cached_tokens(self, asked: ClusterRequest) -> tuple[int, ...]:
        """Return how many tokens of a prompt each instance has cached, by number; empty: none has any."""
        hits = [0] * (1 + max(self._of, default=-1))
        for number, instance in self._of.items():
            hits[number] = instance.cached_tokens(asked)
        return tuple(hits) if any(hits) else ()


class InstanceRegistry(InstanceTable[LiveInstance]):
    """Native instances, what is sent to several of them, and the account of their KV (`kv`)."""

    def __init__(self, instances: Iterable[LiveInstance]) -> None:
        super().__init__(instances)
        self.kv = KvReservations(self._kv_load)

    def tell(self, numbers: Iterable[int], message: msgspec.Struct, *frames: Any) -> None:
        """Send a message to several instances; those that are gone are skipped."""
        for number in numbers:
            instance = self._of.get(number)
            if instance is not None:
                instance.tell(message, *frames)

    def meet(self) -> None:
        """Send the addresses of all reachable instances to each of them."""
        peers = tuple(peer for instance in self if (peer := instance.peer) is not None)
        self.tell([peer.instance for peer in peers], MeetPeers(peers))

    def admit(self, attempt: RequestAttempt, numbers: Iterable[int]) -> None:
        """Send a request's prompt to those of these instances that do not have it."""
        new = [number for number in numbers if number not in attempt.admitted]
        if not new:
            return
        asked = attempt.asked
        shared = {"output": tuple(asked.told), "prefix_cache": shares(asked.submit)}
        admit = msgspec.structs.replace(asked.submit, id=attempt.wire, phase="spans", **shared)
        attempt.admitted.update(new)
        self.tell(new, admit, asked.prompt)

    def forget(self, attempt: RequestAttempt) -> None:
        """Drop a request on all instances that may have anything of it."""
        # `left` too: transfers of instances that were left for now may still be under way there.
        known = attempt.admitted | attempt.whole | attempt.left
        if attempt.at is not None:
            known.add(attempt.at)
        for number in sorted(known):
            instance = self._of.get(number)
            if instance is not None and (instance.moves_kv or (number == attempt.at and not attempt.finished)):
                instance.tell(AbortRequest(attempt.wire))
        attempt.admitted.clear()

    def leave(self, attempt: RequestAttempt, but: Iterable[int]) -> None:
        """Drop a request for now on all instances but some; it may come to the others again."""
        known = (attempt.admitted | attempt.whole) - set(but)
        self.tell(
            [number for number in sorted(known) if (one := self._of.get(number)) is not None and one.moves_kv],
            AbortRequest(attempt.wire, for_good=False),
        )
        attempt.left |= known
        attempt.admitted -= known

    def kv_blocks(self, number: int, tokens: int) -> int:
        """Return tokens of KV on an instance rounded up to whole blocks."""
        info = None if number not in self._of else self._of[number].info
        block = 1 if info is None else info.kv_block_tokens
        return -(-tokens // block) * block

    def _kv_load(self, number: int) -> KvLoad | None:
        instance = self._of.get(number)
        if instance is None:
            return None
        return 0 if instance.info is None else instance.info.kv_tokens_total, instance.stats.kv_tokens_used


class SliceSent(NamedTuple):
    """A KV slice has arrived."""

    kv_slice: KvSlice


class BatchComplete(NamedTuple):
    """A batch is complete without a message: its last member's request has ended."""

    entry: SpanEntry


class DecodeOver(NamedTuple):
    """A request had ended when its decode was enqueued."""

    attempt: RequestAttempt


class RequestReleased(NamedTuple):
    """The controller has released a request."""

    attempt: RequestAttempt
    why: str | None
    """None: all of its output was sent."""


BackendEvent = SliceSent | BatchComplete | DecodeOver | RequestReleased
"""What happens during a call of the controller, which is not re-entrant: the driver reports it after the call."""

PAUSE_S = 0.25
"""Seconds that a request waits after its first lost task, unless membership changes sooner: peers notice a loss before
the end of the process is seen. Doubled with each further loss, up to 5 s."""


class RetryQueue:
    """Requests between two attempts."""

    def __init__(self, ring: Callable[[], None], limits: RetryLimits) -> None:
        """ring: called when a pause is over."""
        self._ring, self._limits = ring, limits
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
        self.after(asked, min(5.0, PAUSE_S * 2.0 ** (asked.runs_lost - 1)))

    def after(self, asked: ClusterRequest, pause_s: float) -> None:
        """Try again after so many seconds, or when instances have come or gone."""
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
        if asked.losses <= self._limits.losses:
            return None
        why = f"{asked.losses} instances were lost with the request on them; it is not tried again"
        return UnavailableError(why, 30.0)

    def given_up(self, asked: ClusterRequest) -> Exception | None:
        """Return the error of a request that lost too many tasks or streams; None: it may be tried again."""
        if asked.runs_lost < self._limits.runs:
            return None
        return UnavailableError(f"the request was lost {asked.runs_lost} times; try again later", 5.0)

    def close(self) -> None:
        """Cancel all timers."""
        for _, timer in self._pausing.values():
            timer.cancel()

    def _paused(self, name: str) -> None:
        if name in self._pausing:
            self._due.append(self._pausing.pop(name)[0])
            self._ring()


class ClusterRequests:
    """All requests without a complete answer, by their clients' ids."""

    def __init__(
        self,
        controller: ClusterController,
        backend: LiveBackend | HttpBackend,
        limits: RetryLimits,
        settle: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """settle: lets the controller act on what is pending."""
        self._controller, self._backend, self._settle, self._clock = controller, backend, settle, clock
        self.attempts = backend.attempts
        self.asked: dict[str, ClusterRequest] = {}
        self.retries = RetryQueue(settle, limits)
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
            self._backend.abandon(attempt)
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
        # It was lost between its last token and its end.
        if asked.told and asked.left <= 0:
            asked.tell(OutputDelta(id=asked.submit.id, finish="length"))
            del self.asked[asked.submit.id]
            return
        attempt = RequestAttempt(asked, asked.try_again())
        with self.isolate(attempt, f"placing {asked.submit.id}"):
            # One that failed behind a prefix begins without: its instance may have no room for a copy.
            attempt.cached = () if asked.prefix_failed else self._backend.registry.cached_tokens(asked)
            self.attempts.add(attempt)
            attempt.controlled = self._controller.arrive(attempt.request, self._clock(), attempt, attempt.cached)

    def retry(self, attempt: RequestAttempt, why: str, later: bool = False, after_s: float | None = None) -> None:
        """Drop a failed attempt and queue the next one.

        later: begin it after a pause, or as soon as membership changes; otherwise in the same settling. after_s: the
        pause that a busy instance asks for: nothing was lost.
        """
        log.info("%s: %s; it begins again with %d tokens said", attempt.request.id, why, len(attempt.asked.told))
        self._controller.drop(attempt.controlled, why, self._clock())
        attempt.asked.prefix_failed |= bool(attempt.prefix)
        if after_s is not None:
            self.retries.after(attempt.asked, after_s)
            return
        self.retries.count(attempt)
        if later:
            self.retries.later(attempt.asked)
        else:
            self.retries.soon(attempt.asked)

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
                why = "the controller has failed at this request; its log says at what. Others go on"
                self.fail(attempt.asked, InvariantError(why))
