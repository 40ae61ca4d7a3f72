"""`headway why`: intervals fill the time to first token and the worst gap, and name their causes."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.unit_latency import small_machine

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.perf.latency.table import TableLatency
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.medha import MedhaConfig
from headway.sim.explanation import (
    LifeInterval,
    RequestExplanation,
    explain,
    find,
    merged,
    outcomes,
    shares,
    with_setting,
)
from headway.sim.loop import simulate
from headway.sim.metrics import SloTargets
from headway.sim.replay import ReplayedRun, replay
from headway.sim.report.why import why_json, why_of, why_text
from headway.sim.result import SimResult
from headway.sim.spec import InstanceSpec, NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest

CONVOY = [TraceRequest(0.0, 30_000, 8), *(TraceRequest(0.05 + 0.2 * i, 200, 16) for i in range(12))]


def logged(
    workload: list[TraceRequest],
    kv_tokens: int = 60_000,
    log: Path | None = None,
    noise: NoiseSpec = NoiseSpec(),  # noqa: B008 - frozen
    seed: int = 0,
    run: RunSpec | None = None,
    **fields: Any,
) -> tuple[SimResult, ReplayedRun]:
    """A simulated run, and the replay of its log."""
    fields = {"t_target_s": 0.02, **fields}
    events: list[dict[str, Any]] = []
    spec = InstanceSpec(
        config=SchedulerConfig(**fields),
        latency=small_machine(),
        kv_tokens=kv_tokens,
        block_tokens=16,
        learns=noise != NoiseSpec(),
    )
    run = run or RunSpec(timeout_s=60.0, noise=noise, seed=seed)
    result = simulate(spec, workload, run, log=lambda kind, more: events.append({"event": kind, **more}))
    if log is not None:
        log.write_text("".join(json.dumps(event) + "\n" for event in events))
    return result, replay(json.loads(json.dumps(events)), detail=True)


def fills(intervals: tuple[LifeInterval, ...], start_s: float, end_s: float) -> bool:
    """Whether the intervals follow each other from start to end, and their shares have the same sum."""
    edges = [start_s, *(one.end_s for one in intervals)]
    follow = all(one.start_s == edge and one.end_s > edge for one, edge in zip(intervals, edges, strict=False))
    return (
        follow and edges[-1] == end_s and math.isclose(sum(shares(intervals).values()), end_s - start_s, abs_tol=1e-6)
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["fcfs", "edf", "lars", "srpt", "ladder", "ladder"]),
    kv_tokens=st.sampled_from([6_000, 60_000]),
    groups=st.sampled_from([1, 1, 2]),
)
def test_causes_sum_to_the_time_to_first_token_and_to_the_worst_gap(
    seed: int, policy: str, kv_tokens: int, groups: int
) -> None:
    chance = random.Random(seed)
    workload = [
        TraceRequest(chance.uniform(0, 3), chance.choice([10, 300, 2_000, 5_500]), chance.randrange(1, 60))
        for _ in range(25)
    ]
    result, run = logged(sorted(workload, key=lambda one: one.arrival_s), kv_tokens, policy=policy, kv_parallel=groups)
    assert run.differences == []
    assert sum(use.preemptions for use in result.replicas) == len(run.preemptions)
    for record in result.records:
        if record.rejected or not record.token_s:
            continue
        told = explain(run, record.id)
        assert told.ttft_s == pytest.approx(record.token_s[0] - record.arrival_s, abs=1e-9)
        assert fills(told.to_first_token, record.arrival_s, record.token_s[0])
        gaps = [b - a for a, b in zip(record.token_s, record.token_s[1:], strict=False)]
        if gaps:
            assert sum(one.seconds for one in told.worst_gap) == pytest.approx(max(gaps), abs=1e-9)
        assert sum(one.seconds for one in merged(told.to_first_token)) == pytest.approx(told.ttft_s, abs=1e-6)


def chat_under(policy: str) -> RequestExplanation:
    _, run = logged(CONVOY, policy=policy, medha=MedhaConfig(space_sharing=policy == "lars"))
    return explain(run, "r3")


def test_under_fcfs_a_chat_is_queued_behind_the_long_prompt() -> None:
    told = chat_under("fcfs")
    causes = shares(told.to_first_token)
    assert next(iter(causes)) == "queued behind r0"
    assert any(one.rule == "first come, first served" for one in told.to_first_token)
    assert chat_under("lars").ttft_s < 0.5 * told.ttft_s


def test_chunks_say_what_bounds_them() -> None:
    _, run = logged(CONVOY)
    long = explain(run, "r0")
    limits = [one.chunk.limit for one in long.to_first_token if one.chunk is not None]
    assert limits[-1] == "rest of the prompt"
    assert "time" in limits
    _, run = logged(CONVOY, max_num_batched_tokens=64)
    assert "token limit" in {chunk.limit for step in run.steps for chunk in step.chunks}


def test_a_gap_names_the_chunk_that_ran_beside() -> None:
    _, run = logged(CONVOY)
    told = explain(run, "r2")
    assert next(iter(shares(told.worst_gap))) == "iterations with chunks of r0"


def test_a_request_that_waits_says_by_which_rule() -> None:
    """A document and more chats than can be in time."""
    chats = (TraceRequest(0.05 + 0.02 * i, 1_500 + 3_000 * (i % 2), 4) for i in range(40))
    _, run = logged([TraceRequest(0.0, 30_000, 8), *chats], kv_tokens=400_000)
    assert run.differences == []
    rules = {one.rule for record in run.records for one in explain(run, record.id).to_first_token if one.rule}
    assert any(re.fullmatch(r"[0-9]+ requests? would have been late", rule) for rule in rules)
    assert any(re.fullmatch(r"shorter by [0-9.]+ s", rule) for rule in rules)
    told = next(one for one in (explain(run, record.id) for record in run.records) if "shorter by" in why_text(one))
    assert "queued behind" in why_text(told)


def test_a_refused_request_says_by_which_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    targets = {"chat": SloTargets(ttft_s=0.3), "document": SloTargets(e2e_s=1e3)}
    workload = [replace(one, klass="chat" if one.prompt_tokens < 1_000 else "document") for one in CONVOY]
    result, run = logged(
        [*workload, *(TraceRequest(0.06, 2_000, 2, klass="chat") for _ in range(8))],
        log=tmp_path / "log.jsonl", policy="fcfs", run=RunSpec(targets=targets, refuse_late=True),
    )  # fmt: skip
    assert run.differences == [], "the replay predicts the same"
    refused = [record for record in result.records if record.rejected]
    served = [record for record in result.records if not record.rejected]
    assert refused
    assert served
    assert {record.klass for record in refused} == {"chat"}
    assert {record.id for record in run.records if record.rejected} == {record.id for record in refused}
    assert main(["why", refused[0].id, "--log", str(tmp_path / "log.jsonl")]) == 0
    assert "It was not taken on, refused: its first token would have come after" in capsys.readouterr().out


def test_where_a_document_yields_chats_are_predicted_to_be_in_time_and_are() -> None:
    targets = {"chat": SloTargets(ttft_s=0.3), "document": SloTargets(e2e_s=1e3)}
    workload = [replace(one, klass="chat" if one.prompt_tokens < 1_000 else "document") for one in CONVOY]
    result, run = logged(workload, run=RunSpec(targets=targets, refuse_late=True))
    assert run.differences == []
    assert not any(record.rejected for record in result.records)
    assert all(record.token_s[0] - record.arrival_s <= 0.3 for record in result.records if record.klass == "chat")


def test_a_wait_for_blocks_is_told_from_a_wait_for_time() -> None:
    workload = [TraceRequest(0.0, 5_000, 300), TraceRequest(0.1, 2_000, 10)]
    _, run = logged(workload, kv_tokens=6_400)
    causes = shares(explain(run, "r1").to_first_token)
    assert next(iter(causes)) == "no free KV blocks"


def test_the_counterfactual_is_what_an_actual_run_under_it_gives() -> None:
    _, run = logged(CONVOY)
    _, other = logged(CONVOY, policy="fcfs")
    actual = explain(other, "r3")
    as_it_ran, fcfs, slower = outcomes(run, "r3", ["fcfs", "t_target_ms=60"])
    assert as_it_ran.ttft_s == pytest.approx(explain(run, "r3").ttft_s, rel=0.01)
    assert fcfs.ttft_s == pytest.approx(actual.ttft_s, rel=0.15)
    assert slower.worst_gap_s is not None
    assert as_it_ran.worst_gap_s is not None
    assert slower.worst_gap_s > 2 * as_it_ran.worst_gap_s


def test_a_counterfactual_says_what_its_profile_never_measured() -> None:
    _, run = logged(CONVOY)
    source = run.table.source
    knots = tuple(knot for knot in source.chunks if knot[0] <= 2_048)
    run.table = TableLatency(msgspec.structs.replace(source, chunks=knots, validated_past=40_000))
    as_it_ran, whole = outcomes(run, "r3", ["fcfs,chunking=whole"])
    top = max([knots[-1][0], *(chunk.tokens for step in run.steps for chunk in step.chunks)])
    # What the run itself did was measured in it.
    assert as_it_ran.extrapolated == ()
    assert whole.extrapolated == (f"chunks of 30,000 tokens, {top:,} measured",)
    text = why_text(explain(run, "r3"), [as_it_ran, whole])
    assert text.count("extrapolated") == 1
    assert f"(extrapolated: chunks of 30,000 tokens, {top:,} measured)" in text
    told = why_json(explain(run, "r3"), [as_it_ran, whole])
    assert why_of(json.loads(json.dumps(told)))[1] == [as_it_ran, whole]
    # An older server does not say.
    for one in told["counterfactuals"]:
        del one["extrapolated"]
    assert why_of(told)[1][1].extrapolated == ()


def test_a_request_that_ended_before_a_long_chunk_is_not_extrapolated() -> None:
    _, run = logged([TraceRequest(0.0, 100, 2), TraceRequest(9.0, 30_000, 2)])
    knots = tuple(knot for knot in run.table.source.chunks if knot[0] <= 2_048)
    run.table = TableLatency(msgspec.structs.replace(run.table.source, chunks=knots, validated_past=40_000))
    first, second = (outcomes(run, name, ["chunking=whole"])[1].extrapolated for name in ("r0", "r1"))
    assert first == ()
    assert len(second) == 1


@pytest.mark.long
@pytest.mark.parametrize("slower", [0.8, 1.0, 1.3])
def test_a_counterfactual_holds_on_a_machine_that_is_not_as_its_profile_says(slower: float) -> None:
    def ran(seed: int, policy: str) -> ReplayedRun:
        _, run = logged(CONVOY, policy=policy, noise=NoiseSpec(kind="lognormal", amount=0.05, bias=slower), seed=seed)
        return run

    def wait_s(of: Callable[[str], float | None]) -> float:
        return statistics.median(of(f"r{i}") or 0.0 for i in range(1, 13))

    # Medians of one run differ by half: 5% of noise decides which chats come while the document computes.
    fifos, lars = [ran(seed, "fcfs") for seed in range(1, 5)], [ran(seed, "lars") for seed in range(1, 5)]
    actual = statistics.mean(wait_s(lambda name, run=run: explain(run, name).ttft_s) for run in fifos)
    simulated = statistics.mean(wait_s(lambda name, run=run: outcomes(run, name, ["fcfs"])[1].ttft_s) for run in lars)
    assert actual > 10 * wait_s(lambda name: explain(lars[0], name).ttft_s)
    assert simulated == pytest.approx(actual, rel=0.15)


def test_a_setting_is_read_by_its_type_and_unit() -> None:
    config = SchedulerConfig()
    assert with_setting(config, "edf,t_target_ms=100,min_chunk=16") == replace(
        config, policy="edf", t_target_s=0.1, min_chunk=16
    )
    for wrong, words in (
        ("nearest", "policies: ladder, fcfs"),
        ("t_targt=1", "no such setting 't_targt'"),
        ("min_chunk=x", "not a number"),
    ):
        with pytest.raises(ConfigError, match=words):
            with_setting(config, wrong)


def test_an_id_may_be_a_part_that_only_one_has() -> None:
    _, run = logged(CONVOY)
    assert find({record.id for record in run.records}, "11") == "r11"
    assert [
        find({record.id for record in run.records}, f"{prefix}-r11") for prefix in ("chatcmpl", "cmpl", "resp")
    ] == ["r11"] * 3  # an answer's id
    run.records = [replace(one, id=f"chatcmpl-{one.id}") for one in run.records]
    assert find({record.id for record in run.records}, "r7") == "chatcmpl-r7"
    with pytest.raises(ConfigError, match="several requests have it in their id; name one of 4, such as chatcmpl-r1, "):
        find({record.id for record in run.records}, "r1")
    with pytest.raises(ConfigError, match=r"the log has no such request; name one of 13, such as chatcmpl-r0"):
        find({record.id for record in run.records}, "dog")


def test_the_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    logged(CONVOY, log=log)
    assert main(["why", "r3", "--log", str(log), "--under", "fcfs", "--json", str(tmp_path / "why.json")]) == 0
    text = capsys.readouterr().out
    assert "First token after" in text
    assert "fcfs" in text
    told = json.loads((tmp_path / "why.json").read_bytes())
    assert told["request"] == "r3"
    assert sum(told["causes_of_ttft"].values()) == pytest.approx(told["ttft_s"], abs=1e-3)
    assert [one["setting"] for one in told["counterfactuals"]] == ["as it ran", "fcfs"]


def test_wrong_files_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong"
    for text in ('{"a": 1}\n', "no json\n\n", '{"event": "start"}\n', ""):
        wrong.write_text(text)
        assert main(["why", "r3", "--log", str(wrong)]) != 0
        said = capsys.readouterr().err
        assert said.startswith("headway: error: ")
        assert said.count("\n") == 1
    assert main(["why", "r3", "--log", str(tmp_path / "none")]) != 0
    assert "No such file" in capsys.readouterr().err
