from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.sim.build import requests_of, run_scenario
from headway.sim.scenario import WorkloadSection, parse_scenario
from headway.sim.workload import TraceRequest, transforms
from headway.sim.workload.generate import ConstantArrivals

REQUESTS = st.lists(
    st.builds(TraceRequest, st.integers(0, 50).map(float), st.integers(0, 10**6), st.integers(0, 5000)), max_size=30
).map(lambda items: sorted(items, key=lambda request: request.arrival_s))


def times(requests: list[TraceRequest]) -> list[float]:
    return [request.arrival_s for request in requests]


@given(REQUESTS, st.integers(0, 60), st.integers(0, 60))
def test_slicing_by_time_keeps_requests_inside_and_starts_at_zero(
    r: list[TraceRequest], start: int, width: int
) -> None:
    part = transforms.slice_time(r, start, start + width)
    assert len(part) == sum(start <= one.arrival_s < start + width for one in r)
    assert not part or part[0].arrival_s == 0
    assert times(part) == sorted(times(part))


@given(REQUESTS, st.floats(0.01, 100))
def test_rescaling_reaches_the_rate_and_keeps_the_requests(r: list[TraceRequest], rate: float) -> None:
    if len(r) > 1 and r[0].arrival_s == r[-1].arrival_s:
        with pytest.raises(ConfigError, match="arrive at the same time, which cannot be stretched"):
            transforms.rescale_to_rate(r, rate)
        return
    scaled = transforms.rescale_to_rate(r, rate)
    assert [one.prompt_tokens for one in scaled] == [one.prompt_tokens for one in r]
    if len(r) > 1:
        assert (len(r) - 1) / scaled[-1].arrival_s == pytest.approx(rate)


@given(REQUESTS, st.integers(0, 2**32 - 1))
def test_spreading_keeps_every_request_between_its_stamp_and_the_next(r: list[TraceRequest], seed: int) -> None:
    spread = transforms.spread_batches(r, np.random.default_rng(seed))
    assert sorted(one.prompt_tokens for one in spread) == sorted(one.prompt_tokens for one in r)
    assert times(spread) == sorted(times(spread))
    stamps = sorted(set(times(r)))
    for before, after in itertools.pairwise(stamps):
        count = sum(one.arrival_s == before for one in r)
        assert sum(before <= one.arrival_s < after for one in spread) == count


@given(REQUESTS, st.integers(1, 1000))
def test_lengths_stay_within_bounds(r: list[TraceRequest], most: int) -> None:
    for one in transforms.clip_lengths(r, most, most):
        assert 1 <= one.prompt_tokens <= most
        assert 1 <= one.output_tokens <= most
        assert one.cached_tokens <= one.prompt_tokens


def test_slice_arguments_are_parsed() -> None:
    requests = [TraceRequest(float(i), i + 1, 1) for i in range(10)]
    assert [r.prompt_tokens for r in transforms.slice_by(requests, "2:4")] == [3, 4]
    assert len(transforms.slice_by(requests, "7:")) == 3
    assert len(transforms.slice_by(requests, ":3s")) == 3
    assert transforms.slice_by(requests, "4s:6s")[0].arrival_s == 0
    for wrong in ("5", "a:b", "-3:4", "1s:x"):
        with pytest.raises(ConfigError, match="cannot slice"):
            transforms.slice_by(requests, wrong)


def test_sessions_start_apart_and_keep_their_inner_times(rng: np.random.Generator) -> None:
    requests = [
        TraceRequest(0.0, 1, 1, session="a"),
        TraceRequest(0.0, 2, 1, session="b"),
        TraceRequest(9.0, 3, 1, session="a"),
    ]
    started = transforms.start_sessions(requests, 0.01, rng)
    mine = [r.arrival_s for r in started if r.session == "a"]
    assert mine[1] - mine[0] == pytest.approx(9)
    assert len({r.arrival_s for r in started}) == 3


def test_classes_and_new_arrivals(rng: np.random.Generator) -> None:
    requests = [TraceRequest(0, 8192, 1), TraceRequest(0, 8193, 1), TraceRequest(0, 5, 1, klass="own")]
    assert [r.klass for r in transforms.classify(requests, 8192)] == ["short", "long", "own"]
    assert times(transforms.with_arrivals(requests, ConstantArrivals(2.0), rng)) == [0, 0.5, 1.0]


def test_users_of_a_closed_loop_send_the_next_request_when_they_have_an_answer() -> None:
    mix = [{"prompt": "uniform:10-400", "output": "uniform:1-30"}]
    data = {
        "latency": {"source": "roofline"},
        "workload": {"mix": mix, "requests": 60, "concurrency": 4},
        "cluster": {"replicas": 2},
    }
    records = run_scenario(parse_scenario(data), 0).sim.records
    assert len(records) == 60
    assert all(record.ok for record in records)
    times = sorted([(r.arrival_s, 1) for r in records] + [(r.finish_s or 0.0, -1) for r in records])
    flying, most = 0, []
    for _, change in times:
        flying += change
        most.append(flying)
    assert max(most) == 4
    # Until the last request has been sent, each answer brings one.
    last = max(r.arrival_s for r in records)
    assert sum(r.arrival_s == 0 for r in records) == 4
    assert sum(r.finish_s <= last for r in records if r.finish_s) == 60 - 4
    with pytest.raises(ConfigError, match="takes the place of qps"):
        parse_scenario({**data, "workload": {"mix": mix, "concurrency": 4, "qps": 2.0}})


def test_turns_of_agents_find_most_of_their_prompts_cached() -> None:
    section = WorkloadSection(preset="agent-sessions", requests=4000, concurrency=64)
    turns = requests_of(section, None, 0)
    mean = [sum(getattr(r, name) for r in turns) / 4000 for name in ("prompt_tokens", "output_tokens", "cached_tokens")]
    assert mean[0] == pytest.approx(142_000, rel=0.03)
    assert mean[1] == pytest.approx(444, rel=0.06)
    assert mean[2] / mean[0] > 0.96
