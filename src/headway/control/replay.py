"""Replay of a decision log: the same controller and policy, with driver and backend replaced by the log.

A policy whose decisions depend on nothing but events, snapshots and its own state decides the same. Where it does not,
`ReplayResult.run` returns the first decision that differs; later ones have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controlled_request import ControlledRequest
from headway.control.controller import ClusterController
from headway.control.decision_log import plain
from headway.control.log_reader import read_log
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.errors import ConfigError, RequestError
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.policy.placement.base import Action, Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterLinks, ClusterSnapshot, ClusterState


@dataclass(frozen=True)
class ReplayDifference:
    """The first decision that differs."""

    decision: int
    """Number of decisions before it."""
    at_s: float
    """Time in the log, in seconds."""
    recorded: object
    """(event, actions) or a wake-up time; None: the log has no such decision."""
    replayed: object
    """Likewise; None: the replay did not come to it."""

    def __str__(self) -> str:
        return f"decision {self.decision} at {self.at_s:.6f} s: recorded {self.recorded}, replayed {self.replayed}"


class ReplayObserver(Protocol):
    """Called with what the instances do in a replay. Times are the log's, seconds."""

    def span_begun(self, entry: SpanEntry, now: float) -> None:
        """A span, with those batched with it, begins on its group, or goes on."""

    def span_ended(self, entry: SpanEntry, now: float) -> None:
        """It ends, pauses or is stopped."""

    def kv_sent(self, kv_slice: KvSlice, now: float) -> None:
        """A KV slice that was granted at `kv_slice.began_s` has arrived."""

    def called(self, call: dict[str, Any], now: float) -> None:
        """A callback of the log is about to be made."""


class _DecisionDiffersError(Exception):
    def __init__(self, recorded: object, replayed: object) -> None:
        super().__init__(recorded, replayed)
        self.recorded, self.replayed = recorded, replayed


class ReplayResult:
    """A replay: the controller with its policy and the log. One `run` for each object."""

    def __init__(
        self,
        lines: Iterable[bytes | str],
        make: Callable[[ReplayResult], PlacementPolicy],
        on_note: Callable[[str], None] | None = None,
        observer: ReplayObserver | None = None,
    ) -> None:
        """lines: the log; a torn last line is left out. make: makes the policy as the driver made it; called with this
        object, whose `controller` and `about` are set. on_note: called with each note of the driver. Raises
        ConfigError, with the line's number, for anything that is no log, or a damaged one."""
        log = read_log(lines)
        header, self._calls, self._decided = log.header, log.callbacks, log.decisions
        self.about: Any = header["about"]
        # decisions so far, all the same as recorded
        self.decisions = 0
        self._on_note, self._observer = on_note, observer
        instances = msgspec.convert(header["instances"], list[ClusterInstance])
        cluster = ClusterState(instances, msgspec.convert(header["links"], ClusterLinks))
        for instance in header["lost"]:
            cluster.remove(instance)
        self._backend = _LoggedBackend(log.answers, lambda name: self.controller.cancel(name), observer)
        self.controller = ClusterController(
            cluster,
            self._backend,
            self,
            layers=header["layers"],
            receive_backends=header["receive_backends"],
            order=header["order"],
        )
        self._handlers = self._callbacks()
        self._policy = make(self)

    def run(self) -> ReplayDifference | None:
        """Drive the controller to the log's end, and return the first difference; None: all decisions were the same.
        Decisions after the last callback may be missing from a log that was cut off. Raises ConfigError, with the
        line's number, for a callback that cannot be made."""
        left = len(self._calls)
        try:
            for number, call in self._calls:
                left -= 1
                try:
                    self._do(call)
                except _DecisionDiffersError:
                    raise
                # a log is input: whatever a damaged callback leads to is an error of its line
                except Exception as error:
                    what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
                    raise ConfigError(f"line {number} of the log cannot be replayed: {what}") from error
        except _DecisionDiffersError as differs:
            # the log ends within the last callback: the replay has gone further than it
            if not left and differs.recorded is None:
                return None
            return ReplayDifference(self.decisions, self.controller.state.now, differs.recorded, differs.replayed)
        # decisions were recorded to which the replay did not come
        if self.decisions < len(self._decided):
            return ReplayDifference(self.decisions, self.controller.state.now, self._decided[self.decisions], None)
        return None

    def next_decision(self) -> Any:
        """Return the next recorded decision, [event, actions] or a wake-up time. Raises IndexError at the log's end."""
        return self._decided[self.decisions]

    # -- the policy ---------------------------------------------------------------------------------------------------

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """Return the policy's actions, compared with the recorded ones. See `PlacementPolicy`."""
        actions = self._policy.on_event(event, view)
        self._compare([plain(event), [plain(action) for action in actions]])
        return actions

    def next_wakeup(self, now: float) -> float | None:
        """Return the policy's wake-up time, compared with the recorded one. See `PlacementPolicy`."""
        at = self._policy.next_wakeup(now)
        self._compare(at)
        return at

    def _compare(self, decided: object) -> None:
        # as the log has it: tuples become lists, and numbers take JSON's form
        decided = msgspec.json.decode(msgspec.json.encode(decided))
        if self.decisions >= len(self._decided):
            raise _DecisionDiffersError(None, decided)
        if self._decided[self.decisions] != decided:
            raise _DecisionDiffersError(self._decided[self.decisions], decided)
        self.decisions += 1

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _do(self, call: dict[str, Any]) -> None:
        if self._observer is not None:
            self._observer.called(call, call["t"])
        self._handlers[call["do"]](call, call["t"])

    def _callbacks(self) -> dict[str, Callable[[dict[str, Any], float], object]]:
        """Return how each recorded callback is made again, from its line and its time."""
        controller, on_note = self.controller, self._on_note
        return {
            "settle": lambda call, now: controller.settle(now),
            "deliver_events": lambda call, now: controller.deliver_events(),
            "arrive": lambda call, now: controller.arrive(
                msgspec.convert(call["request"], Request), now, cached=tuple(call.get("cached", ()))
            ),
            "span_done": lambda call, now: controller.span_done(self._running(call), now, call["finished"]),
            "span_paused": lambda call, now: controller.span_paused(
                self._running(call), call["layer"], now, call.get("tokens"), call.get("share")
            ),
            "left_scheduler": lambda call, now: controller.left_scheduler(
                self._request(call), call["tokens"], call["finished"], now
            ),
            "sent": self._sent,
            "drop": lambda call, now: controller.drop(self._request(call), call["why"], now),
            "changed": lambda call, now: controller.changed(call["instances"], now),
            "woken": lambda call, now: controller.woken(now),
            "cancel": lambda call, now: controller.cancel(call["request"]),
            "lost": lambda call, now: controller.lost(call["instance"], now),
            "close": lambda call, now: controller.close(call["instance"], now),
            "open": lambda call, now: controller.open(msgspec.convert(call["instance"], ClusterInstance), now),
            "note": lambda call, now: None if on_note is None else on_note(call["note"]),
        }

    def _sent(self, call: dict[str, Any], now: float) -> None:
        kv_slice = self._backend.sending.pop(call["kv_slice"], None)
        if kv_slice is not None:
            if self._observer is not None:
                self._observer.kv_sent(kv_slice, now)
            self.controller.sent(kv_slice, now)

    def _running(self, call: dict[str, Any]) -> SpanEntry:
        entry = self._backend.running.pop((call["request"], call["index"]), None)
        if entry is None or entry.state != "running":
            raise _DecisionDiffersError(call, "it does not run")
        if self._observer is not None:
            self._observer.span_ended(entry, call["t"])
        return entry

    def _request(self, call: dict[str, Any]) -> ControlledRequest:
        controlled = self.controller.requests.get(call["request"])
        if controlled is None:
            raise _DecisionDiffersError(call, "there is no such request")
        return controlled


class _LoggedBackend(InstanceBackend):
    """A backend that gives the recorded answers, and computes and sends nothing."""

    def __init__(
        self, answers: dict[str, list[Any]], cancel: Callable[[str], None], observer: ReplayObserver | None
    ) -> None:
        self._cancel, self._observer = cancel, observer
        # (number of the question, answer) pairs; a number never reached ends each list
        self._answers = {question: iter([*logged, (1 << 62, None)]) for question, logged in answers.items()}
        self._next = {question: next(each) for question, each in self._answers.items()}
        # answer in force for each question, and number of questions so far
        self._now: dict[str, Any] = {}
        self._questions: dict[str, int] = {}
        # entries and slices that callbacks of the log name, by (request, index) and by number
        self.running: dict[tuple[str, int], SpanEntry] = {}
        self.sending: dict[int, KvSlice] = {}

    def _answer(self, question: str) -> Any:
        count = self._questions.get(question, 0)
        self._questions[question] = count + 1
        if question not in self._next:
            raise _DecisionDiffersError(None, f"the backend was asked: {question}")
        # the log has changes only: until the next one the last answer is in force
        if self._next[question][0] == count:
            self._now[question] = self._next[question][1]
            self._next[question] = next(self._answers[question])
        answer = self._now[question]
        if isinstance(answer, dict) and "impossible" in answer:
            raise ActionImpossible(answer["impossible"])
        if isinstance(answer, dict) and "refused" in answer:
            raise RequestError(answer["refused"])
        return answer

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        return float(self._answer("span_s"))

    def prefill_estimate(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens, seconds = self._answer("prefill_estimate")
        return tokens, seconds

    def busy_s(self, group: tuple[int, ...]) -> float:
        return float(self._answer(f"busy_s {group}"))

    def refresh(self, instance: int) -> SchedulerStats:
        return msgspec.convert(self._answer(f"refresh {instance}"), SchedulerStats)

    def fits(self, entry: SpanEntry) -> bool:
        return bool(self._answer("fits")) if "fits" in self._next else True  # logs of 0.1 have no such answers

    def begin(self, entry: SpanEntry, now: float) -> None:
        self.running[entry.owner, entry.index] = entry
        if self._observer is not None:
            self._observer.span_begun(entry, now)

    def pause(self, entry: SpanEntry, now: float) -> None:
        self._answer("pause")

    def stop(self, entry: SpanEntry, now: float) -> None:
        self.running.pop((entry.owner, entry.index), None)
        if self._observer is not None:
            self._observer.span_ended(entry, now)

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        self._answer("enter")

    def leave(self, controlled: ControlledRequest, why: str, now: float) -> int:
        return int(self._answer("leave"))

    def ready(self, kv_slice: KvSlice) -> bool:
        return bool(self._answer("ready")) if "ready" in self._next else True  # older logs have no such answers

    def send(self, kv_slice: KvSlice, now: float) -> None:
        self.sending[kv_slice.number] = kv_slice

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> None:
        if self._answer("forget"):
            self._cancel(controlled.request.id)

    def pump(self, now: float) -> None:
        """Do nothing: no iteration is computed."""
