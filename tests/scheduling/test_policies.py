"""Each policy's line is its textbook key at any time, and each orders as its name says."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headway.core.errors import ConfigError
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig
from headway.policy.iteration.ordering import POLICIES, PrefillFacts, make_policy

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
    "lars": lambda f, now: (f.deadline_s - now - f.remaining_s) / f.total_s,
}


@pytest.mark.parametrize("name", POLICIES[1:])
@given(facts=FACTS, wait=st.floats(0, 1e4))
def test_a_line_is_the_textbook_key_at_any_time(name: str, facts: PrefillFacts, wait: float) -> None:
    now = facts.arrival_s + wait
    line = make_policy(name).line(facts)
    assert line.intercept - line.slope * now == pytest.approx(TEXTBOOK[name](facts, now), rel=1e-9, abs=1e-6)


def test_a_request_without_work_does_not_divide_by_zero() -> None:
    facts = PrefillFacts(0.0, 1.0, 0.0, 0.0)
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
    "given", [{"policy": "lottery"}, {"chunking": "static:0"}, {"chunking": "static"}, {"chunking": "tiny"}]
)
def test_unknown_policies_and_chunkings_are_refused_with_the_names_that_exist(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"ladder, fcfs, edf, lrs, srpt, lars|adaptive, whole, or static:N"):
        SchedulerConfig.named("default", **given)


@pytest.mark.parametrize(
    ("field", "value"),
    [("t_target_s", 0.0), ("max_num_seqs", 0), ("stages", 0), ("min_chunk", -1), ("max_num_batched_tokens", 0)],
)
def test_impossible_settings_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{field} must be .*, not {value}"):
        SchedulerConfig.named("default", **{field: value})


def test_a_scheduler_has_at_most_twelve_settings() -> None:
    assert len(fields(SchedulerConfig)) <= 12


def test_paper_mode_is_medha_as_printed() -> None:
    paper = SchedulerConfig.named("paper")
    assert (paper.policy, paper.t_target_s, paper.min_chunk) == ("lars", 0.020, 0)
    assert paper.medha is not None
    assert (paper.medha.rho, paper.medha.quantum, paper.medha.iterations) == ((0.0, 0.4), 0.0, 0.0)
    assert SchedulerConfig.named("paper", medha={"space_sharing": False}).medha == MedhaConfig(
        mode="paper", space_sharing=False
    )
    assert SchedulerConfig.of_fields(asdict(paper)) == paper
    with pytest.raises(ConfigError, match="medha must be left out with policy ladder"):
        SchedulerConfig(medha=MedhaConfig())
