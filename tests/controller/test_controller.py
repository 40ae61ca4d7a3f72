"""The controller under random work and losses: each request ends once, no state remains, and each entry gets its
turn."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.controller_audit import check
from tests.helpers.controller_chaos import LAYERS, Chaos
from tests.helpers.told_policy import Told

from headway.core.errors import InvariantError
from headway.core.request import Request, Span
from headway.policy.placement.contract import (
    Action,
    ActionRefused,
    ClusterInstance,
    ClusterSnapshot,
    CommitSpans,
    EnqueueRequest,
    HoldGranted,
    HoldGroup,
    InstanceJoined,
    InstanceLeft,
    InstanceLost,
    RequestArrived,
    RequestDropped,
    RequestFinished,
    RequestPrefilled,
    SpanPaused,
    TransferKv,
    WakeupDue,
)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30))
def test_every_request_ends_once_under_random_losses(seed: int) -> None:
    chaos = Chaos(seed)
    for _ in range(250):
        chaos.step()
    chaos.end()
    heard = chaos.policy.heard
    arrived = [event.request.id for event in heard if isinstance(event, RequestArrived)]
    ended = [event.request for event in heard if isinstance(event, RequestFinished | RequestDropped)]
    assert sorted(arrived) == sorted(ended) == sorted(chaos.ended), "each ends once"
    assert all(holder is None for holder in chaos.controller.queues.holder)
    assert not chaos.controller.state.transfers.under_way()
    # counters must return to zero: a drift would bias every later snapshot
    assert not any(chaos.controller.state.residents)
    assert max(map(abs, chaos.controller.state.tokens)) < 1e-6


def test_random_work_reaches_pauses_losses_and_refusals() -> None:
    heard = []
    for seed in range(10):
        chaos = Chaos(seed)
        for _ in range(250):
            chaos.step()
        heard += chaos.policy.heard
    kinds = {type(event) for event in heard}
    assert {SpanPaused, InstanceLost, ActionRefused, RequestFinished, RequestDropped} <= kinds


@pytest.mark.long
def test_every_request_ends_under_frequent_losses() -> None:
    for seed in range(400):
        chaos = Chaos(seed, losses=0.1)
        for _ in range(400):
            chaos.step()
        chaos.end()


Quiet = tuple[Chaos, Told, Callable[..., None]]


@pytest.fixture
def quiet() -> Quiet:
    """A driver with two requests, and its policy; the function acts and settles."""
    chaos, told = Chaos(0, losses=0.0, leavers=0.0), Told()
    chaos.controller.policy = told
    for name in ("a", "b"):
        chaos.controller.arrive(Request(id=name, arrival_s=0.0, prompt_tokens=100, max_output_tokens=3), 0.0)
    chaos.controller.settle(0.0)

    def act(*actions: Action) -> None:
        for action in actions:
            chaos.controller.do(action)
        chaos.controller.settle(chaos.now)
        check(chaos.controller)

    return chaos, told, act


def span(chaos: Chaos, name: str, group: tuple[int, ...], start: int = 0, end: int = 100) -> Span:
    return Span(request=chaos.controller.requests[name].request, start=start, end=end, group=group)


def test_named_reservation_survives_a_loss_and_waiting_ones_are_refused(quiet: Quiet) -> None:
    chaos, told, act = quiet
    controller = chaos.controller
    act(HoldGroup("maintenance", (0, 1)), HoldGroup("other", (1, 2)))
    assert told.last(HoldGranted).holder == "maintenance"
    assert controller.lost(1, 0.0) == []
    controller.settle(0.0)
    check(controller)
    assert controller.queues.holder[:3] == ["maintenance", None, None]
    assert told.last(ActionRefused) == ActionRefused("other", "hold", "instance 1 is gone")
    act(EnqueueRequest("a", (0,)))
    assert not controller.requests["a"].resident, "it is held still"
    act(EnqueueRequest("b", (1,)))
    assert told.last(ActionRefused).why == "instance 1 is gone"
    assert controller.lost(1, 0.0) == []


def test_closed_instance_finishes_its_requests_and_takes_no_new_ones(quiet: Quiet) -> None:
    chaos, told, act = quiet
    controller = chaos.controller
    act(EnqueueRequest("a", (0,), "prefill"))
    controller.close(0, 0.0)
    act(EnqueueRequest("b", (0,)))
    assert told.last(ActionRefused) == ActionRefused("b", "enqueue", "instance 0 takes nothing new")
    assert not controller.quiet(0)
    chaos.stays.clear()
    controller.left_scheduler(controller.requests["a"], 1, False, 0.0)
    act(TransferKv("b", 0))
    assert told.last(ActionRefused).action == "transfer"
    act(EnqueueRequest("a", (0,), "decode"))
    assert controller.requests["a"].resident, "its KV is there"
    controller.left_scheduler(controller.requests["a"], 3, True, 0.0)
    controller.settle(0.0)
    assert controller.quiet(0)
    assert 0 not in ClusterSnapshot(controller.cluster, 0.0).with_role("mixed")
    assert told.last(InstanceLeft) == InstanceLeft(0)
    controller.open(controller.cluster.instances[0], 0.0)
    controller.settle(0.0)
    assert told.heard[-2:] == [InstanceJoined(0), WakeupDue()]
    act(EnqueueRequest("b", (0,)))
    assert controller.requests["b"].resident
    with pytest.raises(InvariantError):
        controller.open(controller.cluster.instances[0], 0.0)


def test_a_reserved_number_is_heard_of_when_its_instance_is_there(quiet: Quiet) -> None:
    """Policies made anew for it would have what waits dropped, and arrive again, at each start of an instance."""
    chaos, told, _ = quiet
    controller = chaos.controller
    heard, number = list(told.heard), len(controller.cluster.instances)
    instance = msgspec.structs.replace(controller.cluster.instances[0], id=number)
    controller.reserve(instance)
    controller.settle(0.0)
    assert told.heard == heard
    assert number not in ClusterSnapshot(controller.cluster, 0.0).with_role("mixed")
    controller.open(instance, 0.0)
    controller.settle(0.0)
    assert told.heard[len(heard) :] == [InstanceJoined(number), WakeupDue()]
    assert number in ClusterSnapshot(controller.cluster, 0.0).with_role("mixed")


def test_request_moved_before_a_loss_continues(quiet: Quiet) -> None:
    chaos, told, act = quiet
    controller = chaos.controller
    act(CommitSpans("a", (span(chaos, "a", (0, 1)),), controller.cluster.version))
    entry = controller.requests["a"].entries[0]
    act(TransferKv("a", 3, index=0))
    controller.span_done(entry, 1.0)
    for piece in controller.state.transfers.under_way():
        controller.sent(piece, 1.0)
    act(EnqueueRequest("a", (3,), "decode"))
    assert controller.lost(0, 2.0) == []
    assert [request.id for request in controller.lost(3, 2.0)] == ["a"]
    assert chaos.ended == {"a": "instance 3 is gone"}
    controller.settle(2.0)
    check(controller)
    assert told.heard[-2:] == [InstanceLost(3), RequestDropped("a", "instance 3 is gone")]
    # the id of a request that has ended may be used again
    controller.arrive(Request(id="a", arrival_s=0.0, prompt_tokens=100, max_output_tokens=3), 2.0)
    controller.settle(2.0)
    assert isinstance(told.heard[-1], RequestArrived)


def test_batch_outlives_one_member_and_ends_with_its_instance(quiet: Quiet) -> None:
    chaos, _, act = quiet
    controller = chaos.controller
    batch = CommitSpans(
        "a", (span(chaos, "a", (0, 1)),), controller.cluster.version, False, (span(chaos, "b", (0, 1)),)
    )
    act(batch)
    # the batch's lead leaves: its entry stays in the queues for the other member
    controller.drop(controller.requests["a"], "left", 1.0)
    controller.settle(1.0)
    check(controller)
    assert controller.queues.running[0] is not None, "the other one goes on"
    assert [request.id for request in controller.lost(1, 2.0)] == ["b"]
    controller.settle(2.0)
    check(controller)
    assert controller.queues.running[0] is None
    assert controller.quiet(0)


def test_group_ends_when_one_instance_is_lost_and_frees_the_others(quiet: Quiet) -> None:
    chaos, told, act = quiet
    controller = chaos.controller
    version = controller.cluster.version
    spans = (span(chaos, "a", (0, 1), 0, 50), span(chaos, "a", (0, 1, 2, 3), 50, 100))
    act(CommitSpans("a", spans, version), CommitSpans("b", (span(chaos, "b", (0,)),), controller.cluster.version))
    act(CommitSpans("b", (span(chaos, "b", (0,)),), controller.cluster.version))
    assert [run and run.owner for run in controller.queues.running] == ["a", "a", None, None, None, None]
    controller.span_paused(controller.requests["a"].entries[0], LAYERS // 2, 1.0)
    controller.settle(1.0)
    assert controller.queues.running[0] is not None
    assert controller.queues.running[0].owner == "b"
    assert [request.id for request in controller.lost(3, 2.0)] == ["a"], "a later span of it was to run there"
    controller.settle(2.0)
    check(controller)
    assert controller.quiet(1)
    controller.open(ClusterInstance(id=len(controller.cluster.instances), node=7, capacity=10), 2.0)
    controller.settle(2.0)
    # new instances get the next id, also after losses
    assert controller.cluster.by_node[7] == (6,)
    assert RequestPrefilled not in {type(event) for event in told.heard}


def test_decodes_overtake_a_span_without_room_in_the_order_in_which_they_were_computed(quiet: Quiet) -> None:
    """Only their end frees blocks. That none waits for ever where blocks are few: `test_kv_room`."""
    chaos, _, act = quiet
    controller = chaos.controller
    controller.arrive(Request(id="c", arrival_s=0.0, prompt_tokens=100, max_output_tokens=3), 0.0)
    for name in ("a", "b", "c"):
        act(CommitSpans(name, (span(chaos, name, (0, 1)),), controller.cluster.version))
    chaos.fits = lambda entry: entry.owner != "c"  # type: ignore[method-assign]
    controller.span_done(controller.requests["a"].entries[0], 1.0)
    act(EnqueueRequest("a", (0, 1), "decode"))
    assert not chaos.stays, "while there is room spans go in their order"
    controller.span_done(controller.requests["b"].entries[0], 2.0)
    act(EnqueueRequest("b", (0, 1), "decode"))
    assert list(chaos.stays) == ["a", "b"]
    assert not any(controller.queues.running)
    chaos.fits = lambda entry: True  # type: ignore[method-assign]
    chaos.stays.clear()
    for name in ("a", "b"):
        controller.left_scheduler(controller.requests[name], 3, True, 3.0)
    controller.settle(3.0)
    check(controller)
    assert controller.queues.running[0] is controller.requests["c"].entries[0]
