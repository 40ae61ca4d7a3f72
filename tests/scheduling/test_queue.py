"""The queue's order is a plain sort by (priority, urgency, order of arrival), whatever its size and history."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.request import Request
from headway.policy.iteration.ordering import UrgencyLine
from headway.policy.iteration.prefill import LONG, ONE_ITERATION, PrefillState
from headway.policy.iteration.queue import PrefillQueue, make_queue

Lines = list[tuple[float, float, int]]
COARSE = st.tuples(st.integers(0, 4).map(float), st.integers(0, 2).map(float), st.sampled_from([0, 0, 0, 1, -2]))
FINE = st.tuples(st.floats(-1e3, 1e3), st.floats(0, 10), st.just(0))


def member(order: int, priority: int = 0, size: int = ONE_ITERATION) -> PrefillState:
    request = Request(id=f"r{order}", arrival_s=0.0, prompt_tokens=4, max_output_tokens=1, priority=priority)
    state = PrefillState(request, order)
    state.size = size
    return state


def plain(members: dict[PrefillState, UrgencyLine], now: float) -> list[str]:
    def key(item: tuple[PrefillState, UrgencyLine]) -> tuple[int, float, int]:
        sequence, line = item
        return sequence.request.priority, line.intercept - line.slope * now, sequence.order

    return [sequence.request.id for sequence, _ in sorted(members.items(), key=key)]


@pytest.mark.parametrize("parallel", [False, True])
@given(lines=st.lists(COARSE, max_size=60), now=st.integers(0, 3).map(float), seed=st.integers(0, 99))
def test_members_with_kv_come_in_the_order_of_the_whole_queue(
    parallel: bool, lines: Lines, now: float, seed: int
) -> None:
    rng = random.Random(seed)
    queue = make_queue(parallel)
    for order, (intercept, slope, priority) in enumerate(lines):
        one = member(order, priority)
        one.holds_kv = rng.random() < 0.3
        queue.add(one, UrgencyLine(intercept, 1.0 if parallel else slope))
        if rng.random() < 0.3:
            changed = rng.choice(list(queue))
            changed.holds_kv = not changed.holds_kv
            queue.note_begun(changed, changed.holds_kv)
        if rng.random() < 0.1:
            queue.remove(rng.choice(list(queue)))
    with_kv = [one.order for one in queue.ordered(now) if one.holds_kv]
    assert [one.order for one in queue.begun_ordered(now)] == with_kv
    assert len(queue.begun) == len(with_kv)


@given(
    st.one_of(st.lists(COARSE, max_size=150), st.lists(FINE, max_size=150)),
    st.integers(0, 3).map(float),
    st.integers(0, 99),
)
@settings(max_examples=150)
def test_order_equals_a_plain_sort_after_any_history(lines: Lines, now: float, seed: int) -> None:
    rng = random.Random(seed)
    queue, members = PrefillQueue(), {}
    for order, (intercept, slope, priority) in enumerate(lines):
        sequence = member(order, priority, order % 3)
        members[sequence] = UrgencyLine(intercept, slope)
        queue.add(sequence, members[sequence])
        if rng.random() < 0.2:
            gone = rng.choice(list(members))
            queue.remove(gone)
            del members[gone]
        if members and rng.random() < 0.3:
            moved = rng.choice(list(members))
            members[moved] = UrgencyLine(float(rng.randint(0, 4)), members[moved].slope)
            queue.update(moved, members[moved])
    assert [sequence.request.id for sequence in queue.ordered(now)] == plain(members, now)
    assert len(queue) == len(members)
    assert queue.sizes == [sum(sequence.size == size for sequence in members) for size in range(LONG + 1)]
    assert {sequence.request.id for sequence in queue} == {sequence.request.id for sequence in members}


@pytest.mark.parametrize("parallel", [False, True])
@given(history=st.lists(st.tuples(st.integers(-2, 2), st.integers(ONE_ITERATION, LONG), st.booleans()), max_size=30))
def test_a_member_may_yield_unless_all_smaller_ones_have_a_lower_priority(
    parallel: bool, history: list[tuple[int, int, bool]]
) -> None:
    queue = make_queue(parallel)
    for order, (priority, size, leaves) in enumerate(history):
        one = member(order, priority, size)
        queue.add(one, UrgencyLine(float(order), 1.0))
        if leaves:
            queue.remove(one)
    for one in queue:
        smaller = [other.request.priority for other in queue if other.size < one.size]
        assert queue.yields(one) == (not smaller or min(smaller) <= one.request.priority)


@pytest.mark.parametrize("size", [0, 1, 2, 12, 13, 256, 257, 400])
def test_few_and_many_are_ordered_alike(size: int) -> None:
    rng = random.Random(size)
    queue = PrefillQueue()
    lines = [UrgencyLine(rng.random(), rng.choice([0.1, 0.5, 2.0])) for _ in range(size)]
    members = {member(order): line for order, line in enumerate(lines)}
    for one, line in members.items():
        queue.add(one, line)
    assert [one.request.id for one in queue.ordered(3.0)] == plain(members, 3.0)


@pytest.mark.parametrize("size", [2, 12, 13, 15, 16, 17, 33, 65, 200, 300])
def test_equal_keys_go_by_arrival(size: int) -> None:
    queue = PrefillQueue()
    sequences = [member(order) for order in range(size)]
    for sequence in random.Random(0).sample(sequences, size):
        queue.add(sequence, UrgencyLine(1.0, 0.5))
    assert [sequence.order for sequence in queue.ordered(7.0)] == list(range(size))


def test_priorities_stop_mattering_when_their_last_member_leaves() -> None:
    queue = PrefillQueue()
    urgent, plain_one = member(0, priority=-5), member(1)
    queue.add(urgent, UrgencyLine(9.0, 0.0))
    queue.add(plain_one, UrgencyLine(1.0, 0.0))
    assert [sequence.order for sequence in queue.ordered(0.0)] == [0, 1]
    queue.remove(urgent)
    assert urgent.slot == -1
    assert [sequence.order for sequence in queue.ordered(0.0)] == [1]
