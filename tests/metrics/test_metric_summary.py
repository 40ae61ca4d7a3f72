from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sim.metrics import (
    SCHEMA,
    RequestRecord,
    SloTargets,
    percentile_name,
    percentiles,
    quantile,
    slowest,
    summarise,
)
from headway.sim.report.tables import slowest_line


def record(number: int, klass: str, ttft: float, **changes: object) -> RequestRecord:
    arrival = float(number)
    base: dict[str, object] = {
        "id": str(number),
        "klass": klass,
        "arrival_s": arrival,
        "prompt_tokens": 100,
        "output_tokens": 2,
        "token_s": (arrival + ttft, arrival + ttft + 0.1),
        "finish_s": arrival + ttft + 0.1,
        "slo": SloTargets(ttft_s=0.5),
    }
    return RequestRecord(**{**base, **changes})


def test_a_run_is_summarised_by_class_and_in_total() -> None:
    records = [record(0, "short", 0.1), record(1, "long", 2.0), record(2, "short", 0.3)]
    records.append(record(3, "short", 0.1, error="HTTP 429: queue full, 17 waiting"))
    records.append(record(4, "short", 0.1, finish_s=None))
    run = summarise(records)
    assert [one.klass for one in run.classes] == ["short", "long"]
    short, long = run.classes
    assert (short.requests, short.ok, short.good) == (4, 2, 2)
    assert (long.requests, long.ok, long.good) == (1, 1, 0)
    assert short.errors == {"HTTP 429": 1, "unfinished": 1}
    assert short.latencies["ttft_s"]["p50"] == pytest.approx(0.2)
    assert short.latencies["tbt_s"]["n"] == 2
    assert run.total.requests == 5
    assert run.total.good == 2
    assert run.duration_s == pytest.approx(3.2)
    body = json.loads(json.dumps(run.to_json()))
    assert body["schema"] == SCHEMA
    assert body["goodput_rps"] == pytest.approx(2 / run.duration_s)
    assert body["output_throughput_tps"] == pytest.approx(6 / run.duration_s)
    assert body["classes"][0]["good_share"] == 0.5


def test_no_records_give_an_empty_summary() -> None:
    body = summarise([]).to_json()
    assert body["request_throughput_rps"] is None
    assert body["total"]["ttft_s"]["p50"] is None
    assert body["total"]["good_share"] is None


def test_a_window_replaces_the_observed_duration() -> None:
    assert summarise([record(0, "a", 0.1)], duration_s=10).to_json()["request_throughput_rps"] == 0.1


def test_the_slowest_request_is_one_without_a_first_token_where_it_has_waited_longer() -> None:
    waits, failed = record(2, "long", 0.0, token_s=()), record(1, "short", 0.0, token_s=(), error="HTTP 429: full")
    records = [record(0, "short", 3.0), waits, failed]
    assert (slowest(records) or {})["id"] == "0"
    assert (slowest(records, 4.0) or {})["id"] == "0"
    late = slowest(records, 12.0)
    assert late is not None
    assert (late["id"], late["ttft_s"], late["waited_s"]) == ("2", None, 10.0)
    assert slowest_line(late, "--log e.jsonl").splitlines()[1] == "  no first token in 10.0 s"
    assert slowest([failed], 12.0) is None


def test_percentiles_are_type_seven_of_the_values_that_there_are() -> None:
    assert quantile([1, 2, 3, 4], 50) == 2.5
    assert quantile([], 50) is None
    assert percentiles([1.0, None, 3.0])["p25"] == 1.5
    assert percentiles([1.0, None, 3.0])["n"] == 2
    assert percentile_name(50) == "p50"


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_percentiles_are_ordered_within_the_sample(values: list[float]) -> None:
    cuts = percentiles(values)
    ordered = [cuts[name] for name in ("min", "p1", "p25", "p50", "p75", "p90", "p99", "max")]
    assert all(a is not None and b is not None and a <= b + 1e-6 for a, b in itertools.pairwise(ordered))
    assert cuts["p90"] == pytest.approx(float(np.percentile(values, 90)))
