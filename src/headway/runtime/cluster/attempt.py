"""One attempt at a request, as the controller and its instances know it: what was sent where, and where its KV is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.transfer_queue import KvSlice
from headway.core.request import Request
from headway.runtime.cluster.cluster_request import ClusterRequest
from headway.runtime.cluster.messages import SendKv, SpanTask


class KvMovement:
    """KV of a request under way: which instances still have to send, and what follows when all have."""

    __slots__ = ("sources", "then")

    def __init__(self, sources: set[int], then: Callable[[], None]) -> None:
        self.sources, self.then = sources, then


class RequestAttempt:
    """`request` is what the policy sees; `wire` the id by which instances know it (its name, or another one when a
    scheduler begins with it anew).

    admitted: instances that have its prompt. runs: spans that were begun, in order; running: who has not yet told the
    end, or a pause, of the one under way, which is `entry`. spread: the group over which its KV lies; whole:
    instances that have all of it, ready to decode. at: the instance in whose scheduler it is. gathers: its KV is
    being brought together, to be decoded there. wanted: the group that is to decode it; (): none now. stopping:
    nobody may, and it has not stopped yet; halts: its scheduler was told so. step: the number of the run that
    computes its next token, where a group decodes, `count` of all runs; token: that run; steps: runs that say where
    KV lies then; home: the instance where a scheduler has left it, until a run has taken it up. left: instances
    that have nothing of it any more. room: instances that were asked to keep room, and whether they do, `space` for
    how many tokens, `asked_as` by which number; unsent: what waits for that, with its senders; late: pieces that
    wait until its last span is computed; early: pieces that are there before their span is."""

    __slots__ = ("admitted", "asked", "asked_as", "at", "base", "count", "early", "entry", "finished", "gathers",
                 "halts", "home", "journey", "late", "left", "moving", "request", "room", "running", "runs", "space",
                 "spread", "step", "steps", "stopping", "token", "unsent", "wanted", "whole", "wire")  # fmt: skip

    journey: ControlledRequest

    def __init__(self, asked: ClusterRequest, request: Request) -> None:
        self.asked, self.request = asked, request
        self.wire = request.id
        self.base = len(asked.told)
        self.admitted: set[int] = set()
        self.runs: list[SpanTask] = []
        self.running: set[int] = set()
        self.entry: SpanEntry | None = None
        self.spread: tuple[int, ...] = ()
        self.whole: set[int] = set()
        self.at: int | None = None
        self.gathers = False
        self.wanted: tuple[int, ...] = ()
        self.stopping = self.halts = False
        self.step: int | None = None
        self.count = 0
        self.token: SpanTask | None = None
        self.steps: list[SpanTask] = []
        self.home: int | None = None
        self.left: set[int] = set()
        self.finished = False
        self.room: dict[int, bool] = {}
        self.space: dict[int, int] = {}
        self.asked_as: dict[int, int] = {}
        self.unsent: list[tuple[int, SendKv]] = []
        self.moving: dict[int, KvMovement] = {}
        self.late: list[KvSlice] = []
        self.early: list[KvSlice] = []

    @property
    def said(self) -> int:
        """Output tokens of this attempt."""
        return len(self.asked.told) - self.base

    @property
    def kv_tokens(self) -> int:
        """Tokens that have KV once the prompt is computed: all but the last one that is known."""
        return self.request.prompt_tokens + max(0, self.said - 1)

    def places(self) -> set[int]:
        """Instances without which it cannot go on as it is."""
        found = {*self.running, *self.spread, *self.whole, *self.room}
        if self.at is not None:
            found.add(self.at)
        return found

    def may_lose(self, number: int) -> bool:
        """Whether an instance does something for it that it can fail at: a run, room or KV that moves. What it says of
        anything else is late: the request has gone on without that."""
        return number in self.running or number in self.room or bool(self.moving)


class AttemptTable:
    """The attempts under way, by the id that instances know."""

    def __init__(self) -> None:
        self._of: dict[str, RequestAttempt] = {}
        self._named: dict[str, RequestAttempt] = {}

    def __iter__(self) -> Iterator[RequestAttempt]:
        return iter(list(self._of.values()))

    def __len__(self) -> int:
        return len(self._of)

    def named(self, name: str) -> RequestAttempt | None:
        """By the name that the policy knows."""
        return self._named.get(name)

    def get(self, wire: str) -> RequestAttempt | None:
        """None: whoever speaks of it does not know yet that it was given up."""
        return self._of.get(wire)

    def add(self, attempt: RequestAttempt) -> None:
        """It begins."""
        self._of[attempt.wire] = self._named[attempt.request.id] = attempt

    def remove(self, attempt: RequestAttempt) -> None:
        """It has ended. Harmless when repeated."""
        self._of.pop(attempt.wire, None)
        self._named.pop(attempt.request.id, None)

    def rename(self, attempt: RequestAttempt) -> None:
        """What instances say of it under its old name is not heard any more."""
        del self._of[attempt.wire]
        attempt.wire += "'"
        attempt.admitted.clear()
        attempt.left.clear()
        self._of[attempt.wire] = attempt
