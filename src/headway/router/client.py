"""A cluster as one engine: the server's `EngineClient` over many, with a placement policy between.

The policy is one of `placement/`, the very objects that the simulator drives. It sees arrivals, first tokens, ends and
losses, and a view kept from the engines' snapshots; its actions say which instance computes a request. Actions that
need KV to move between instances, or a group of several, fail their request: live instances do neither.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import cast

import msgspec

from headway.core.errors import ConfigError, RequestError, UnavailableError
from headway.core.request import Request
from headway.engine.protocol import Delta, EngineClient, EngineInfo, EngineState, EngineStats, Submit
from headway.latency.groups import GroupLatency, GroupShape
from headway.placement.base import (
    Action,
    Arrived,
    Commit,
    Dropped,
    Enqueue,
    Event,
    Finished,
    Lost,
    Placement,
    Refused,
    Reject,
    SpanDone,
    Woken,
)
from headway.placement.view import ClusterBook, ClusterView, Instance, Links
from headway.router.lanes import Lane
from headway.router.loads import Load
from headway.router.merged import merged_info, merged_stats

log = logging.getLogger("headway.router")
_ALONE = GroupShape(1)


class _Task:
    """A request that the router has accepted."""

    __slots__ = ("at", "first", "output", "placed", "request", "started")

    def __init__(self, request: Request, output: tuple[int, ...]) -> None:
        self.request = request
        self.output = list(output)
        self.unplace()

    def unplace(self) -> None:
        self.placed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.at: int | None = None
        self.started = self.first = False


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """An instance: its engine, and how the policy sees it."""

    client: EngineClient
    instance: Instance


Make = Callable[[Sequence[EngineInfo]], tuple[Placement, GroupLatency]]


class ClusterClient:
    """One a router. `make` is called once all engines are ready, with what they say of themselves in the order of
    `members`, and returns the policy and the model that predicts prefills."""

    def __init__(self, members: Sequence[Member], links: Links, make: Make) -> None:
        self._clients = [member.client for member in members]
        self._book = ClusterBook([member.instance for member in members], links)
        self._make = make
        self._loads = [Load() for _ in members]
        self._lanes = [Lane(self._starter(i)) for i in range(len(members))]
        self._gone: set[int] = set()
        self._tasks: dict[str, _Task] = {}
        self._events: deque[Event] = deque()
        self._telling = False
        self._alarm: asyncio.TimerHandle | None = None
        self._info: EngineInfo | None = None
        self._drains = False
        self._policy: Placement | None = None
        self._latency: GroupLatency | None = None
        self.failure: str | None = None
        """Why the cluster could not start, once that is known."""

    @property
    def state(self) -> EngineState:
        if self._info is None:
            return "starting"
        if self._drains:
            return "draining"
        states = [client.state for i, client in enumerate(self._clients) if i not in self._gone]
        for state in ("ready", "recovering"):
            if state in states:
                return cast(EngineState, state)
        return "lost"

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the cluster's engines are still starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """All engines' together; requests that wait at the router are waiting."""
        return merged_stats([client.stats for client in self._clients], sum(lane.waiting for lane in self._lanes))

    async def start(self) -> EngineInfo:
        try:
            infos = await asyncio.gather(*(client.start() for client in self._clients))
            info = merged_info(infos)
            self._policy, self._latency = self._make(infos)
        except ConfigError as error:
            self.failure = str(error)
            raise
        for i, each in enumerate(infos):
            self._book.put(msgspec.structs.replace(self._book.instances[i], capacity=each.kv_tokens_total))
        self._info = info
        return info

    async def generate(self, submit: Submit, prompt: bytes | memoryview) -> AsyncIterator[Delta]:
        if self.state not in ("ready", "recovering"):
            raise UnavailableError(f"the cluster is {self.state}", 5.0)
        if submit.id in self._tasks:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        task = self._tasks[submit.id] = _Task(_request(submit), submit.output)
        over, again = False, submit.again
        try:
            self._book.arrived(time.monotonic())
            self._tell(Arrived(task.request))
            while not over:
                client = self._clients[await task.placed]
                asked = msgspec.structs.replace(submit, again=again, output=tuple(task.output))
                try:
                    deltas = cast("AsyncGenerator[Delta, None]", client.generate(asked, prompt))
                    async with aclosing(deltas):
                        async for delta in deltas:
                            over = self._heard(task, delta)
                            yield delta
                            if over:
                                break
                except UnavailableError:
                    if client.state != "lost":
                        raise
                    again = True
                    self._lose(task)
        finally:
            if not over:
                self._leave(task, Dropped(submit.id, "its client left, or it was refused"))

    async def drain(self) -> None:
        self._drains = True
        while any(lane.waiting for lane in self._lanes) or any(not task.started for task in self._tasks.values()):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(client.drain() for i, client in enumerate(self._clients) if i not in self._gone))

    async def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        await asyncio.gather(*(client.close() for client in self._clients))

    # -- what happens ---------------------------------------------------------------------------------------------

    def _heard(self, task: _Task, delta: Delta) -> bool:
        """An engine has told something of a request; True when that was the last of it."""
        name, at = task.request.id, task.at
        assert at is not None
        task.output.extend(delta.tokens)
        over = delta.finish is not None
        if not task.first and (delta.tokens or over):
            task.first = True
            self._loads[at].first_token(name)
            if self._lanes[at].is_span(name):
                self._lanes[at].computed(name)
                if not over:
                    self._tell(SpanDone(name, 0, last=True))
        if over:
            done = delta.finish in ("stop", "length")
            self._leave(task, Finished(name) if done else Dropped(name, delta.error or str(delta.finish)))
        return over

    def _leave(self, task: _Task, event: Event) -> None:
        name = task.request.id
        if self._tasks.pop(name, None) is None:
            return
        if task.at is not None:
            self._loads[task.at].remove(name)
            self._lanes[task.at].ended(name)
        self._tell(event)

    def _lose(self, task: _Task) -> None:
        """The instance of a request is gone for good: the request goes to another, with what it has said."""
        assert task.at is not None
        lost = task.at
        if lost not in self._gone:
            self._gone.add(lost)
            self._book.remove(lost)
            log.error("instance %d is lost; %d are left", lost, len(self._clients) - len(self._gone))
            self._tell(Lost(lost))
            for name in self._lanes[lost].empty():
                self._place_again(self._tasks[name], lost)
        self._lanes[lost].ended(task.request.id)
        task.unplace()
        self._place_again(task, lost)

    def _place_again(self, task: _Task, lost: int) -> None:
        self._loads[lost].remove(task.request.id)
        task.at = None
        if len(self._gone) == len(self._clients):
            task.placed.set_exception(UnavailableError("all instances are gone; the cluster must be restarted", 30.0))
            return
        self._tell(Dropped(task.request.id, f"instance {lost} is lost"))
        self._tell(Arrived(task.request))

    # -- the policy -----------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """Tell the policy, and carry out what it says; events that follow from that are told after it."""
        self._events.append(event)
        if self._telling:
            return
        assert self._policy is not None
        self._telling = True
        try:
            while self._events:
                following = self._events.popleft()
                now = time.monotonic()
                self._refresh(now)
                for action in self._policy.on_event(following, ClusterView(self._book, now)):
                    self._carry_out(action)
        finally:
            self._telling = False
        self._set_alarm()

    def _set_alarm(self) -> None:
        assert self._policy is not None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        now = time.monotonic()
        at = self._policy.next_wakeup(now)
        if at is not None:
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, at - now), self._tell, Woken())

    def _refresh(self, now: float) -> None:
        for i, (client, load) in enumerate(zip(self._clients, self._loads, strict=True)):
            load.take(client.stats)
            held = self._book.instances[i]
            left_s = load.left_s
            self._book.put(
                msgspec.structs.replace(
                    held,
                    free_at_s=now + left_s if left_s else min(held.free_at_s, now),
                    queued=load.queued,
                    used=client.stats.kv_tokens_used,
                    running=self._lanes[i].running,
                )
            )

    def _carry_out(self, action: Action) -> None:
        task = self._tasks.get(getattr(action, "request", ""))
        if task is None:
            return  # it left while the policy thought
        match action:
            case Enqueue(group=(at,), phase="all") if at not in self._gone:
                self._expect(task, at)
                self._lanes[at].door(action.request, action.beside)
            case Enqueue(group=(at,), phase="decode") if at == task.at:
                pass  # its engine goes on by itself
            case Commit(spans=spans, along=()) if self._one_alive({span.group for span in spans}):
                self._expect(task, spans[0].group[0])
                self._lanes[spans[0].group[0]].span(action.request, action.beside)
            case Reject():
                if not task.placed.done():
                    task.placed.set_exception(RequestError(action.why))
            case _:
                self._refuse(task, action)

    def _one_alive(self, groups: set[tuple[int, ...]]) -> bool:
        """Whether these are one and the same single instance, which is there."""
        return len(groups) == 1 and all(len(group) == 1 and group[0] not in self._gone for group in groups)

    def _refuse(self, task: _Task, action: Action) -> None:
        verb = type(action).__name__.lower()
        why = f"the placement asked for {verb}, which live instances cannot do yet: they compute whole requests alone"
        self._events.append(Refused(task.request.id, verb, why))
        if not task.placed.done():
            task.placed.set_exception(UnavailableError(why))

    def _expect(self, task: _Task, at: int) -> None:
        assert self._latency is not None
        tokens = task.request.prompt_tokens + len(task.output)
        task.at = at
        self._loads[at].add(task.request.id, tokens, self._latency.prefill_s(0, tokens, _ALONE))

    def _starter(self, at: int) -> Callable[[str], None]:
        def start(name: str) -> None:
            task = self._tasks[name]
            task.started = True
            if not task.placed.done():
                task.placed.set_result(at)

        return start


def _request(submit: Submit) -> Request:
    return Request(
        id=submit.id,
        arrival_s=submit.received_s,
        prompt_tokens=submit.prompt_tokens,
        max_output_tokens=submit.params.max_tokens,
        slo=submit.slo,
        priority=submit.priority,
    )
