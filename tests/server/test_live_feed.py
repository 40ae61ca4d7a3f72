"""The live page's data: bounded whatever the rate, and explanations that agree with those of the log."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.live_feeds import logged_events, sampled_feed

from headway.core.errors import ConfigError
from headway.runtime.engine.core import MOST_SAMPLES, IterationSampler
from headway.runtime.engine.process import by_our_clock
from headway.runtime.engine.protocol import (
    ChunkSample,
    EngineSamples,
    IterationOutputs,
    IterationSample,
    TransferSample,
    WaitingSample,
)
from headway.serving.live import feed as limits
from headway.serving.live.feed import MOST_BUCKETS, DurationHistogram, FollowedRequest, LatencyHistory, LiveFeed
from headway.sim.explanation import LifeInterval, explain, shares
from headway.sim.replay import _ReplayState, replay
from headway.sim.workload import TraceRequest


@given(values=st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=60), share=st.floats(0.01, 1.0))
def test_a_quantile_of_the_histogram_is_within_five_per_cent(values: list[float], share: float) -> None:
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    rank = min(len(values) - 1, max(0, -int(-share * len(values) // 1) - 1))
    exact = sorted(values)[rank]
    assert exact * 0.94 <= (histogram.quantile(share) or 0.0) <= exact * 1.06


def test_percentiles_of_the_last_minute_are_of_all_its_values_and_of_no_older_ones() -> None:
    history = LatencyHistory()
    history.at(3.0).short_ttft.add(50.0)
    for second in range(60, 110):
        history.at(float(second)).short_ttft.add(0.1)
    # A long prompt, alone in its bucket.
    history.at(112.0).long_ttft.add(9.0)
    history.at(112.0).gaps.add(0.02, 7)
    minute = history.latencies(50.0)
    tenth, nine = pytest.approx(0.1, rel=0.05), pytest.approx(9.0, rel=0.05)
    shorts, longs = (("short_ttft_p50_s", tenth), ("short_ttft_p99_s", tenth)), ("long_ttft_p50_s", "long_ttft_p99_s")
    assert minute == {**dict(shorts), **dict.fromkeys(longs, nine), "tbt_p99_s": pytest.approx(0.02, rel=0.05)}
    assert history.latencies(200.0) == dict.fromkeys(minute)


def test_kv_groups_have_lanes_of_their_own_and_explanations() -> None:
    feed, run = sampled_feed(logged_events(kv_parallel=2, kv_shard_tokens=16_000))
    assert {block[1] for block in feed.page(100.0)["blocks"]} == {0, 1}
    for record in run.records:
        told = feed.explain(record.id)
        assert sum(one.seconds for one in told.to_first_token) == pytest.approx(told.ttft_s, abs=1e-3)
        assert any(one.chunk is not None for one in told.to_first_token)


@pytest.mark.parametrize("policy", ["lars", "fcfs"])
def test_an_explanation_from_samples_agrees_with_that_of_the_log_within_a_millisecond(policy: str) -> None:
    feed, run = sampled_feed(logged_events(policy=policy))
    for record in run.records:
        shown, told = feed.explain(record.id), explain(run, record.id)
        assert shown.ttft_s == pytest.approx(told.ttft_s, abs=1e-9)
        assert sum(one.seconds for one in shown.to_first_token) == pytest.approx(told.ttft_s, abs=1e-3)
        assert own_s(shown.to_first_token) == pytest.approx(own_s(told.to_first_token), abs=1e-3)
        limits_shown = [one.chunk.limit for one in shown.to_first_token if one.chunk is not None]
        assert limits_shown == [one.chunk.limit for one in told.to_first_token if one.chunk is not None]
        assert sum(one.seconds for one in shown.worst_gap) == pytest.approx(
            sum(one.seconds for one in told.worst_gap), abs=1e-3
        )
    behind = shares(feed.explain("r3").to_first_token)
    assert ("queued behind r0" in behind) == (policy == "fcfs")


def own_s(intervals: Sequence[LifeInterval]) -> float:
    return sum(one.seconds for one in intervals if one.cause == "own chunk")


def test_iterations_of_decodes_become_few_samples_that_fill_the_same_time() -> None:
    events = logged_events([TraceRequest(0.0, 200, 401)])
    state = _ReplayState(replay(events[:1]), events[0], False)
    sampler = IterationSampler(state.scheduler)
    for event in events[1:]:
        getattr(state, f"on_{event['event']}")(event)
        sampler.note(event["event"], event)
    samples = sampler.take().iterations
    assert len(samples) < 100 < sum(one.iterations for one in samples) == 401
    assert sampler.take() == EngineSamples()
    assert samples[0].chunks[0].limit == "rest of the prompt"


def test_a_message_has_a_bounded_number_of_samples_and_loses_no_iteration() -> None:
    events = logged_events()
    state = _ReplayState(replay(events[:1]), events[0], False)
    sampler = IterationSampler(state.scheduler)
    batches = 0
    for event in events[1:]:
        getattr(state, f"on_{event['event']}")(event)
        sampler.note(event["event"], event)
        batches += event["event"] == "batch"
    samples = sampler.take().iterations
    assert batches > len(samples) == MOST_SAMPLES
    assert sum(one.iterations for one in samples) == batches


def load(feed: LiveFeed, start_s: float, end_s: float, samples_a_second: int) -> None:
    """Fill a feed as a busy server does: samples, and requests that arrive, have tokens and end."""
    second = int(start_s)
    while second < end_s:
        for i in range(10):
            name = f"request-{second}-{i}"
            feed.arrived(FollowedRequest(name, "short", second + i / 10, 100, ttft_slo_s=0.5))
            feed.tokens(name, second + i / 10 + 0.05 + i / 1000)
            feed.tokens(name, second + i / 10 + 0.09)
            if i:  # one in ten never ends
                feed.ended(name, second + i / 10 + 0.1, "length", True)
        step = 1.0 / samples_a_second
        iterations = tuple(
            IterationSample(0, 0, second + k * step, second + k * step, second + (k + 1) * step, step, 3,
                            (ChunkSample(f"request-{second}-0", 0, 10, 100, "time"),))
            for k in range(samples_a_second)
        )  # fmt: skip
        moved = (TransferSample(f"request-{second}-1", 1, second, second + 0.1),)
        waiting = (WaitingSample(f"request-{second}-0", second + 1.0, 0.1, 0, 100),)
        feed.sampled(0, EngineSamples(iterations, waiting, moved))
        feed.loaded(second, 0.5)
        second += 1


def fill(feed: LiveFeed) -> dict[str, int]:
    page = feed.page(0.0)
    return {
        "blocks": len(feed._blocks), "live": len(feed._live), "ended": len(feed._ended), "moved": len(feed._transfers),
        "history": len(page["history"]), "sent": len(page["blocks"]), "rows": len(page["requests"]),
    }  # fmt: skip


MOST = {
    "blocks": limits.MOST_BLOCKS, "ended": limits.MOST_ENDED, "moved": limits.MOST_TRANSFERS,
    "history": MOST_BUCKETS, "sent": limits.MOST_SENT_BLOCKS, "rows": limits.MOST_SENT_REQUESTS + 50,
}  # fmt: skip


def test_a_feed_keeps_no_more_than_its_limits() -> None:
    feed = LiveFeed()
    load(feed, 0, 5_000, 6)
    filled = fill(feed)
    assert filled.pop("live") <= limits.MOST_LIVE
    assert filled == MOST
    assert len(feed.page(5_000.0, after=feed.page(0.0)["cursor"])["blocks"]) == 0
    with pytest.raises(ConfigError, match="no longer kept"):
        feed.explain("request-1500-0")


@pytest.mark.long
def test_memory_does_not_grow_after_the_first_minutes_of_an_hour_at_640_samples_a_second() -> None:
    feed = LiveFeed()
    load(feed, 0, 950, 10)  # the slowly filled parts
    tracemalloc.start()
    load(feed, 950, 1_050, 640)
    early = tracemalloc.get_traced_memory()[0]
    load(feed, 1_050, 4_650, 640)
    late = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    print(f"\nfeed: {early / 1e6:.1f} MB after a minute and a half of load, {late / 1e6:.1f} MB an hour later")
    assert late < 1.15 * early + 4e6
    assert late < 40e6


def test_samples_from_another_host_come_in_the_time_of_the_server() -> None:
    sample = IterationSample(0, 0, 1.0, 2.0, 3.0, 0.5, 1)
    message = IterationOutputs(samples=EngineSamples((sample,), (WaitingSample("r", 9.0, 0.5, 0, 10),)))
    moved = by_our_clock(message, 100.0)
    assert isinstance(moved, IterationOutputs)
    assert moved.samples is not None
    (shown,), (waiting,) = moved.samples.iterations, moved.samples.waiting
    assert (shown.decided_s, shown.start_s, shown.end_s, shown.predicted_s) == (101.0, 102.0, 103.0, 0.5)
    assert (waiting.due_s, waiting.work_s) == (109.0, 0.5)


def test_a_requests_name_in_a_cluster_is_found_behind_its_attempts() -> None:
    feed = LiveFeed()
    feed.arrived(FollowedRequest("mine#3", "short", 0.0, 10))
    assert [feed.name_of(name) for name in ("mine#3", "mine#3#1", "mine#3#2''")] == ["mine#3"] * 3
