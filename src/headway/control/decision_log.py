"""Decision log of a controller: the driver's callbacks, the backend's answers and the policy's decisions, enough to
drive the same controller and policy again without driver and backend (`replay`).

JSON lines: a header; `do`: a callback, with its time `t`; `answer_to`: the backend's answer (`value`) to the n-th
question of a kind, where it differs from the answer before; `event`: an event passed to the policy, with its `actions`;
`wake`: when the policy wants to be woken. `replay` reads logs of the schema before, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controlled_request import ControlledRequest
from headway.control.controller import ClusterController
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.errors import RequestError
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.policy.placement.base import Action, Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterSnapshot, ClusterState

SCHEMA = "headway.cluster.log/3"
Sink = Callable[[bytes], object]
"""Receives one line, with its line end: a file's `write`."""


class RecordingController(ClusterController):
    """A `ClusterController` that logs its callbacks, its backend's answers and its policy's decisions.

    sink: receives the log. about: data of the driver for the log's header, such as how to make the policy again."""

    def __init__(
        self,
        cluster: ClusterState,
        backend: InstanceBackend,
        policy: PlacementPolicy,
        *,
        sink: Sink,
        layers: int,
        receive_backends: int = 16,
        order: str = "handshake",
        stopwatch: Callable[[], float] | None = None,
        about: object = None,
    ) -> None:
        self._sink = sink
        # the header, with the cluster as it is before the first callback
        self._write(
            {
                "schema": SCHEMA,
                "layers": layers,
                "receive_backends": receive_backends,
                "order": order,
                "instances": cluster.instances,
                # removed instances keep their entry and id, but have no node
                "lost": sorted(set(range(len(cluster.instances))).difference(*cluster.by_node.values())),
                "links": cluster.links,
                "about": about,
            }
        )
        self._recording = RecordingBackend(backend, self._write)
        super().__init__(
            cluster,
            self._recording,
            RecordingPolicy(policy, self._write),
            layers=layers,
            receive_backends=receive_backends,
            order=order,
            stopwatch=stopwatch,
        )

    def _write(self, line: dict[str, Any]) -> None:
        self._sink(msgspec.json.encode(line) + b"\n")

    def _do(self, callback: str, now: float, **arguments: Any) -> None:
        self._write({"do": callback, "t": now, **arguments})

    def note(self, text: str) -> None:
        self._do("note", self.state.now, note=text)

    def arrive(
        self, request: Request, now: float, backend_state: Any = None, cached: tuple[int, ...] = ()
    ) -> ControlledRequest:
        self._do("arrive", now, request=request, **({"cached": cached} if cached else {}))
        return super().arrive(request, now, backend_state, cached)

    def span_done(self, entry: SpanEntry, now: float, finished: Collection[str] = ()) -> None:
        self._do("span_done", now, request=entry.owner, index=entry.index, finished=sorted(finished))
        super().span_done(entry, now, finished)

    def span_paused(
        self, entry: SpanEntry, layer: int, now: float, tokens: int | None = None, share: float | None = None
    ) -> None:
        where = {"request": entry.owner, "index": entry.index, "layer": layer, "tokens": tokens, "share": share}
        self._do("span_paused", now, **where)
        super().span_paused(entry, layer, now, tokens, share)

    def left_scheduler(self, controlled: ControlledRequest, tokens: int, finished: bool, now: float) -> None:
        self._do("left_scheduler", now, request=controlled.request.id, tokens=tokens, finished=finished)
        super().left_scheduler(controlled, tokens, finished, now)

    def sent(self, kv_slice: KvSlice, now: float) -> None:
        self._do("sent", now, kv_slice=kv_slice.number)
        super().sent(kv_slice, now)

    def drop(self, controlled: ControlledRequest, why: str, now: float) -> None:
        # a drop without effect needs no replay
        if not controlled.ended:
            self._do("drop", now, request=controlled.request.id, why=why)
        super().drop(controlled, why, now)

    def changed(self, instances: Iterable[int], now: float) -> None:
        instances = tuple(instances)
        self._do("changed", now, instances=instances)
        super().changed(instances, now)

    def woken(self, now: float) -> None:
        self._do("woken", now)
        super().woken(now)

    def cancel(self, name: str) -> None:
        # called by the backend within `forget`: part of that answer, not a callback of the driver
        if self._recording.forgetting:
            self._recording.cancels = True
        else:
            self._do("cancel", self.state.now, request=name)
        super().cancel(name)

    def lost(self, instance: int, now: float) -> list[Request]:
        self._do("lost", now, instance=instance)
        return super().lost(instance, now)

    def close(self, instance: int, now: float) -> None:
        self._do("close", now, instance=instance)
        super().close(instance, now)

    def open(self, instance: ClusterInstance, now: float) -> None:
        self._do("open", now, instance=instance)
        super().open(instance, now)

    def deliver_events(self) -> None:
        # without pending events nothing happens
        if self._pending_events:
            self._do("deliver_events", self.state.now)
        super().deliver_events()

    def settle(self, now: float) -> float | None:
        self._do("settle", now)
        return super().settle(now)


class RecordingPolicy:
    """A policy that logs its decisions: events with their actions, and wake-up times."""

    def __init__(self, policy: PlacementPolicy, write: Callable[[dict[str, Any]], None]) -> None:
        self._policy, self._write = policy, write

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions = self._policy.on_event(event, view)
        self._write({"event": plain(event), "actions": [plain(action) for action in actions]})
        return actions

    def next_wakeup(self, now: float) -> float | None:
        at = self._policy.next_wakeup(now)
        self._write({"wake": at})
        return at


class RecordingBackend(InstanceBackend):
    """A backend that logs its answers. Calls without an answer pass through: a replay derives them from the log."""

    def __init__(self, backend: InstanceBackend, write: Callable[[dict[str, Any]], None]) -> None:
        self._backend, self._write, self.capabilities = backend, write, backend.capabilities
        # forgetting: `forget` is under way. cancels: the backend has cancelled the request's transfers in it.
        self.forgetting = self.cancels = False
        # number of questions of each kind so far
        self._questions: dict[str, int] = {}
        # last answer to each kind of question
        self._last_answers: dict[str, object] = {}

    def _record(self, question: str, answer: object) -> None:
        count = self._questions.get(question, 0)
        self._questions[question] = count + 1
        # only changes: `refresh` and `busy_s` are asked for every event and mostly answer the same
        if question not in self._last_answers or self._last_answers[question] != answer:
            self._last_answers[question] = answer
            self._write({"answer_to": question, "n": count, "value": answer})

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        try:
            seconds = self._backend.span_s(spans, nodes, before)
        except ActionImpossible as why:
            self._record("span_s", {"impossible": str(why)})
            raise
        self._record("span_s", seconds)
        return seconds

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        answer = self._backend.prefill_estimate(request, group)
        self._record("prefill_estimate", answer)
        return answer

    def busy_s(self, group: tuple[int, ...]) -> float:
        at_s = self._backend.busy_s(group)
        self._record(f"busy_s {group}", at_s)
        return at_s

    def refresh(self, instance: int) -> SchedulerStats:
        figures = self._backend.refresh(instance)
        self._record(f"refresh {instance}", figures)
        return figures

    def fits(self, entry: SpanEntry) -> bool:
        fits = self._backend.fits(entry)
        self._record("fits", fits)
        return fits

    def committed(self, entry: SpanEntry, now: float) -> None:
        self._backend.committed(entry, now)

    def begin(self, entry: SpanEntry, now: float) -> None:
        self._backend.begin(entry, now)

    def pause(self, entry: SpanEntry, now: float) -> None:
        try:
            self._backend.pause(entry, now)
        except ActionImpossible as why:
            self._record("pause", {"impossible": str(why)})
            raise
        self._record("pause", None)

    def stop(self, entry: SpanEntry, now: float) -> None:
        self._backend.stop(entry, now)

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        try:
            self._backend.enter(controlled, group, phase, now)
        except RequestError as error:
            self._record("enter", {"refused": str(error)})
            raise
        self._record("enter", None)

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        tokens = self._backend.leave(controlled, why, now)
        self._record("leave", tokens)
        return tokens

    def announced(self, controlled: ControlledRequest, target: int, now: float) -> None:
        self._backend.announced(controlled, target, now)

    def ready(self, kv_slice: KvSlice) -> bool:
        ready = self._backend.ready(kv_slice)
        self._record("ready", ready)
        return ready

    def send(self, kv_slice: KvSlice, now: float) -> None:
        self._backend.send(kv_slice, now)

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> None:
        self.forgetting, self.cancels = True, False
        self._backend.forget(controlled, why, now)
        self.forgetting = False
        self._record("forget", self.cancels)

    def pump(self, now: float) -> None:
        self._backend.pump(now)

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        self._backend.held(holder, group, now)

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        self._backend.released(holder, instances, now)


def plain(item: Event | Action) -> list[Any]:
    """Return an event or an action as JSON data: [name of its type, fields]. Requests in spans are named by id."""
    fields = msgspec.to_builtins(item)
    for key in ("spans", "batched_with"):
        for span in fields.get(key, ()):
            span["request"] = span["request"]["id"]
    return [type(item).__name__, fields]
