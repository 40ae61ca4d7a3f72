"""A driver whose durations, losses and leavers are random, and a policy that tries everything, over one machine."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
from tests.helpers.cluster_worlds import LINK
from tests.helpers.controller_audit import check

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controller import ClusterController
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.core.errors import RequestError
from headway.core.request import Phase, Request, Span
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterInstance,
    ClusterLinks,
    ClusterSnapshot,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
    Event,
    HoldGranted,
    HoldGroup,
    KvReady,
    PreemptRequest,
    RejectRequest,
    ReleaseGroup,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    ResumeRequest,
    SpanDone,
    SpanPaused,
    TransferKv,
    WakeupDue,
)

LAYERS = 8


class Restless:
    """Serves every request in one of many ways; what was refused is tried again, simply, a second later."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.requests: dict[str, Request] = {}
        self.again: list[str] = []
        self.held: set[str] = set()
        self.wake_s: float | None = None
        self.heard: list[Event] = []

    def next_wakeup(self, now: float) -> float | None:
        return self.wake_s

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        self.heard.append(event)
        there = view.with_role("mixed")
        if isinstance(event, RequestArrived):
            self.requests[event.request.id] = event.request
            return self.begin(event.request, view) if there else self.later(event.request.id, view)
        if isinstance(event, RequestFinished | RequestDropped):
            self.requests.pop(event.request, None)
            return self.nudge(view)
        if isinstance(event, ActionRefused):
            return self.later(event.request, view)
        if isinstance(event, WakeupDue):
            self.wake_s = None
            names, self.again = self.again, []
            known = [name for name in names if name in self.requests]
            if not there:
                return [a for name in known for a in self.later(name, view)]
            return [EnqueueRequest(name, (self.rng.choice(there),), "all", concurrent=True) for name in known]
        if isinstance(event, HoldGranted):
            self.held.add(event.holder)
            return self.spans(self.requests[event.holder], view, event.group)
        if isinstance(event, SpanPaused):
            index = event.index
            decoded = event.progress.tokens > self.requests[event.request].prompt_tokens
            if index < 0 or (decoded and not event.progress.layer):
                return self.decode(event.request, there, view)
            return [ResumeRequest(event.request, self.rng.random())]
        if isinstance(event, SpanDone) and event.last and event.request in self.requests:
            return self.decode(event.request, there, view)
        if isinstance(event, RequestPrefilled):
            return self.decode(event.request, there, view)
        if isinstance(event, KvReady):
            return [EnqueueRequest(event.request, (event.instance,), "decode", self.rng.random() < 0.3)]
        return self.nudge(view)

    def later(self, name: str, view: ClusterSnapshot) -> list[Action]:
        if name in self.requests:
            self.again.append(name)
            if self.wake_s is None or self.wake_s <= view.now_s:
                self.wake_s = view.now_s + 1.0
        return []

    def group(self, there: Sequence[int], most: int = 4) -> tuple[int, ...]:
        return tuple(self.rng.sample(list(there), min(len(there), self.rng.randint(1, most))))

    def nudge(self, view: ClusterSnapshot) -> list[Action]:
        """Something that may be out of place."""
        if not self.requests or self.rng.random() < 0.5:
            return []
        name = self.rng.choice(sorted(self.requests))
        preempt = PreemptRequest(name)
        release = ReleaseGroup(name) if name in self.held else preempt
        return [self.rng.choice([preempt, preempt, release, RejectRequest(name, "no") if "7#" in name else preempt])]

    def begin(self, request: Request, view: ClusterSnapshot) -> list[Action]:
        there, way = view.with_role("mixed"), self.rng.random()
        if way < 0.25:
            return [EnqueueRequest(request.id, self.group(there, 2), "all", self.rng.random() < 0.5)]
        if way < 0.45:
            return [EnqueueRequest(request.id, self.group(there, 2), "prefill", self.rng.random() < 0.5)]
        if way < 0.6:
            return [HoldGroup(request.id, self.group(there))]
        if way < 0.7 and len(self.requests) > 1:
            free = [r for r in self.requests.values() if r.id != request.id][:2]
            group = self.group(there)
            along = tuple(Span(request=r, start=0, end=r.prompt_tokens, group=group) for r in free)
            span = Span(request=request, start=0, end=request.prompt_tokens, group=group)
            batch = CommitSpans(request.id, (span,), view.version, self.rng.random() < 0.5, along)
            to = self.rng.choice(there)
            return [batch, *(TransferKv(r.id, to, index=0) for r in (request, *free) if self.rng.random() < 0.4)]
        return self.spans(request, view, there)

    def spans(self, request: Request, view: ClusterSnapshot, there: Sequence[int]) -> list[Action]:
        edges = sorted({0, request.prompt_tokens, *(self.rng.randrange(1, request.prompt_tokens) for _ in range(2))})
        spans = tuple(Span(request=request, start=a, end=b, group=self.group(there)) for a, b in pairwise(edges))
        actions: list[Action] = [CommitSpans(request.id, spans, view.version, self.rng.random() < 0.4)]
        if self.rng.random() < 0.4:
            to = self.rng.choice(view.with_role("mixed") or (0,))
            actions += [TransferKv(request.id, to, index=i) for i in range(len(spans))]
        return actions

    def decode(self, name: str, there: Sequence[int], view: ClusterSnapshot) -> list[Action]:
        done: list[Action] = [ReleaseGroup(name)] if name in self.held else []
        self.held.discard(name)
        if not there:
            return [*done, *self.later(name, view)]
        if self.rng.random() < 0.5:
            return [*done, TransferKv(name, self.rng.choice(there), overlapped=self.rng.random() < 0.5)]
        return [*done, EnqueueRequest(name, self.group(there, 2), "decode", self.rng.random() < 0.5)]


class QuietBackend(InstanceBackend):
    """Instances that take whatever reaches them, and never end it."""

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        return 1.0

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        return request.prompt_tokens, 1.0

    def busy_s(self, group: tuple[int, ...]) -> float:
        return 0.0

    def refresh(self, instance: int) -> SchedulerStats:
        return SchedulerStats()

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        return 0

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        return False


class Chaos(QuietBackend):
    """Drives a machine; everything takes a random time. `losses`: share of steps in which an instance comes or goes."""

    def __init__(self, seed: int, instances: int = 6, losses: float = 0.05, leavers: float = 0.05) -> None:
        self.rng = random.Random(seed)
        self.policy = Restless(seed)
        every = [ClusterInstance(id=i, node=i // 2, capacity=1000) for i in range(instances)]
        self.controller = ClusterController(
            ClusterState(every, ClusterLinks(inside=LINK, across=LINK)),
            self,
            self.policy,
            layers=LAYERS,
            receive_backends=2,
        )
        self.losses, self.leavers = losses, leavers
        self.now, self.serial = 0.0, 0
        self.heap: list[tuple[float, int, str, Any]] = []
        self.valid: dict[int, int] = {}
        self.stays: dict[str, int] = {}
        self.ended: dict[str, str | None] = {}
        self.arrived = 0
        self.grown = instances
        self.outputs: dict[str, int] = {}

    # -- backend ------------------------------------------------------------------------------------------------------

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        return sum(span.end - span.start for span in spans) / 100 / len(spans[0].group)

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        return request.prompt_tokens, request.prompt_tokens / 100

    def refresh(self, instance: int) -> SchedulerStats:
        return SchedulerStats(0.0, 0, 0, self.controller.state.residents[instance])

    def soon(self, word: str, what: Any, most: float = 2.0) -> int:
        self.serial += 1
        heapq.heappush(self.heap, (self.now + self.rng.uniform(0.0, most), self.serial, word, what))
        return self.serial

    def begin(self, entry: SpanEntry, now: float) -> None:
        assert not entry.controlled.ended or entry.batched_with
        for i in entry.group:
            assert i not in self.controller.state.gone
        entry.backend_state = self.soon("done", entry)

    def pause(self, entry: SpanEntry, now: float) -> None:
        if self.rng.random() < 0.3:
            raise ActionImpossible("too late")
        entry.backend_state = self.soon("paused", entry, 0.3)

    def stop(self, entry: SpanEntry, now: float) -> None:
        entry.backend_state = None

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        if self.rng.random() < 0.02:
            raise RequestError("never")
        name = controlled.request.id
        assert name not in self.stays
        self.stays[name] = self.soon("stayed", (controlled, phase))

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        del self.stays[controlled.request.id]
        if controlled.phase == "decode" and controlled.output_tokens + 1 < controlled.request.max_output_tokens:
            return controlled.output_tokens + 1
        return controlled.output_tokens

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        assert not controlled.ended

    def send(self, piece: KvSlice, now: float) -> None:
        self.soon("sent", piece)

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        name = controlled.request.id
        assert name not in self.ended
        self.ended[name] = why
        return self.rng.random() < 0.5

    # -- what happens -------------------------------------------------------------------------------------------------

    def arrive(self, name: str | None = None, prompt: int = 0) -> None:
        if name is None:
            self.arrived += 1
            name, prompt = f"r{self.arrived}#0", self.rng.randint(3, 400)
        else:
            first, _, attempt = name.partition("#")
            name = f"{first}#{int(attempt) + 1}"
        request = Request(id=name, arrival_s=self.now, prompt_tokens=prompt, max_output_tokens=self.rng.randint(1, 5))
        self.controller.arrive(request, self.now)

    def step(self) -> None:
        """One thing happens, then the machine settles."""
        if self.heap and (self.rng.random() < 0.7 or self.arrived > 60):
            self.now, serial, word, what = heapq.heappop(self.heap)
            self.happen(serial, word, what)
        elif self.arrived <= 60:
            self.arrive()
        else:
            self.now += 1.0
        if self.rng.random() < self.leavers and self.controller.requests:
            name = self.rng.choice(sorted(self.controller.requests))
            self.controller.drop(self.controller.requests[name], "left", self.now)
        if self.rng.random() < self.losses:
            self.shake()
        self.settle()

    def settle(self) -> None:
        wake = self.controller.settle(self.now)
        check(self.controller)
        if wake is not None and self.valid.get(0) != wake:
            self.valid[0] = wake  # type: ignore[assignment]
            self.serial += 1
            heapq.heappush(self.heap, (max(wake, self.now), self.serial, "woken", None))

    def happen(self, serial: int, word: str, what: Any) -> None:
        controller, now = self.controller, self.now
        if word == "woken":
            self.valid.pop(0, None)
            controller.woken(now)
        elif word == "sent":
            controller.sent(what, now)
        elif word == "stayed":
            controlled, phase = what
            if self.stays.get(controlled.request.id) == serial:
                del self.stays[controlled.request.id]
                whole = phase != "prefill" or controlled.request.max_output_tokens <= 1
                controller.left_scheduler(controlled, controlled.request.max_output_tokens if whole else 1, whole, now)
        elif what.backend_state == serial:
            if word == "paused":
                controller.span_paused(what, self.rng.randrange(what.layer, LAYERS), now)
            else:
                members = (what, *what.batched_with)
                controller.span_done(
                    what, now, {m.owner for m in members if m.controlled.request.max_output_tokens == 1}
                )

    def shake(self) -> None:
        """An instance comes or goes."""
        controller, state = self.controller, self.controller.state
        i, way = self.rng.randrange(len(state.residents)), self.rng.random()
        away = sorted(state.gone | state.closed)
        if way < 0.45:
            for request in controller.lost(i, self.now):
                self.arrive(request.id, request.prompt_tokens)
        elif way < 0.6:
            controller.close(i, self.now)
        elif away:
            controller.open(msgspec.structs.replace(controller.cluster.instances[self.rng.choice(away)]), self.now)
        elif len(state.residents) < self.grown + 3:
            controller.open(ClusterInstance(id=len(state.residents), node=9, capacity=1000), self.now)

    def end(self) -> None:
        """No more trouble: all instances are there, and every request comes to an end."""
        self.losses = self.leavers = 0.0
        for i in sorted(self.controller.state.gone | self.controller.state.closed):
            self.controller.open(self.controller.cluster.instances[i], self.now)
        self.settle()
        for _ in range(20_000):
            if not self.controller.requests and not self.heap:
                return
            self.step()
        raise AssertionError(f"stuck: {list(self.controller.requests)[:5]}")
