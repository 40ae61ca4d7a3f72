"""A log driven again: the same machine and policy, the driver's part from the log, in the log's own time.

A policy whose decisions depend on nothing but events, views and its own state decides the same. Where it does not,
`ReplayResult.run` says at which decision first; nothing after that means anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.control.backend import ActionImpossible, InstanceBackend, SchedulerStats
from headway.control.controller import ClusterController
from headway.control.decision_log import SCHEMA, plain
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.control.transfer_queue import KvSlice
from headway.core.errors import ConfigError, RequestError
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.policy.placement.base import Action, Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterLinks, ClusterSnapshot, ClusterState


@dataclass(frozen=True)
class ReplayDifference:
    """The first decision that is another one. `recorded`, `replayed`: (event, actions), or when to be woken; None:
    there is none."""

    decision: int
    at_s: float
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"decision {self.decision} at {self.at_s:.6f} s: recorded {self.recorded}, replayed {self.replayed}"


class _DecisionDiffersError(Exception):
    def __init__(self, recorded: object, replayed: object) -> None:
        super().__init__(recorded, replayed)
        self.recorded, self.replayed = recorded, replayed


class ReplayResult:
    """decisions: that were the same so far."""

    def __init__(
        self,
        lines: Iterable[bytes | str],
        make: Callable[[ReplayResult], PlacementPolicy],
        noted: Callable[[str], None] | None = None,
    ) -> None:
        """`make`: the policy, new, as the driver made it (it may look at `machine` and `about` when it is asked).
        `noted` is told the driver's notes. A last line that is not whole is left out. ConfigError: it is no log, or
        damaged; it names the line."""
        header, self._calls, answers, self._decided = _read(lines)
        self.about: Any = header["about"]
        self.decisions = 0
        self._noted = noted
        instances = msgspec.convert(header["instances"], list[ClusterInstance])
        book = ClusterState(instances, msgspec.convert(header["links"], ClusterLinks))
        for instance in header["gone"]:
            book.remove(instance)
        self._hands = _LoggedBackend(answers, lambda name: self.machine.cancel(name))
        self.machine = ClusterController(
            book,
            self._hands,
            self,
            layers=header["layers"],
            backends=header["backends"],
            order=header["order"],
        )
        self._policy = make(self)

    def run(self) -> ReplayDifference | None:
        """Drive it to the log's end; None: all decisions were the same. (What follows from the last callback may have
        been cut off.) ConfigError names a line that nothing can be driven by."""
        left = len(self._calls)
        try:
            for number, call in self._calls:
                left -= 1
                try:
                    self._do(call)
                except _DecisionDiffersError:
                    raise
                except Exception as error:
                    what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
                    raise ConfigError(f"line {number} of the log cannot be replayed: {what}") from error
        except _DecisionDiffersError as differs:
            if not left and differs.recorded is None:
                return None
            return ReplayDifference(self.decisions, self.machine.state.now, differs.recorded, differs.replayed)
        if self.decisions < len(self._decided):
            return ReplayDifference(self.decisions, self.machine.state.now, self._decided[self.decisions], None)
        return None

    # -- the policy ---------------------------------------------------------------------------------------------------

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See Placement: the policy's own, compared."""
        actions = self._policy.on_event(event, view)
        self._compare([plain(event), [plain(action) for action in actions]])
        return actions

    def next_wakeup(self, now: float) -> float | None:
        """See Placement."""
        at = self._policy.next_wakeup(now)
        self._compare(at)
        return at

    def _compare(self, decided: object) -> None:
        decided = msgspec.json.decode(msgspec.json.encode(decided))
        if self.decisions >= len(self._decided):
            raise _DecisionDiffersError(None, decided)
        if self._decided[self.decisions] != decided:
            raise _DecisionDiffersError(self._decided[self.decisions], decided)
        self.decisions += 1

    # -- the driver ---------------------------------------------------------------------------------------------------

    def _do(self, call: dict[str, Any]) -> None:
        machine, word, now = self.machine, call["do"], call["t"]
        if word == "settle":
            machine.settle(now)
        elif word == "tell":
            machine.tell()
        elif word == "arrive":
            machine.arrive(msgspec.convert(call["request"], Request), now)
        elif word in ("span_done", "span_paused"):
            entry = self._hands.running.pop((call["request"], call["index"]), None)
            if entry is None or entry.state != "running":
                raise _DecisionDiffersError(call, "it does not run")
            if word == "span_done":
                machine.span_done(entry, now, call["over"])
            else:
                machine.span_paused(entry, call["layer"], now, call.get("tokens"), call.get("share"))
        elif word == "stayed":
            machine.stayed(self._journey(call), call["tokens"], call["finished"], now)
        elif word == "sent":
            piece = self._hands.sending.pop(call["piece"], None)
            if piece is not None:
                machine.sent(piece, now)
        elif word == "drop":
            machine.drop(self._journey(call), call["why"], now)
        elif word == "changed":
            machine.changed(call["instances"], now)
        elif word == "woken":
            machine.woken(now)
        elif word == "cancel":
            machine.cancel(call["request"])
        elif word == "lost":
            machine.lost(call["instance"], now)
        elif word == "close":
            machine.close(call["instance"], now)
        elif word == "open":
            machine.open(msgspec.convert(call["instance"], ClusterInstance), now)
        elif word == "note" and self._noted is not None:
            self._noted(call["note"])

    def _journey(self, call: dict[str, Any]) -> ControlledRequest:
        journey = self.machine.journeys.get(call["request"])
        if journey is None:
            raise _DecisionDiffersError(call, "there is no such request")
        return journey


def _read(
    lines: Iterable[bytes | str],
) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]], dict[str, list[Any]], list[Any]]:
    """(header, callbacks with their lines' numbers, answers by question, decisions)."""
    read = iter(lines)
    try:
        header = msgspec.json.decode(next(read))
        if header["schema"] != SCHEMA:
            raise KeyError(header["schema"])
    except (StopIteration, KeyError, TypeError, UnicodeDecodeError, msgspec.DecodeError):
        raise ConfigError(f"this is no log of a cluster: its first line should name the schema {SCHEMA}") from None
    calls: list[tuple[int, dict[str, Any]]] = []
    answers: dict[str, list[Any]] = {}
    decided: list[Any] = []
    torn = 0
    for number, text in enumerate(read, start=2):
        if torn:
            break
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
        except (UnicodeDecodeError, msgspec.MsgspecError):
            torn = number
            continue
        try:
            if "do" in line:
                calls.append((number, line))
            elif "said" in line:
                answers.setdefault(line["said"], []).append((line["n"], line["is"]))
            elif "wake" in line:
                decided.append(line["wake"])
            else:
                decided.append([line["event"], line["actions"]])
        except (KeyError, TypeError):
            raise ConfigError(f"line {number} of the log is not of a cluster's log") from None
    else:
        return header, calls, answers, decided
    raise ConfigError(f"line {torn} of the log cannot be read, and others follow: it is damaged")


class _LoggedBackend(InstanceBackend):
    """Answer what was answered. running, sending: what callbacks will name."""

    def __init__(self, answers: dict[str, list[Any]], cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._answers = {question: iter([*said, (1 << 62, None)]) for question, said in answers.items()}
        self._next = {question: next(each) for question, each in self._answers.items()}
        self._now: dict[str, Any] = {}
        self._asked: dict[str, int] = {}
        self.running: dict[tuple[str, int], SpanEntry] = {}
        self.sending: dict[int, KvSlice] = {}

    def _said(self, question: str) -> Any:
        count = self._asked.get(question, 0)
        self._asked[question] = count + 1
        if question not in self._next:
            raise _DecisionDiffersError(None, f"the hands were asked: {question}")
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
        return float(self._said("span_s"))

    def stay_s(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        tokens, seconds = self._said("stay_s")
        return tokens, seconds

    def busy_s(self, group: tuple[int, ...]) -> float:
        return float(self._said(f"busy_s {group}"))

    def refresh(self, instance: int) -> SchedulerStats:
        return msgspec.convert(self._said(f"refresh {instance}"), SchedulerStats)

    def fits(self, entry: SpanEntry) -> bool:
        return bool(self._said("fits")) if "fits" in self._next else True  # logs of 0.1 do not say

    def begin(self, entry: SpanEntry, now: float) -> None:
        self.running[entry.owner, entry.index] = entry

    def pause(self, entry: SpanEntry, now: float) -> None:
        self._said("pause")

    def stop(self, entry: SpanEntry, now: float) -> None:
        self.running.pop((entry.owner, entry.index), None)

    def enter(self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        self._said("enter")

    def leave(self, journey: ControlledRequest, why: str, now: float) -> int:
        return int(self._said("leave"))

    def send(self, piece: KvSlice, now: float) -> None:
        self.sending[piece.number] = piece

    def forget(self, journey: ControlledRequest, why: str | None, now: float) -> None:
        if self._said("forget"):
            self._cancel(journey.request.id)

    def pump(self, now: float) -> None:
        """Nothing is computed."""
