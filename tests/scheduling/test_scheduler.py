"""Single decisions of the scheduler, on the smallest case that shows each."""

from __future__ import annotations

import itertools

import pytest
from tests.helpers.present import present
from tests.helpers.unit_latency import Linear
from tests.scheduling.scheduler_steps import add_request, chunks, make_scheduler, step

from headway.core.batch import RequestProgress
from headway.core.errors import InvariantError, RequestError
from headway.core.request import Slo
from headway.policy.iteration.admission import ADMISSION_AGE_S
from headway.policy.iteration.medha import MedhaConfig


def test_a_request_that_cannot_ever_be_served_is_refused_with_the_numbers() -> None:
    scheduler = make_scheduler(pool=160)
    with pytest.raises(RequestError, match="prompt has 160 tokens and the KV cache holds 160") as refused:
        add_request(scheduler, "a", 160)
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match="100 prompt and 62 output tokens do not fit the KV cache of 160") as refused:
        add_request(scheduler, "a", 100, 62)
    assert refused.value.param == "max_tokens"
    assert scheduler.idle
    add_request(scheduler, "a", 100, 61)
    with pytest.raises(RequestError, match="'a' is in use"):
        add_request(scheduler, "a", 5)
    for _ in range(60):
        step(scheduler)
    step(scheduler, 0.0, "a")
    assert scheduler.idle
    assert scheduler.block_manager.free_blocks == 10


def test_microbatch_keeps_a_prompts_chunks_apart_and_stream_does_not() -> None:
    scheduler = make_scheduler(stages=3, max_num_batched_tokens=50, pipeline_schedule="microbatch")
    add_request(scheduler, "a", 500)
    first = scheduler.schedule(0.0)
    assert scheduler.schedule(0.0) is None
    add_request(scheduler, "b", 500)
    assert chunks(scheduler.schedule(0.0)) == [("b", 0, 50)]
    assert first is not None
    scheduler.complete(first.id, [], 0.0)
    assert chunks(scheduler.schedule(0.0)) == [("a", 50, 50)]


def test_paper_mode_advances_even_if_no_token_fits_its_target() -> None:
    scheduler = make_scheduler(model=Linear(row_s=0.001, fixed_s=0.1), mode="paper")
    add_request(scheduler, "a", 3, 1)
    assert [chunks(step(scheduler)) for _ in range(2)] == [[("a", 0, 1)], [("a", 1, 1)]]
    step(scheduler, 0.0, "a")
    assert scheduler.idle


def test_one_tight_tbt_target_does_not_stop_new_prompts() -> None:
    """A TBT promise below what one iteration costs leaves no time for chunks; new prompts go on all the same."""
    scheduler = make_scheduler()
    add_request(scheduler, "tight", 20, 500, slo=Slo(tbt_s=0.0005))
    step(scheduler)
    add_request(scheduler, "new", 64, 1)
    iterations = 0
    while "new" in scheduler:
        batch = present(scheduler.schedule(0.0))
        last = [chunk.request for chunk in batch.parts[0].prefills if chunk.last]
        scheduler.complete(batch.id, [RequestProgress(name, 1, True) for name in last], 0.0)
        iterations += 1
        assert iterations <= (64 // 8) * 5


def test_youngest_request_is_evicted_and_computed_again() -> None:
    scheduler = make_scheduler(pool=96)
    add_request(scheduler, "old", 47, 40)
    add_request(scheduler, "young", 40, 40)
    batches, preempted = [], []
    while not preempted:
        batch = present(scheduler.schedule(0.0))
        batches.append(batch)
        preempted = [event for event in scheduler.complete(batch.id, [], 0.0) if event.kind == "preempted"]
        scheduler.check()
    assert [(event.request, event.tokens > 40) for event in preempted] == [("young", True)]
    assert batches[-1].parts[0].decodes.members == ("old",)


def test_decode_without_kv_waits_for_older_requests_and_can_be_aborted() -> None:
    """It keeps its KV and steps aside, since nobody younger has any to give; then the elder needs more and takes it."""
    scheduler = make_scheduler(pool=96)
    add_request(scheduler, "old", 40, 40)
    add_request(scheduler, "young", 47, 40)
    while not scheduler.state.waiting_for_kv:
        step(scheduler)
    assert (scheduler.running, list(scheduler.state.waiting_for_kv)) == (2, ["young"])
    assert step(scheduler).parts[0].decodes.members == ("old",)
    assert [event.kind for event in scheduler.abort("young", 0.0)] == ["aborted"]
    scheduler.check()
    for _ in range(30):
        assert step(scheduler).parts[0].decodes.members == ("old",)
    assert scheduler.running == 1


def test_lost_returns_all_events_and_the_next_batch_starts_from_empty_tables() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        add_request(scheduler, name, 40)
    step(scheduler)
    scheduler.abort("c", 0.0)
    flying = present(scheduler.schedule(0.0))
    scheduler.abort("b", 0.0)
    assert sorted((e.kind, e.request) for e in scheduler.lost(0, 1.0)) == [("aborted", "b"), ("preempted", "a")]
    scheduler.check()
    with pytest.raises(InvariantError, match=f"batch {flying.id} is not in flight"):
        scheduler.complete(flying.id, [], 1.0)
    batch = scheduler.schedule(1.0)
    assert chunks(batch) == [("a", 0, 41)]
    assert batch is not None
    assert [(op.verb, op.request) for op in batch.parts[0].kv_ops] == [("reserve", "a")]


def test_lost_returns_preemptions_of_batches_that_never_completed() -> None:
    scheduler = make_scheduler(pool=96)
    add_request(scheduler, "old", 47, 40)
    add_request(scheduler, "young", 40, 40)
    step(scheduler)
    while scheduler.running == 2:
        batch = present(scheduler.schedule(0.0))
        if scheduler.running == 2:
            scheduler.complete(batch.id, [], 0.0)
    told = [(event.kind, event.request) for event in scheduler.lost(0, 1.0)]
    assert told == [("preempted", "young"), ("preempted", "old")]
    scheduler.check()


def test_a_large_request_leaves_headroom_for_small_ones_unless_it_is_alone() -> None:
    scheduler = make_scheduler(pool=640)
    add_request(scheduler, "big", 600, 1)
    assert "big" in {name for name, _, _ in chunks(scheduler.schedule(0.0))}
    other = make_scheduler(pool=640)
    add_request(other, "s", 10, 2)
    step(other)
    # 39 of the 39 blocks that are free, of which 2 are for small ones.
    add_request(other, "big", 610, 1)
    assert chunks(step(other)) == []
    add_request(other, "s2", 20, 1)
    assert [name for name, _, _ in chunks(step(other))] == ["s2"]


def test_request_skipped_for_too_long_keeps_later_ones_out() -> None:
    scheduler = make_scheduler(pool=160, policy="fcfs")
    add_request(scheduler, "holder", 90, 60)
    step(scheduler)
    add_request(scheduler, "large", 120, 1)
    add_request(scheduler, "small 1", 10, 1)
    assert [name for name, _, _ in chunks(step(scheduler, 1.0, "small 1"))] == ["small 1"]
    add_request(scheduler, "small 2", 10, 1)
    assert chunks(step(scheduler, 2.0 + ADMISSION_AGE_S)) == []
    step(scheduler, 3.0 + ADMISSION_AGE_S, "holder")
    assert next(name for name, _, _ in chunks(step(scheduler, 3.0 + ADMISSION_AGE_S))) == "large"


@pytest.mark.parametrize(("waited", "enter"), [(1.0, 12), (2.0 + ADMISSION_AGE_S, 5)])
def test_small_ones_enter_before_a_large_skipped_request_within_its_headroom(waited: float, enter: int) -> None:
    scheduler = make_scheduler(pool=3200, policy="lars", t_target_s=1.0)
    add_request(scheduler, "holder", 2000, 60)
    step(scheduler)
    add_request(scheduler, "large", 2900, 1, slo=Slo(ttft_s=0.01), priority=-1)
    assert chunks(step(scheduler)) == []
    for number in range(12):  # of 32 tokens each: the headroom is 160
        add_request(scheduler, f"small {number}", 20, 12)
    step(scheduler, waited)
    assert len(scheduler.policy.holders) == 1 + enter
    step(scheduler, waited, "holder")
    step(scheduler, waited)
    assert ("large" in scheduler.policy.holders) == (enter == 5)  # else small ones have taken what it waits for
    scheduler.check()


@pytest.mark.parametrize(("mode", "alternate"), [("paper", True), ("default", False)])
def test_equally_urgent_long_requests_do_not_alternate_under_our_ruling(mode: str, alternate: bool) -> None:
    rules = MedhaConfig(space_sharing=False, long_tokens=100)
    scheduler = make_scheduler(pool=40_000, model=Linear(row_s=2e-5), mode=mode, policy="lars", medha=rules)
    for name in ("a", "b"):
        add_request(scheduler, name, 15_000, 1)
    order, now = [], 0.0
    while not scheduler.idle:
        batch = present(scheduler.schedule(now))
        now += batch.predicted_s
        order += [name for name, _, _ in chunks(batch)]
        scheduler.complete(
            batch.id, [RequestProgress(c.request, 1, True) for c in batch.parts[0].prefills if c.last], now
        )
    assert (sum(x != y for x, y in itertools.pairwise(order)) > 20) == alternate


def test_an_answer_that_lost_its_kv_goes_on_before_any_new_request() -> None:
    """Its gap is what its KV takes to compute again and one iteration, however many shorter prompts come."""
    scheduler = make_scheduler(pool=1600)
    add_request(scheduler, "answer", 900, 40)
    now = 0.0
    while "answer" not in scheduler.state.ready.members:
        now += step(scheduler, now).predicted_s
    now += step(scheduler, now).predicted_s
    scheduler.state.pending_events.append(scheduler.state.preempt(scheduler.state.sequences["answer"], now))
    alone_s = scheduler.policy.prefill_times.total_s(scheduler.state.sequences["answer"].known)
    lost_s, number, longest_s = now, 0, 0.0
    while "answer" not in scheduler.state.ready.members:
        add_request(scheduler, f"short {number}", 60, 1, now=now)
        number += 1
        batch = present(scheduler.schedule(now))
        assert chunks(batch)[0][0] == "answer"
        now += batch.predicted_s
        longest_s = max(longest_s, batch.predicted_s)
        done = [c.request for c in batch.parts[0].prefills if c.last and c.request != "answer"]
        scheduler.complete(batch.id, [RequestProgress(name, 1, True) for name in done], now)
    assert now - lost_s <= alone_s + longest_s


def test_no_new_request_takes_the_blocks_that_a_lost_answer_waits_for() -> None:
    scheduler = make_scheduler(pool=160)
    add_request(scheduler, "old", 60, 80)
    add_request(scheduler, "young", 40, 80)
    step(scheduler)
    while scheduler.running == 2:
        step(scheduler)
    assert [s.request.id for s in scheduler.policy.order(0.0)] == ["young"]
    add_request(scheduler, "new", 10, 1)
    # There is a block for the new one, and it stays free.
    assert scheduler.block_manager.free_blocks >= 1
    assert chunks(step(scheduler)) == []
    step(scheduler, 0.0, "old")
    assert next(name for name, _, _ in chunks(step(scheduler))) == "young"


@pytest.mark.parametrize("repeats", [0, 2])
def test_batch_refuses_more_repeats_than_allowed(repeats: int) -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "a", 10)
    batch = present(scheduler.schedule(0.0))
    with pytest.raises(InvariantError, match=f"may run 1 times, not {repeats}"):
        scheduler.complete(batch.id, [], 0.0, repeats=repeats)


def test_check_notices_a_request_in_no_set() -> None:
    scheduler = make_scheduler()
    add_request(scheduler, "a", 10)
    scheduler.policy.queue.remove(scheduler.state.sequences["a"])
    with pytest.raises(InvariantError, match="nowhere, or in two places"):
        scheduler.check()
