"""Replay of a decision log: the same controller and policy, with driver and backend replaced by the log.

A policy whose decisions depend on nothing but events, snapshots and its own state decides the same. Where it does not,
`ReplayResult.run` returns the first decision that differs; later ones have no meaning.
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
        noted: Callable[[str], None] | None = None,
    ) -> None:
        """lines: the log; a torn last line is left out. make: makes the policy as the driver made it; called with this
        object, whose `machine` and `about` are set. noted: called with each note of the driver. Raises ConfigError,
        with the line's number, for anything that is no log, or a damaged one."""
        header, self._calls, answers, self._decided = _read(lines)
        self.about: Any = header["about"]
        # decisions so far, all the same as recorded
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
            return ReplayDifference(self.decisions, self.machine.state.now, differs.recorded, differs.replayed)
        # decisions were recorded to which the replay did not come
        if self.decisions < len(self._decided):
            return ReplayDifference(self.decisions, self.machine.state.now, self._decided[self.decisions], None)
        return None

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
    """Return (header, callbacks with their line numbers, answers by question, decisions in order)."""
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
    # number of a line that cannot be read: no error if it is the last one, cut off as it was written
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
    """A backend that gives the recorded answers, and computes and sends nothing."""

    def __init__(self, answers: dict[str, list[Any]], cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        # (number of the question, answer) pairs; a number never reached ends each list
        self._answers = {question: iter([*said, (1 << 62, None)]) for question, said in answers.items()}
        self._next = {question: next(each) for question, each in self._answers.items()}
        # answer in force for each question, and number of questions so far
        self._now: dict[str, Any] = {}
        self._asked: dict[str, int] = {}
        # entries and slices that callbacks of the log name, by (request, index) and by number
        self.running: dict[tuple[str, int], SpanEntry] = {}
        self.sending: dict[int, KvSlice] = {}

    def _said(self, question: str) -> Any:
        count = self._asked.get(question, 0)
        self._asked[question] = count + 1
        if question not in self._next:
            raise _DecisionDiffersError(None, f"the hands were asked: {question}")
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
        """Do nothing: no iteration is computed."""
