"""Each policy's line is its textbook key at any time, and each orders as its name says."""

from __future__ import annotations

from math import log2

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.errors import ConfigError
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import POLICIES, PrefillFacts, make_policy, relative_slack
from headway.policy.iteration.preflow import DOUBLING_S

FACTS = st.builds(
    lambda arrival, ttft, total, left: PrefillFacts(arrival, arrival + ttft, total, total * left),
    st.floats(0, 1e5),
    st.floats(0, 1e3),
    st.floats(1e-3, 500),
    st.floats(0, 1),
)
TEXTBOOK = {
    "fcfs": lambda f, now: f.arrival_s,
    "edf": lambda f, now: f.deadline_s,
    "lrs": lambda f, now: f.deadline_s - now - f.remaining_s,
    "srpt": lambda f, now: f.remaining_s,
    # log2 of the inverse of its priority, 2^(age / D) / (P · R)
    "preflow": lambda f, now: log2(f.total_s) + log2(max(f.remaining_s, 1e-9)) - (now - f.arrival_s) / DOUBLING_S,
    "lars": lambda f, now: (f.deadline_s - now - f.remaining_s) / f.total_s,
}


@pytest.mark.parametrize("name", POLICIES)
@given(facts=FACTS, wait=st.floats(0, 1e4))
def test_a_line_is_the_textbook_key_at_any_time(name: str, facts: PrefillFacts, wait: float) -> None:
    now = facts.arrival_s + wait
    line = make_policy(name).line(facts)
    assert line.intercept - line.slope * now == pytest.approx(TEXTBOOK[name](facts, now), rel=1e-9, abs=1e-6)


@given(FACTS, st.floats(0, 1e4))
def test_relative_slack_keeps_its_sign(facts: PrefillFacts, wait: float) -> None:
    now = facts.arrival_s + wait
    slack_s = facts.deadline_s - now - facts.remaining_s
    assume(abs(slack_s) > 1e-9)  # a smaller one is rounding
    assert (relative_slack(facts, now) < 0) == (slack_s < 0)


def test_a_request_without_work_does_not_divide_by_zero() -> None:
    facts = PrefillFacts(0.0, 1.0, 0.0, 0.0)
    assert relative_slack(facts, 0.0) > 0
    assert make_policy("lars").line(facts).slope > 0


@given(FACTS, FACTS, st.floats(0, 1e4), st.floats(1.5, 50))
def test_lars_orders_the_same_for_any_factor_of_the_isolated_time(
    one: PrefillFacts, two: PrefillFacts, now: float, factor: float
) -> None:
    """With deadlines d = k × w the order does not depend on k: preemptive response-ratio scheduling."""

    def key(facts: PrefillFacts, k: float) -> float:
        line = make_policy("lars").line(replace(facts, deadline_s=facts.arrival_s + k * facts.total_s))
        return line.intercept - line.slope * now

    at_1, at_k = key(one, 1.0) - key(two, 1.0), key(one, factor) - key(two, factor)
    assert at_1 == pytest.approx(at_k, rel=1e-6, abs=1e-3)


@pytest.mark.parametrize(
    "fields", [{"policy": "lottery"}, {"chunking": "static:0"}, {"chunking": "static"}, {"chunking": "tiny"}]
)
def test_unknown_policies_and_chunkings_are_refused_with_the_names_that_exist(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"fcfs, edf, lrs, srpt, preflow, lars|adaptive, whole, or static:N"):
        SchedulerConfig.named("default", **fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rho_max", 2.0),
        ("t_target_s", 0.0),
        ("max_num_seqs", 0),
        ("rho_min", 0.8),
        ("kv_headroom", 1.0),
        ("stages", 0),
        ("min_chunk", -1),
        ("long_iterations", -1.0),
        ("long_tokens", -1),
        ("reserve_tokens", -1),
        ("deadline_factor", -0.5),
        ("progress_every", 0),
        ("max_num_batched_tokens", 0),
    ],
)
def test_impossible_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*, not {value}"):
        SchedulerConfig.named("default", **{field: value})


def test_the_modes_differ_in_named_fields_only() -> None:
    paper, default = SchedulerConfig.named("paper"), SchedulerConfig.named("default")
    differing = {name for name in vars(paper) if getattr(paper, name) != getattr(default, name)}
    assert differing == {
        "mode",
        "rho_max",
        "rho_min",
        "yield_only_to_shorts",
        "subtract_times",
        "quantum",
        "long_iterations",
        "least_gain",
        "useful_share",
        "stretch",
        "min_chunk",
        "t_target_s",
        "newcomer_wait_s",
    }
    assert (paper.rho_min, paper.rho_max, paper.min_chunk, paper.quantum) == (0.0, 0.4, 0, 0.0)
    assert SchedulerConfig.named("paper", rho_max=0.1).rho_max == 0.1
