"""One attempt at a request, as the controller and the instances identify it: what was sent where, and where its KV
is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headway.control.controlled_request import ControlledRequest
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.engine.instance_protocol import SendKv, SpanTask


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
