"""A span without enough free KV waits, and decodes behind it overtake it."""

from __future__ import annotations

from tests.helpers.cluster_worlds import LINK
from tests.helpers.controller_audit import check
from tests.helpers.controller_chaos import LAYERS, QuietBackend
from tests.helpers.told_policy import Told

from headway.control.controller import ClusterController
from headway.control.entries import ControlledRequest, SpanEntry
from headway.core.request import Phase, Request, Span
from headway.policy.placement.contract import (
    ClusterInstance,
    ClusterLinks,
    ClusterState,
    CommitSpans,
    EnqueueRequest,
)


class Room(QuietBackend):
    """A backend with free KV for so many prompts, in `prompts`; `began` and `entered` record its calls in order."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts
        self.running: dict[str, SpanEntry] = {}
        self.began: list[str] = []
        self.entered: list[str] = []

    def fits(self, entry: SpanEntry) -> bool:
        return self.prompts > 0

    def begin(self, entry: SpanEntry, now: float) -> None:
        self.prompts -= 1
        self.began.append(entry.owner)
        self.running[entry.owner] = entry

    def enter(self, controlled: ControlledRequest, group: tuple[int, ...], phase: Phase, now: float) -> None:
        self.entered.append(controlled.request.id)

    def forget(self, controlled: ControlledRequest, why: str | None, now: float) -> bool:
        self.prompts += 1
        return False


def controller_of(backend: Room, count: int = 3) -> ClusterController:
    cluster = ClusterState(
        [ClusterInstance(id=i, node=0, role="mixed") for i in range(count)], ClusterLinks(inside=LINK, across=LINK)
    )
    return ClusterController(cluster, backend, Told(), layers=LAYERS)


def ask(controller: ClusterController, name: str, group: tuple[int, ...]) -> None:
    request = Request(id=name, arrival_s=0.0, prompt_tokens=100, max_output_tokens=9)
    controller.arrive(request, 0.0)
    span = Span(request=request, start=0, end=100, group=group)
    controller.do(CommitSpans(name, (span,), controller.cluster.version))


def prefilled(controller: ClusterController, backend: Room, name: str, *group: int) -> None:
    controller.span_done(backend.running.pop(name), 1.0)
    controller.do(EnqueueRequest(name, group, "decode"))
    controller.settle(1.0)
    check(controller)


def test_decodes_overtake_a_span_that_lacks_kv_blocks() -> None:
    backend = Room(2)
    controller = controller_of(backend)
    for name in "abc":
        ask(controller, name, (0, 1))
    controller.settle(0.0)
    assert backend.began == ["a"]
    prefilled(controller, backend, "a", 0, 1)
    assert (backend.began, backend.entered) == (["a", "b"], []), "while there is room spans go in their order"
    prefilled(controller, backend, "b", 0, 1)
    assert (backend.began, backend.entered) == (["a", "b"], ["a", "b"]), "in the order in which they were computed"
    controller.left_scheduler(controller.requests["a"], 9, True, 2.0)
    controller.settle(2.0)
    assert backend.began == ["a", "b"], "the other one decodes there"
    controller.left_scheduler(controller.requests["b"], 9, True, 3.0)
    controller.settle(3.0)
    assert backend.began == ["a", "b", "c"]
    check(controller)


def test_decode_on_another_instance_overtakes_a_waiting_span_too() -> None:
    """A decode behind a waiting span overtakes it on any instance: its KV may lie where the span needs blocks."""
    backend = Room(1)
    controller = controller_of(backend)
    ask(controller, "a", (0, 1))
    ask(controller, "b", (0, 1))
    ask(controller, "c", (1, 2))
    controller.settle(0.0)
    prefilled(controller, backend, "a", 2)
    assert (backend.began, backend.entered) == (["a"], ["a"])
    controller.left_scheduler(controller.requests["a"], 9, True, 2.0)
    controller.changed((0, 1), 2.0)  # they have told of their room
    controller.settle(2.0)
    assert backend.began == ["a", "b"]
