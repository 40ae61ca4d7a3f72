"""`engine: vllm`: the model of vLLM by itself. tests/vllm/contract compares it with vLLM's own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import ConfigError
from headway.core.request import Request
from headway.core.strict_yaml import read_yaml
from headway.perf.hardware import ModelShape
from headway.perf.latency.table import MachineRates, ServingOverhead, roofline
from headway.policy.hosted.settings import VllmSettings
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, RunSpec, simulate
from headway.sim.build import run_scenario
from headway.sim.scenario import Scenario, parse_scenario
from headway.sim.spec import VllmSpec
from headway.sim.sweep import with_field
from headway.sim.vllm.scheduler import VllmBlockPool, VllmRequestState, VllmScheduler
from headway.sim.workload import TraceRequest

EXAMPLE = Path(__file__).parents[2] / "examples/vllm-convoy.yaml"
SPEC = VllmSpec(num_blocks=101, max_num_batched_tokens=256, max_num_seqs=8, async_scheduling=False)


def changed(spec: VllmSpec, **fields: Any) -> VllmSpec:
    return spec.model_copy(update=fields)


def scheduler(spec: VllmSpec = SPEC, **prompts: int) -> VllmScheduler:
    made = VllmScheduler(spec)
    for order, (name, tokens) in enumerate(prompts.items()):
        facts = Request(id=name, arrival_s=order, prompt_tokens=tokens, max_output_tokens=64, priority=-order)
        made.add(VllmRequestState(facts, 64))
    return made


def tokens_of(made: VllmScheduler, steps: int) -> list[dict[str, int]]:
    taken = []
    for _ in range(steps):
        step = made.schedule(0.0)
        made.update(step, 0.0)
        taken.append(step.tokens)
    return taken


def scenario(*fields: tuple[str, object]) -> Scenario:
    data = read_yaml(str(EXAMPLE))
    for field, value in fields:
        data = with_field(data, field, value)
    return parse_scenario(data)


def test_stock_serves_running_prompts_first_and_fills_the_step() -> None:
    assert tokens_of(scheduler(a=300, b=100), 3) == [{"a": 256}, {"a": 44, "b": 100}, {"a": 1, "b": 1}]


def test_prefills_wait_for_their_interval_while_requests_decode_unless_some_queue() -> None:
    made = scheduler(changed(SPEC, prefill_schedule_interval=3), a=10)
    assert tokens_of(made, 1) == [{"a": 10}]
    made.add(VllmRequestState(Request(id="b", arrival_s=1, prompt_tokens=300, max_output_tokens=64), 64))
    assert tokens_of(made, 2) == [{"a": 1}, {"a": 1}]
    # once a step with prefills has left nothing to wait, further chunks are held too
    assert tokens_of(made, 4) == [{"a": 1, "b": 255}, {"a": 1}, {"a": 1}, {"a": 1, "b": 45}]
    crowded = scheduler(changed(SPEC, prefill_schedule_interval=3), a=10, b=300, c=300)
    assert tokens_of(crowded, 2) == [{"a": 10, "b": 246}, {"a": 1, "b": 54, "c": 201}]


def test_a_threshold_caps_a_prompt_unless_it_is_alone() -> None:
    spec = changed(SPEC, long_prefill_token_threshold=50)
    assert tokens_of(scheduler(spec, a=300), 1) == [{"a": 256}]
    assert tokens_of(scheduler(spec, a=300, b=100), 2) == [{"a": 50, "b": 50}, {"a": 50, "b": 50}]
    adaptive = changed(spec, long_prefill_token_threshold_adaptive=True)
    assert tokens_of(scheduler(adaptive, a=300, b=100), 1) == [{"a": 128, "b": 100}]


def test_priority_goes_before_arrival() -> None:
    assert tokens_of(scheduler(changed(SPEC, by_priority=True), a=300, b=100), 1) == [{"b": 100, "a": 156}]


def test_a_prompt_begins_only_if_all_of_it_fits() -> None:
    assert tokens_of(scheduler(a=1000, b=900), 2) == [{"a": 256}, {"a": 256}]
    spec = changed(SPEC, scheduler_reserve_full_isl=False, max_num_batched_tokens=2000)
    assert tokens_of(scheduler(spec, a=1000, b=900), 1) == [{"a": 1000}]  # 600 tokens are left, of 900
    assert tokens_of(scheduler(changed(spec, long_prefill_token_threshold=500), a=1000, b=900), 1) == [
        {"a": 500, "b": 500}
    ]


def test_the_last_running_request_is_preempted_and_finds_its_cached_blocks_again() -> None:
    spec = changed(SPEC, num_blocks=1 + 20, max_num_batched_tokens=512)
    made = scheduler(spec, a=158, b=158)  # ten blocks each: the fourth token needs an eleventh
    preempted = []
    while not preempted:
        step = made.schedule(0.0)
        preempted = step.preempted
        made.update(step, 0.0)
    assert preempted == ["b"]
    made.abort("a")
    # One of its ten blocks went to the other request: nine are found.
    assert tokens_of(made, 1) == [{"b": made.requests["b"].num_tokens - 1 - 9 * 16}]


def test_an_asynchronous_step_is_scheduled_before_the_last_has_returned() -> None:
    made = scheduler(changed(SPEC, async_scheduling=True), a=300)
    steps = [made.schedule(0.0) for _ in range(4)]
    assert [step.tokens for step in steps] == [{"a": 256}, {"a": 44}, {"a": 1}, {"a": 1}]
    assert made.update(steps[0], 0.0) == ([], [])
    assert made.update(steps[1], 0.0) == (["a"], [])


@given(st.lists(st.tuples(st.sampled_from(["grow", "free"]), st.sampled_from("abc"), st.integers(1, 400)), max_size=40))
def test_no_block_is_lost_or_held_twice(changes: list[tuple[str, str, int]]) -> None:
    pool = VllmBlockPool(40, 16, caching=True)
    tokens: dict[str, int] = {}
    for what, name, count in changes:
        if what == "free":
            pool.free(name)
            tokens.pop(name, None)
            continue
        if name not in tokens:
            hit = pool.cached_tokens(name, count)
            assert hit < count
            if pool.needed_blocks(name, count) > pool.free_blocks:
                continue
            pool.adopt(name, hit)
        wanted = max(count, tokens.get(name, 0))
        if pool.needed_blocks(name, wanted) > pool.free_blocks:
            continue
        pool.allocate(name, wanted)
        pool.cache(name, wanted)
        tokens[name] = wanted
        held = sum(pool.held_blocks(other) for other in tokens)
        assert held == pool.used_blocks == 39 - pool.free_blocks == sum(-(-n // 16) for n in tokens.values())


@settings(max_examples=15)
@given(st.integers(0, 1000), st.booleans(), st.sampled_from(["default", "threshold:64", "priority", "plugged"]))
def test_every_request_gets_its_output_and_no_block_is_left(seed: int, asynchronous: bool, scheduler: str) -> None:
    run = run_scenario(
        scenario(
            ("vllm.scheduler", scheduler), ("vllm.async_scheduling", asynchronous), ("memory.kv_tokens", 8000),
            ("workload.requests", 40), ("workload.qps", 30), ("vllm.max_num_batched_tokens", 512),
            ("workload.max_prompt", 6000), ("vllm.priorities", {"document": 1}),
        ),
        seed,
    ).sim  # fmt: skip
    assert all(record.finish_s is not None for record in run.records)
    assert run.replicas[0].prefill_tokens >= sum(record.prompt_tokens for record in run.records)


def test_plugged_chats_do_not_wait_for_documents_and_steps_keep_the_aim() -> None:
    few = (("workload.requests", 400), ("workload.mix.1.share", 0.01))
    waits = {}
    for name in ("default", "plugged"):
        run = run_scenario(scenario(("vllm.scheduler", name), *few), 0)
        chats = [r for r in run.sim.records if r.klass == "chat"]
        waits[name] = max(r.token_s[0] - r.arrival_s for r in chats)
    assert waits["plugged"] < 0.2 * waits["default"]


def test_a_prompt_that_cannot_fit_is_rejected() -> None:
    run = run_scenario(scenario(("vllm.max_model_len", 50_000), ("workload.requests", 300)), 0).sim
    rejected = [record for record in run.records if record.rejected]
    assert rejected
    assert all(record.klass == "document" for record in rejected)
    assert "at most 49,999 fit" in str(rejected[0].error)


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("vllm.scheduler", "threshold:0", "none of default, priority, plugged and threshold:N"),
        ("engine", "headway", "`vllm` needs `engine: vllm`"),
        ("policy.t_target_s", 0.1, "write `vllm.headway`"),
        ("layout.stages", 2, "one stage and one KV group"),
        ("vllm.headway.profile", "p.json", "step times come from the scenario's `latency`"),
        ("vllm.headway.log", "l.jsonl", "writes no decision log"),
        ("vllm.headway.aim", 3, "is not a field"),
    ],
)
def test_a_scenario_that_mixes_engines_is_refused(field: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=why.replace("(", r"\(")):
        scenario((field, value))


def test_a_pool_of_one_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps one for itself"):
        run_scenario(scenario(("memory.kv_tokens", 20)), 0)


def test_settings_of_the_plugin_reach_the_policy() -> None:
    steps = {}
    for aim in (40, 120):
        section = scenario(("vllm.scheduler", "plugged"), ("vllm.headway", {"t_target_ms": aim}))
        assert isinstance(section.vllm.headway, VllmSettings)
        run = run_scenario(with_requests(section, 150), 0)
        steps[aim] = run.sim.replicas[0].iterations
    assert steps[120] < steps[40]


def with_requests(given: Scenario, count: int) -> Scenario:
    data = given.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return parse_scenario(with_field(data, "workload.requests", count))


def test_a_step_after_an_idle_engine_takes_what_a_profile_says_longer() -> None:
    requests = [TraceRequest(1.0, 100, 3), TraceRequest(5.0, 100, 3)]

    def ttfts(idle_s: float) -> list[float]:
        shape = ModelShape(layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=512)
        rates = MachineRates(linear_flops=1e9, attention_flops=1e9, bandwidth=1e9, name="x")
        spec = InstanceSpec(
            config=SchedulerConfig(), latency=roofline(shape, rates), kv_tokens=1600, block_tokens=16, vllm=SPEC,
            serving=ServingOverhead(idle_s=idle_s),
        )  # fmt: skip
        records = simulate(spec, requests, RunSpec()).records
        assert len(records) == 2
        gaps = [after - before for r in records for before, after in zip(r.token_s, r.token_s[1:], strict=False)]
        assert max(gaps) < 0.25
        return [r.token_s[0] - r.arrival_s for r in records]

    plain, woken = ttfts(0.0), ttfts(0.25)
    assert woken == pytest.approx([seconds + 0.25 for seconds in plain])
