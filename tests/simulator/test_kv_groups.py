"""KV groups in the simulator: joins over time, lockstep, memory. With and without fast-forward: test_simulate."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from tests.helpers.unit_latency import small_machine

from headway.core.errors import ConfigError
from headway.core.request import Request, Span
from headway.kv.block_manager import BlockManager
from headway.perf.hardware import ParallelLayout, accelerator, model
from headway.perf.latency.corrected import describe
from headway.perf.latency.groups import ShardedModel, ShardExchangeCost, WithExchange, between_groups
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.groups import make_scheduler
from headway.sim import InstanceSpec, RunSpec, SimResult, simulate
from headway.sim.build import InfeasibleError, instance_of, requests_of, run_scenario
from headway.sim.replay import replay
from headway.sim.report.perfetto import simulation_trace
from headway.sim.scenario import parse_scenario
from headway.sim.workload import TraceRequest


def instance(groups: int, **fields: Any) -> InstanceSpec:
    config = SchedulerConfig(chunking="static:64", kv_parallel=groups, kv_shard_tokens=512)
    return InstanceSpec(config=config, latency=small_machine(), kv_tokens=2560, block_tokens=16, **fields)


def timeline(groups: int, **fields: Any) -> SimResult:
    return simulate(instance(groups, **fields), [TraceRequest(0.0, 2044, 4)], RunSpec(keep_iterations=True))


def test_cached_tokens_beyond_the_first_shard_are_computed_again() -> None:
    workload = [TraceRequest(0.0, 2000, 4, cached_tokens=1500), TraceRequest(0.0, 400, 4, cached_tokens=300)]
    result = simulate(instance(4), workload)
    assert [len(record.token_s) for record in result.records] == [4, 4]
    assert result.replicas[0].prefill_tokens == (2000 - 511) + (400 - 300)


def test_a_group_joins_after_each_shard_and_iteration_times_do_not_grow() -> None:
    alone, spread = timeline(1), timeline(4)
    assert alone.replicas[0].joins == ()
    joins = spread.replicas[0].joins
    assert [(join.start, join.group, join.groups) for join in joins] == [(512, 1, 2), (1024, 2, 3), (1536, 3, 4)]
    assert [len(row.groups) for row in spread.iterations if row.chunks] == [1] * 8 + [2] * 8 + [3] * 8 + [4] * 8
    assert len({row.groups for row in spread.iterations}) == 4
    took = [[row.stages[0][1] - row.stages[0][0] for row in r.iterations if row.chunks] for r in (alone, spread)]
    assert took[1][:24] == pytest.approx(took[0][:8] * 3), "a shard takes as long as the first one"
    assert max(took[1]) < 0.61 * max(took[0])
    assert spread.records[0].token_s[0] == pytest.approx(sum(took[1]))
    pairs = [r.replicas[0].attention_pairs for r in (alone, spread)]
    assert pairs[0] == pairs[1], "the same attention, by others"
    assert spread.use_json()["kv_joins"] == 3


def test_an_exchange_adds_its_predicted_cost() -> None:
    free, paid = timeline(2), timeline(2, exchange=ShardExchangeCost(1e-3, 1e-5))
    rows = [(a, b) for a, b in zip(free.iterations, paid.iterations, strict=True) if len(a.groups) > 1]
    for a, b in rows:
        tokens = sum(count for _, _, count in a.chunks) + a.decodes
        assert b.predicted_s - a.predicted_s == pytest.approx(1e-3 + 1e-5 * tokens)
    assert rows


def test_a_trace_has_a_thread_for_each_group_and_stage() -> None:
    events = simulation_trace(timeline(2))["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert lanes == {"group 0 stage 0", "group 1 stage 0"}
    together = [event for event in events if event["ph"] == "X" and event["cat"] == "prefill"]
    assert len(together) == 16 + 16 * 2
    assert sum(event["ph"] == "i" for event in events) == 1


SCENARIO: dict[str, Any] = {
    "cluster": {"accelerator": "h100-80gb"},
    "model": "llama-3-8b",
    "layout": {"tp": 8, "stages": 4, "kvp": 2, "shard_tokens": 100_000},
    "latency": {"source": "fitted"},
    "policy": {"chunking": "static:4096"},
    "workload": {"mix": [{"prompt": "fixed:150000", "output": "fixed:20"}], "requests": 2, "arrivals": "at-once"},
}


def test_a_scenario_with_groups() -> None:
    scenario = parse_scenario(SCENARIO)
    spec = instance_of(scenario, requests_of(scenario.workload, None, 0))
    assert (spec.config.kv_parallel, spec.config.kv_shard_tokens) == (2, 100_000)
    assert spec.exchange.fixed_s > 0 < spec.exchange.row_s
    assert spec.utilisation_base is not None
    assert spec.utilisation_base.peak_flops == accelerator("h100-80gb").flops * 64
    result = run_scenario(scenario, 0).sim
    assert result.use_json()["kv_joins"] == 2
    assert all(record.ok for record in result.records)
    with pytest.raises(ConfigError, match=r"layout\.kvp"):
        parse_scenario({**SCENARIO, "layout": {"kvp": 0}})


def test_memory_of_all_groups_together_must_hold_the_longest() -> None:
    big = {**SCENARIO, "workload": {"mix": [{"prompt": "fixed:30000000", "output": "fixed:1"}], "requests": 1}}
    for kvp, fits in ((1, False), (2, True)):
        scenario = parse_scenario({**big, "layout": {"tp": 8, "stages": 4, "kvp": kvp}})
        work = requests_of(scenario.workload, None, 0)
        if fits:
            assert instance_of(scenario, work).kv_tokens * kvp >= 30_000_000
            continue
        with pytest.raises(InfeasibleError, match="the longest request has"):
            instance_of(scenario, work)


def test_exchange_of_a_layout() -> None:
    device, shape = accelerator("h100-80gb"), model("llama-3-8b")
    inside = between_groups(device, shape, ParallelLayout(tp=2, kvp=4))
    across = between_groups(device, shape, ParallelLayout(tp=8, kvp=4))
    assert inside.row_s < across.row_s * 4, "a node's own link; four times the heads a rank"
    assert between_groups(device, shape, ParallelLayout(tp=8, stages=4, kvp=2)).fixed_s == pytest.approx(
        across.fixed_s / 4
    )
    assert (ShardExchangeCost(1.0, 2.0).seconds(0), ShardExchangeCost(1.0, 2.0).seconds(3)) == (0.0, 7.0)
    machine = small_machine()
    assert WithExchange(machine, 1e-3).attention_s(100, 7) == machine.attention_s(100, 7) + 7e-3
    assert WithExchange(machine, 1e-3).decode_s(3, 40) == machine.decode_s(3, 40)
    assert ShardedModel(machine, 50).attention_s(100, 7) == machine.attention_s(50, 7)
    assert ShardedModel(machine, 50).attention_s(10, 7) == machine.attention_s(10, 7)


def recorded() -> list[dict[str, Any]]:
    """The event log of a run of two groups, as an engine writes it."""
    config = SchedulerConfig(chunking="static:64", kv_parallel=2, kv_shard_tokens=160)
    latency, exchange = small_machine(), ShardExchangeCost(1e-4, 1e-6)
    scheduler = make_scheduler(config, latency, [BlockManager(640, 16) for _ in range(2)], exchange)
    log: list[dict[str, Any]] = [
        {"event": "start", "config": asdict(config), "kv_tokens": 640, "block_tokens": 16, "exchange": list(exchange),
         "latency": describe(latency)}
    ]  # fmt: skip
    for name, prompt in (("long", 400), ("chat", 20), ("other", 90)):
        request = Request(id=name, arrival_s=0.0, prompt_tokens=prompt, max_output_tokens=5)
        scheduler.add(Span.whole(request), 0.0)
        log.append({"event": "add", "request": name, "at_s": 0.0, "arrival_s": 0.0, "prompt": prompt, "max_output": 5,
                    "ttft_s": None, "tbt_s": None, "priority": 0})  # fmt: skip
    now = 0.0
    while now < 0.4:
        free = [0, 1] if len(log) % 3 else [1]
        batch = scheduler.schedule(now, 1, free)
        now += 0.01
        if batch is None:
            continue
        log.append({"event": "schedule", "id": batch.id, "at_s": now - 0.01, "free": free})
        scheduler.complete(batch.id, [], now, 0.01)
        chunks = [(c.request, c.start, c.tokens) for part in batch.parts for c in part.prefills]
        log.append({"event": "batch", "id": batch.id, "at_s": now, "elapsed_s": 0.01, "predicted_s": batch.predicted_s,
                    "decodes": sum(part.decodes.count for part in batch.parts), "ended": [], "chunks": chunks,
                    "kv_sum": sum(part.decodes.kv_sum for part in batch.parts)})  # fmt: skip
    return log


def test_a_run_of_groups_replays_to_the_same_decisions() -> None:
    log = recorded()
    assert replay(log).differences == []
    log[0]["exchange"] = [0.5, 0.0]
    assert replay(log).differences
