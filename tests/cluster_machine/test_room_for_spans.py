"""A span without enough free KV waits, and decodes behind it overtake it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.helpers.controller_audit import check
from tests.helpers.controller_chaos import LAYERS

from headway.control.backend import InstanceBackend, SchedulerStats
from headway.control.controller import ClusterController
from headway.control.queue_entries import SpanEntry
from headway.control.request import ControlledRequest
from headway.core.request import Request
from headway.core.span import Phase, Span
from headway.perf.hardware.links import NetworkLink
from headway.policy.placement.base import Action, CommitSpans, EnqueueRequest, Event
from headway.policy.placement.view import ClusterInstance, ClusterLinks, ClusterSnapshot, ClusterState

LINK = NetworkLink(name="test", bytes_per_s=1e9, latency_s=0.0, source="test")


class Room(InstanceBackend):
    """A backend with free KV for so many prompts, in `prompts`; `began` and `entered` record its calls in order."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts
        self.running: dict[str, SpanEntry] = {}
        self.began: list[str] = []
        self.entered: list[str] = []

    def span_s(self, spans: Sequence[Span], nodes: int, before: tuple[int, ...]) -> float:
        return 1.0

    def stay_s(self, request: Request, group: tuple[int, ...]) -> tuple[int, float]:
        return 1, 0.0

    def busy_s(self, group: tuple[int, ...]) -> float:
        return 0.0

    def refresh(self, instance: int) -> SchedulerStats:
        return SchedulerStats()

    def fits(self, entry: SpanEntry) -> bool:
        return self.prompts > 0

    def begin(self, entry: SpanEntry, now: float) -> None:
        self.prompts -= 1
        self.began.append(entry.owner)
        self.running[entry.owner] = entry

    def enter(self, journey: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        self.entered.append(journey.request.id)

    def leave(self, journey: ControlledRequest, why: str, now: float) -> int:
        return 1

    def forget(self, journey: ControlledRequest, why: str | None, now: float) -> None:
        self.prompts += 1


class Mute:
    """Tests act through `ClusterController.do`."""

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        return ()

    def next_wakeup(self, now: float) -> float | None:
        return None


def machine_of(hands: InstanceBackend, count: int = 3) -> ClusterController:
    book = ClusterState(
        [ClusterInstance(id=i, node=0, role="mixed") for i in range(count)], ClusterLinks(inside=LINK, across=LINK)
    )
    return ClusterController(book, hands, Mute(), layers=LAYERS)


def ask(machine: ClusterController, name: str, group: tuple[int, ...]) -> None:
    request = Request(id=name, arrival_s=0.0, prompt_tokens=100, max_output_tokens=9)
    machine.arrive(request, 0.0)
    span = Span(request=request, start=0, end=100, group=group)
    machine.do(CommitSpans(name, (span,), machine.book.version))


def prefilled(machine: ClusterController, hands: Room, name: str, *group: int) -> None:
    machine.span_done(hands.running.pop(name), 1.0)
    machine.do(EnqueueRequest(name, group, "decode"))
    machine.settle(1.0)
    check(machine)


def test_decodes_overtake_a_span_that_lacks_kv_blocks() -> None:
    hands = Room(2)
    machine = machine_of(hands)
    for name in "abc":
        ask(machine, name, (0, 1))
    machine.settle(0.0)
    assert hands.began == ["a"]
    prefilled(machine, hands, "a", 0, 1)
    assert (hands.began, hands.entered) == (["a", "b"], []), "while there is room spans go in their order"
    prefilled(machine, hands, "b", 0, 1)
    assert (hands.began, hands.entered) == (["a", "b"], ["a", "b"]), "in the order in which they were computed"
    machine.stayed(machine.journeys["a"], 9, True, 2.0)
    machine.settle(2.0)
    assert hands.began == ["a", "b"], "the other one decodes there"
    machine.stayed(machine.journeys["b"], 9, True, 3.0)
    machine.settle(3.0)
    assert hands.began == ["a", "b", "c"]
    check(machine)


def test_decode_on_another_instance_overtakes_a_waiting_span_too() -> None:
    """A decode behind a waiting span overtakes it on any instance: its KV may lie where the span needs blocks."""
    hands = Room(1)
    machine = machine_of(hands)
    ask(machine, "a", (0, 1))
    ask(machine, "b", (0, 1))
    ask(machine, "c", (1, 2))
    machine.settle(0.0)
    prefilled(machine, hands, "a", 2)
    assert (hands.began, hands.entered) == (["a"], ["a"])
    machine.stayed(machine.journeys["a"], 9, True, 2.0)
    machine.changed((0, 1), 2.0)  # they have told of their room
    machine.settle(2.0)
    assert hands.began == ["a", "b"]
