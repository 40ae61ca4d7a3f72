"""The search of `headway plan` against brute force, its bound and its early stops."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.marks import quick_first
from tests.helpers.present import present

from headway.core.errors import ConfigError
from headway.perf.hardware import accelerator
from headway.perf.latency.fitted import fitted
from headway.planning.question import PlanQuestion, candidates_of, cost_of, memory_faults, parse_question, shape_of
from headway.planning.search import PlanSearch, pareto
from headway.planning.simulate import (
    BACKLOG,
    OUTRUN,
    CandidateMeasure,
    DemandWatch,
    MeasureRunner,
    SimulationJob,
    busiest,
    falls_behind,
    least_late,
    least_percentile,
    least_work,
    measure,
    of_class,
    tolerated,
    workload_of,
)
from headway.sim.metrics import quantile
from headway.sim.scenario import LatencySection
from headway.sim.workload import TraceRequest


def random_question(seed: int, **search: Any) -> PlanQuestion:
    """A small problem whose demands lie where some plans meet them and others do not."""
    rng = random.Random(seed)
    document = rng.choice(["10K", "30K"])
    return parse_question(
        {
            "model": "llama-3-8b",
            "accelerators": rng.choice(
                [
                    [{"name": "a100-80gb", "most": 3}],
                    [{"name": "a100-80gb", "most": 2, "cost": 1.0}, {"name": "h100-80gb", "most": 1, "cost": 2.0}],
                ]
            ),
            "workload": {
                "qps": rng.choice([2, 6, 12]),
                "requests": 30,
                "mix": [
                    {"class": "chat", "share": 0.9, "prompt": "uniform:200-2000", "output": "uniform:5-40"},
                    {"class": "document", "share": 0.1, "prompt": f"fixed:{document}", "output": "fixed:10"},
                ],
            },
            "demands": {
                "chat": {"ttft_p90_s": rng.choice([0.1, 0.3, 1.0]), "tbt_p90_s": rng.choice([0.04, 0.12])},
                "all": {"ttft_p99_s": rng.choice([1.5, 4.0, 12.0])},
            },
            "latency": {"source": "roofline"},
            "search": {"tp": [1, 2], "stages": [1], "t_target_s": [0.03, 0.1], **search},
            "seeds": [seed],
        }
    )


def brute_force(question: PlanQuestion) -> CandidateMeasure | None:
    """Simulate everything to its end; the cheapest plan, then the widest margin, then the first."""
    demands = question.demand_list()
    met = [
        one
        for candidate in candidates_of(question)
        if (one := measure(SimulationJob(question, candidate, to_the_end=True))).meets(demands)
    ]
    return min(met, key=lambda one: (cost_of(one.candidate, question), one.ratio(demands)), default=None)


@pytest.mark.parametrize("seeds", quick_first([range(6), range(6, 50)]))
def test_search_equals_brute_force(seeds: range) -> None:
    solved = 0
    for seed in seeds:
        question = random_question(seed)
        best, truth = PlanSearch(question).run().best, brute_force(question)
        assert (best and best.candidate) == (truth and truth.candidate), seed
        solved += truth is not None
    assert 0 < solved < len(seeds)


def test_bound_never_exceeds_the_late_requests_of_a_simulation() -> None:
    bounded = 0
    for seed in range(8):
        question = random_question(seed)
        workload = workload_of(question, seed)
        for candidate in list(candidates_of(question))[::5]:
            job = SimulationJob(question, candidate, to_the_end=True)
            for limit_s in (0.01, 0.3):
                work = least_work(candidate, question)
                least = least_late(work, candidate.replicas, workload, limit_s)
                bounded += least > 0
                # a bound of k late requests says that the k-th largest TTFT is above the limit
                percent = 100 * (len(workload) - least) / (len(workload) - 1) if least else 100
                tightened = question.model_copy(update={"demands": {"all": {f"ttft_p{percent:.0f}_s": limit_s}}})
                if 0 < percent < 100:
                    assert measure(job._replace(question=tightened)).worst_s(0) > limit_s
    assert bounded > 5


def test_the_bound_counts_rows_at_the_predicted_best_rate_and_not_at_peak() -> None:
    question = random_question(0).model_copy(update={"latency": LatencySection(source="fitted", engine="vllm")})
    candidate = next(iter(candidates_of(question)))
    latency = fitted(candidate.accelerator, "llama-3-8b", candidate.layout)
    work, rows = least_work(candidate, question), np.arange(1, 8193)
    assert work.row_s * 8192 <= latency.rows_s(8192) <= 1.1 * work.row_s * 8192
    assert (work.row_s * rows <= latency.token_s(1, 8192) * (1 + 1e-12)).all()
    assert work.row_s > 1.2 * shape_of(question).linear_flops(1) / accelerator(candidate.accelerator).flops


def test_deployment_that_the_kv_bound_removes_does_not_keep_up() -> None:
    removed = 0
    for seed in range(4):
        section = random_question(seed).model_dump(mode="json", by_alias=True, exclude_none=True)
        section["workload"] = {"qps": 6, "requests": 60, "mix": [{"prompt": "fixed:2000", "output": "fixed:100"}]}
        section["demands"] = {"all": {"ttft_p99_s": 5.0, "tbt_p50_s": 0.1}}
        # caches of one request to a few of them, in steps that the bound falls into
        section["memory"] = {"kv_tokens": 2200 * (1 + 2 * seed)}
        question = parse_question(section)
        workload = workload_of(question, seed)
        for candidate in list(candidates_of(question))[::3]:
            whole = measure(SimulationJob(question, candidate, to_the_end=True))
            if falls_behind(candidate, question, workload, least_work(candidate, question)):
                removed += 1
                assert not whole.keeps_up()
    assert removed > 0


def without_stops(job: SimulationJob, monkeypatch: pytest.MonkeyPatch) -> CandidateMeasure:
    """Measure a run that goes on to its last event."""
    with monkeypatch.context() as patch:
        patch.setattr(DemandWatch, "look", lambda *_: None)
        return measure(job)


@pytest.mark.parametrize("seeds", quick_first([range(3), range(8)]))
def test_early_stop_changes_no_verdict(monkeypatch: pytest.MonkeyPatch, seeds: range) -> None:
    seen = {"late": 0, BACKLOG: 0, "met": 0}
    for seed in seeds:
        rng = random.Random(seed)
        question = random_question(seed)
        # looked at every 1,024 instants: short runs end before they are stopped
        workload = question.workload.model_copy(update={"requests": 300, "qps": rng.choice((4.0, 15.0, 40.0))})
        limits = {"ttft_p90_s": rng.choice((0.2, 2.0, 90.0))} | rng.choice(
            ({}, {"tbt_p90_s": 0.05}, {"e2e_p50_s": 3.0})
        )
        question = question.model_copy(update={"workload": workload, "demands": {"all": limits}})
        demands = question.demand_list()
        for candidate in list(candidates_of(question))[::6]:
            early, job = (
                measure(SimulationJob(question, candidate)),
                SimulationJob(question, candidate, to_the_end=True),
            )
            whole, nearest = without_stops(job, monkeypatch), measure(job)
            assert early.meets(demands) == nearest.meets(demands) == whole.meets(demands)
            assert nearest.keeps_up() == whole.keeps_up()
            seen["met"] += whole.meets(demands)
            seen["late"] += not early.complete() and whole.keeps_up()
            seen[BACKLOG] += not nearest.complete()
    assert all(seen.values()), seen


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=30),
    st.integers(1, 30),
)
def test_busiest_part_has_the_most_tokens_a_second(gaps_and_tokens: list[tuple[int, int]], count: int) -> None:
    arrivals = itertools.accumulate(gap for gap, _ in gaps_and_tokens)
    workload = [
        TraceRequest(float(at_s), tokens, 1) for at_s, (_, tokens) in zip(arrivals, gaps_and_tokens, strict=True)
    ]

    def rate(part: list[TraceRequest]) -> float:
        return sum(r.prompt_tokens + 1 for r in part) / max(1e-9, part[-1].arrival_s - part[0].arrival_s)

    count = min(count, len(workload))
    parts = [workload[i : i + count] for i in range(len(workload) - count + 1)]
    assert busiest(workload, count) in parts
    assert rate(busiest(workload, count)) == pytest.approx(max(map(rate, parts)))


LATENCIES = st.lists(st.floats(0, 10), max_size=40)


@given(LATENCIES.filter(bool), LATENCIES, st.sampled_from([50.0, 90.0, 99.0]))
def test_percentile_is_at_least_what_a_part_of_the_values_forces(
    part: list[float], others: list[float], percent: float
) -> None:
    few = tolerated(len(part) + len(others), percent)
    whole = present(quantile(part + others, percent))
    assert least_percentile(part, few) <= whole * (1 + 1e-9)
    assert few > 0 or least_percentile(part, few) == max(part)


@pytest.mark.parametrize("ratio", quick_first([0.2, 0.5]))
def test_candidate_that_is_removed_on_the_busiest_part_misses_a_demand_on_the_whole_workload(ratio: float) -> None:
    question = random_question(2)
    workload = question.workload.model_copy(update={"requests": 1600, "qps": 12.0})
    question = question.model_copy(update={"workload": workload, "demands": {"all": {"ttft_p95_s": ratio}}})
    demands, removed = question.demand_list(), 0
    for candidate in list(candidates_of(question))[::5]:
        part = measure(SimulationJob(question, candidate, 400))
        if part.seeds[0].missed not in ("", BACKLOG):
            removed += 1
            assert not measure(SimulationJob(question, candidate, to_the_end=True)).meets(demands)
        else:
            assert part.seeds[0].least_s[0] <= part.seeds[0].values_s[0]
    assert removed > 0


@pytest.mark.parametrize("count", [1, 2, 10, 99, 100, 101])
@pytest.mark.parametrize("percent", [50.0, 90.0, 99.0])
def test_tolerated_is_the_most_that_a_percentile_allows(count: int, percent: float) -> None:
    few = tolerated(count, percent)
    # just within: the percentile may still meet the limit of 1
    assert quantile([1.0] * (count - few) + [1.0 + 1e-9] * few, percent) <= 1.0 + 1e-9
    assert quantile([0.0] * (count - few - 1) + [2.0] * (few + 1), percent) == 2.0


@pytest.mark.long
def test_number_of_processes_changes_nothing() -> None:
    question = random_question(1)
    with MeasureRunner(2) as runner:
        assert PlanSearch(question).run() == PlanSearch(question, runner).run()


def test_front_goes_on_to_dearer_plans_and_has_no_dominated_one() -> None:
    question = random_question(3, front=True, split=False)
    front = pareto(PlanSearch(question).run().measures, question)
    assert len({cost_of(one.candidate, question) for one in front}) > 1
    rows = [(cost_of(one.candidate, question), *(one.worst_s(i) for i in range(3))) for one in front]
    assert not [a for a in rows for b in rows if a != b and all(x <= y for x, y in zip(b, a, strict=True))]


def test_nearest_plan_is_of_the_best_layout_where_bounds_leave_nothing_to_simulate() -> None:
    section = {
        "model": "llama-3-8b", "accelerators": [{"name": "h100-80gb", "most": 2}],
        "workload": {"qps": 2, "requests": 60, "mix": [{"class": "chat", "prompt": "fixed:500", "output": "fixed:20"}]},
        "demands": {"chat": {"ttft_p99_s": 0.001}},
    }  # fmt: skip
    question = parse_question(section)
    demands = question.demand_list()
    nearest = present(PlanSearch(question).run().nearest)
    everything = [measure(SimulationJob(question, one, to_the_end=True)) for one in candidates_of(question)]
    assert nearest.ratio(demands) == min(one.ratio(demands) for one in everything if one.complete())


def test_nearest_plan_of_impossible_gaps_is_not_the_one_that_ran_longest_because_it_is_slow() -> None:
    section = longer_question(1).model_dump(mode="json", by_alias=True, exclude_none=True)
    section["demands"] = {"all": {"tbt_p50_s": 0.001}}
    section["search"] |= {"split": False, "t_target_s": [0.03], "busiest_part": 1}
    question = parse_question(section)
    demands = question.demand_list()
    result = PlanSearch(question).run()
    assert result.best is None
    assert result.nearest is not None
    everything = [measure(SimulationJob(question, one, to_the_end=True)) for one in candidates_of(question)]
    assert result.nearest.ratio(demands) == min(one.ratio(demands) for one in everything if one.complete())


def test_lone_request_keeps_up_however_long_its_prompt_takes() -> None:
    section = random_question(1).model_dump(mode="json", by_alias=True, exclude_none=True)
    section["workload"] = {"qps": 1.0, "requests": 1, "mix": [{"prompt": "fixed:60000", "output": "fixed:5"}]}
    section["demands"] = {"all": {"tbt_p90_s": 0.1}}
    section["latency"] = {"source": "fitted"}
    result = PlanSearch(parse_question(section)).run()
    assert result.best is not None
    assert result.best.keeps_up()


def test_layouts_without_memory_are_named_with_the_numbers() -> None:
    question = random_question(0).model_copy(update={"model": "llama-3-70b"})
    faults = memory_faults(question, list(candidates_of(question)), workload_of(question, 0))
    assert ("a100-80gb", "tp1-pp1-kvp1") in faults
    assert "weights take" in faults["a100-80gb", "tp1-pp1-kvp1"]


def test_demand_on_a_class_that_the_workload_lacks_is_refused() -> None:
    question = random_question(0).model_copy(update={"demands": {"chats": {"ttft_p99_s": 1.0}}})
    with pytest.raises(ConfigError, match="no such class; it has chat, document, and `all`"):
        PlanSearch(question)


def test_demand_on_a_class_of_which_no_request_was_drawn_asks_for_more_requests() -> None:
    question = random_question(0)
    rare = question.workload.mix[0].model_copy(update={"klass": "rare", "share": 1e-9})  # type: ignore[index]
    workload = question.workload.model_copy(update={"mix": (*question.workload.mix, rare)})
    question = question.model_copy(update={"workload": workload, "demands": {"rare": {"ttft_p99_s": 1.0}}})
    with pytest.raises(ConfigError, match=r"demands\.rare: none of the \d+ requests that were drawn .* are needed"):
        PlanSearch(question)


def test_class_of_all_counts_every_request() -> None:
    workload = workload_of(random_question(0), 0)
    assert of_class("all", workload) == workload
    assert len(of_class("chat", workload)) + len(of_class("document", workload)) == len(workload)


def test_deployment_that_falls_behind_is_no_plan_whatever_its_percentiles(monkeypatch: pytest.MonkeyPatch) -> None:
    question = parse_question(
        {
            "model": "llama-3-70b",
            # the weights leave KV for a few thousand tokens, so that decodes wait for it and not prefills
            "accelerators": [{"name": "h100-80gb", "most": 6}],
            "workload": {"qps": 9, "requests": 300, "mix": [{"prompt": "fixed:1000", "output": "fixed:200"}]},
            "demands": {"all": {"ttft_p99_s": 5.0, "tbt_p50_s": 0.1}},
            "search": {"tp": [2], "stages": [1], "t_target_s": [0.05]},
            "latency": {"source": "roofline"},
        }
    )
    candidate = next(c for c in candidates_of(question) if (c.replicas, c.decoders) == (2, 1))
    whole = without_stops(SimulationJob(question, candidate), monkeypatch)
    assert whole.ratio(question.demand_list()) <= 1
    assert whole.seeds[0].missed == BACKLOG
    assert 0 < whole.kept_up() < 1
    assert not whole.meets(question.demand_list())


def longer_question(seed: int) -> PlanQuestion:
    """400 requests: enough for a busiest half that candidates are ordered by, and for runs to be stopped."""
    section = random_question(seed).model_dump(mode="json", by_alias=True, exclude_none=True)
    section["accelerators"] = [{"name": "a100-80gb", "most": 2}]
    section["workload"] |= {"requests": 400}
    section["demands"] = {"all": {"ttft_p90_s": random.Random(seed).choice((0.15, 0.4, 1.0, 3.0))}}
    section["search"] |= {"busiest_part": 2, "t_target_s": [0.03, 0.1]}
    return parse_question(section)


def stops_of_races(seeds: Sequence[int]) -> dict[str, int]:
    """Compare with brute force on each seed; count what ended candidates early, and problems without a plan."""
    stops = dict.fromkeys(("bound", "peak", OUTRUN, "late", BACKLOG, "no plan"), 0)
    for seed in seeds:
        question = longer_question(seed)
        result, truth = PlanSearch(question).run(), brute_force(question)
        assert (result.best and result.best.candidate) == (truth and truth.candidate), seed
        missed = [one.missed for measure in result.measures for one in measure.seeds]
        stops["bound"] += result.bounded
        stops["peak"] += result.missed_at_peak
        for name in (OUTRUN, BACKLOG):
            stops[name] += missed.count(name)
        stops["late"] += sum(name not in ("", BACKLOG, OUTRUN) for name in missed)
        stops["no plan"] += truth is None
    return stops


@pytest.mark.long
def test_race_equals_brute_force_on_problems_with_every_kind_of_stop() -> None:
    stops = stops_of_races(range(25))
    assert all(stops.values()), stops
    assert stops["no plan"] < 25


@pytest.mark.long
def test_race_over_thousands_of_requests_finds_the_plan_that_full_runs_find() -> None:
    """Large enough for candidates to be ordered by a part of the workload, and to be stopped by another's margin."""
    section = random_question(1).model_dump(mode="json", by_alias=True, exclude_none=True)
    section["accelerators"] = [{"name": "a100-80gb", "most": 2}]
    section["workload"] |= {"requests": 6400, "qps": 7}
    section["demands"] = {"all": {"ttft_p99_s": 4.0}, "chat": {"tbt_p90_s": 0.12}}
    section["search"] |= {"t_target_s": [0.03, 0.06, 0.1]}
    question = parse_question(section)
    result, truth = PlanSearch(question).run(), brute_force(question)
    assert result.best is not None
    assert truth is not None
    assert result.best.candidate == truth.candidate
    assert result.missed_at_peak > 0
    assert any(seed.missed == OUTRUN for one in result.measures for seed in one.seeds)
