"""Decision log of a controller: the driver's callbacks, the backend's answers and the policy's decisions, enough to
drive the same controller and policy again without driver and backend (`replay`).

JSON lines: a header; `do`: a callback, with its time `t`; `said`: the backend's answer (`is`) to the n-th question of a
kind, where it differs from the answer before; `event`: an event passed to the policy, with its `actions`; `wake`: when
the policy wants to be woken.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controller import ClusterController
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.transfer_queue import KvSlice
from headway.core.errors import RequestError
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.policy.placement.base import Action, Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterSnapshot, ClusterState

SCHEMA = "headway.cluster.log/2"
Sink = Callable[[bytes], object]
"""Receives one line, with its line end: a file's `write`."""


class RecordingController(ClusterController):
    """A `ClusterController` that logs its callbacks, its backend's answers and its policy's decisions.

    sink: receives the log. about: data of the driver for the log's header, such as how to make the policy again."""

    def __init__(
        self,
        book: ClusterState,
        hands: InstanceBackend,
        policy: PlacementPolicy,
        *,
        sink: Sink,
        layers: int,
        backends: int = 16,
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
                "backends": backends,
                "order": order,
                "instances": book.instances,
                # removed instances keep their entry and id, but have no node
                "gone": sorted(set(range(len(book.instances))).difference(*book.by_node.values())),
                "links": book.links,
                "about": about,
            }
        )
        self._heard = RecordingBackend(hands, self._write)
        super().__init__(
            book,
            self._heard,
            RecordingPolicy(policy, self._write),
            layers=layers,
            backends=backends,
            order=order,
            stopwatch=stopwatch,
        )

    def _write(self, line: dict[str, Any]) -> None:
        self._sink(msgspec.json.encode(line) + b"\n")

    def _do(self, word: str, now: float, **what: Any) -> None:
        self._write({"do": word, "t": now, **what})

    def note(self, word: str) -> None:
        self._do("note", self.state.now, note=word)

    def arrive(self, request: Request, now: float, driver: Any = None) -> ControlledRequest:
        self._do("arrive", now, request=request)
        return super().arrive(request, now, driver)

    def span_done(self, entry: SpanEntry, now: float, over: Collection[str] = ()) -> None:
        self._do("span_done", now, request=entry.owner, index=entry.index, over=sorted(over))
        super().span_done(entry, now, over)

    def span_paused(
        self, entry: SpanEntry, layer: int, now: float, tokens: int | None = None, share: float | None = None
    ) -> None:
        where = {"request": entry.owner, "index": entry.index, "layer": layer, "tokens": tokens, "share": share}
        self._do("span_paused", now, **where)
        super().span_paused(entry, layer, now, tokens, share)

    def stayed(self, journey: ControlledRequest, tokens: int, finished: bool, now: float) -> None:
        self._do("stayed", now, request=journey.request.id, tokens=tokens, finished=finished)
        super().stayed(journey, tokens, finished, now)

    def sent(self, piece: KvSlice, now: float) -> None:
        self._do("sent", now, piece=piece.number)
        super().sent(piece, now)

    def drop(self, journey: ControlledRequest, why: str, now: float) -> None:
        # a drop without effect needs no replay
        if not journey.ended:
            self._do("drop", now, request=journey.request.id, why=why)
        super().drop(journey, why, now)

    def changed(self, instances: Iterable[int], now: float) -> None:
        instances = tuple(instances)
        self._do("changed", now, instances=instances)
        super().changed(instances, now)

    def woken(self, now: float) -> None:
        self._do("woken", now)
        super().woken(now)

    def cancel(self, name: str) -> None:
        # called by the backend within `forget`: part of that answer, not a callback of the driver
        if self._heard.forgetting:
            self._heard.cancels = True
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

    def tell(self) -> None:
        # without pending events nothing happens
        if self._news:
            self._do("tell", self.state.now)
        super().tell()

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

    def __init__(self, hands: InstanceBackend, write: Callable[[dict[str, Any]], None]) -> None:
        self._hands, self._write = hands, write
        # forgetting: `forget` is under way. cancels: the backend has cancelled the request's transfers in it.
        self.forgetting = self.cancels = False
        # number of questions of each kind so far
        self._asked: dict[str, int] = {}
        # last answer to each kind of question
        self._known: dict[str, object] = {}

    def _said(self, question: str, answer: object) -> None:
        count = self._asked.get(question, 0)
        self._asked[question] = count + 1
        # only changes: `refresh` and `busy_s` are asked for every event and mostly answer the same
        if question not in self._known or self._known[question] != answer:
            self._known[question] = answer
            self._write({"said": question, "n": count, "is": answer})

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        try:
            seconds = self._hands.span_s(spans, nodes, before)
        except ActionImpossible as why:
            self._said("span_s", {"impossible": str(why)})
            raise
        self._said("span_s", seconds)
        return seconds

    def stay_s(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        answer = self._hands.stay_s(request, group)
        self._said("stay_s", answer)
        return answer

    def busy_s(self, group: tuple[int, ...]) -> float:
        at_s = self._hands.busy_s(group)
        self._said(f"busy_s {group}", at_s)
        return at_s

    def refresh(self, instance: int) -> SchedulerStats:
        figures = self._hands.refresh(instance)
        self._said(f"refresh {instance}", figures)
        return figures

    def fits(self, entry: SpanEntry) -> bool:
        fits = self._hands.fits(entry)
        self._said("fits", fits)
        return fits

    def committed(self, entry: SpanEntry, now: float) -> None:
        self._hands.committed(entry, now)

    def begin(self, entry: SpanEntry, now: float) -> None:
        self._hands.begin(entry, now)

    def pause(self, entry: SpanEntry, now: float) -> None:
        try:
            self._hands.pause(entry, now)
        except ActionImpossible as why:
            self._said("pause", {"impossible": str(why)})
            raise
        self._said("pause", None)

    def stop(self, entry: SpanEntry, now: float) -> None:
        self._hands.stop(entry, now)

    def enter(self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        try:
            self._hands.enter(journey, group, phase, now)
        except RequestError as error:
            self._said("enter", {"refused": str(error)})
            raise
        self._said("enter", None)

    def leave(self, journey: ControlledRequest, why: str, now: float) -> int:
        tokens = self._hands.leave(journey, why, now)
        self._said("leave", tokens)
        return tokens

    def announced(self, journey: ControlledRequest, target: int, now: float) -> None:
        self._hands.announced(journey, target, now)

    def send(self, piece: KvSlice, now: float) -> None:
        self._hands.send(piece, now)

    def forget(self, journey: ControlledRequest, why: str | None, now: float) -> None:
        self.forgetting, self.cancels = True, False
        self._hands.forget(journey, why, now)
        self.forgetting = False
        self._said("forget", self.cancels)

    def pump(self, now: float) -> None:
        self._hands.pump(now)

    def held(self, holder: str, group: tuple[int, ...], now: float) -> None:
        self._hands.held(holder, group, now)

    def released(self, holder: str, instances: Iterable[int], now: float) -> None:
        self._hands.released(holder, instances, now)


def plain(said: Event | Action) -> list[Any]:
    """Return an event or an action as JSON data: [name of its type, fields]. Requests in spans are named by id."""
    fields = msgspec.to_builtins(said)
    for key in ("spans", "batched_with"):
        for span in fields.get(key, ()):
            span["request"] = span["request"]["id"]
    return [type(said).__name__, fields]
