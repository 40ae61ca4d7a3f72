"""A cluster's requests, the attempts at them, their clients' deltas, and the instances by number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.control.kv import KvLoad, KvReservations
from headway.core.request import Request, SpanTask
from headway.runtime.cluster.instances import LiveInstance, shareable, shares, text_of
from headway.runtime.engine.prefix_lookups import rejection_error
from headway.runtime.engine.protocol import AbortRequest, MeetPeers, OutputDelta, SendKv, SubmitRequest


class AnswerQueue:
    """Deltas of one request on their way to its client."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[OutputDelta | Exception] = asyncio.Queue()

    def put(self, item: OutputDelta | Exception) -> None:
        """Append a delta, or the error that the request failed with. Nothing follows the last delta or an error."""
        self._items.put_nowait(item)

    async def get(self) -> OutputDelta:
        """Return the next delta, once there is one. Raises the error that the request failed with."""
        item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        if (error := rejection_error(item)) is not None:
            raise error
        return item


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

    __slots__ = (
        "answer",
        "answered",
        "attempt",
        "cached_tokens",
        "first_s",
        "losses",
        "name",
        "over",
        "prefix_failed",
        "prompt",
        "runs_lost",
        "saved_s",
        "submit",
        "told",
    )

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
        self.answer = AnswerQueue()

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
        first_s = delta.first_scheduled_s if self.first_s is None else self.first_s
        cached, saved_s = delta.cached_tokens or self.cached_tokens, delta.saved_s or self.saved_s
        self.first_s, self.cached_tokens, self.saved_s = None, 0, 0.0
        self.told.extend(delta.tokens)
        self.answered = True
        self.over = delta.finish is not None
        sent = {"id": self.submit.id, "first_scheduled_s": first_s, "cached_tokens": cached, "saved_s": saved_s}
        self.answer.put(msgspec.structs.replace(delta, **sent))

    def fail(self, error: Exception) -> None:
        """End the request with an error. Harmless when it has ended."""
        if not self.over:
            self.over = True
            self.answer.put(error)


class KvMovement:
    """KV of a request on its way to one instance."""

    __slots__ = ("sources", "then")

    def __init__(self, sources: set[int], then: Callable[[], None]) -> None:
        """sources: instances whose part has not arrived. then: called when all parts have."""
        self.sources, self.then = sources, then


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
                 "runs", "spread", "step", "steps", "stopping", "together", "token", "unsent", "wanted",
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

    def places(self) -> set[int]:
        """Return the instances whose loss ends this attempt."""
        found = {*self.running, *self.spread, *self.whole, *self.room}
        if self.at is not None:
            found.add(self.at)
        return found

    def may_lose(self, number: int) -> bool:
        """Whether an instance has a task, a reservation or a transfer for this attempt that it can fail at.

        A loss report without any of them is late: the request has continued without the lost part.
        """
        return number in self.running or number in self.room or bool(self.moving)


class AttemptTable:
    """The attempts under way, by their id on the instances and by the request's name."""

    def __init__(self) -> None:
        self._of: dict[str, RequestAttempt] = {}
        self._named: dict[str, RequestAttempt] = {}

    def __iter__(self) -> Iterator[RequestAttempt]:
        return iter(list(self._of.values()))

    def __len__(self) -> int:
        return len(self._of)

    def named(self, name: str) -> RequestAttempt | None:
        """Return the attempt with the name that the policy uses."""
        return self._named.get(name)

    def get(self, wire: str) -> RequestAttempt | None:
        """Return the attempt with that id; None: it was given up, and the message about it is late."""
        return self._of.get(wire)

    def add(self, attempt: RequestAttempt) -> None:
        """Add an attempt that begins."""
        self._of[attempt.wire] = self._named[attempt.request.id] = attempt

    def remove(self, attempt: RequestAttempt) -> None:
        """Remove an attempt that has ended. Harmless when repeated."""
        self._of.pop(attempt.wire, None)
        self._named.pop(attempt.request.id, None)

    def rename(self, attempt: RequestAttempt) -> None:
        """Give an attempt a new id on the instances: messages under the old one are ignored from now on."""
        del self._of[attempt.wire]
        attempt.restarts += 1
        attempt.admitted.clear()
        attempt.left.clear()
        self._of[attempt.wire] = attempt


class InstanceRegistry:
    """The instances in the cluster, whatever their state, and the account of their KV (`kv`)."""

    def __init__(self, instances: Iterable[LiveInstance]) -> None:
        self._of = {instance.number: instance for instance in instances}
        self.kv = KvReservations(self._kv_load)

    def __iter__(self) -> Iterator[LiveInstance]:
        return iter(sorted(self._of.values(), key=lambda instance: instance.number))

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, number: int) -> LiveInstance:
        return self._of[number]

    def get(self, number: int) -> LiveInstance | None:
        """None: there is no such instance."""
        return self._of.get(number)

    def add(self, instance: LiveInstance) -> None:
        """Add an instance."""
        self._of[instance.number] = instance

    def remove(self, number: int) -> None:
        """Remove an instance."""
        del self._of[number]

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

    def cached_tokens(self, asked: ClusterRequest) -> tuple[int, ...]:
        """Return how many tokens of a prompt each instance has cached, by number; empty: none has any."""
        keys: dict[int, list[bytes]] = {}
        hits = [0] * (1 + max(self._of, default=-1))
        for number, instance in self._of.items():
            if instance.info is not None and instance.info.prefix_cache:
                size = instance.info.kv_block_tokens
                if size not in keys:
                    text = text_of(asked.submit, asked.prompt, asked.told, size)
                    keys[size] = shareable(text, asked.submit.prompt_tokens + len(asked.told), size)
                hits[number] = size * instance.cached.match(keys[size])
        return tuple(hits) if any(hits) else ()

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
