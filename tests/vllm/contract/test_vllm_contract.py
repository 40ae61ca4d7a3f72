"""Headway inside vLLM's real scheduler: what the seams promise. `make test-vllm` runs it in vLLM's environment."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

from tests.vllm.contract.virtual_engine import BLOCK, RATES, VirtualEngine

from headway.core.errors import ConfigError
from headway.vllm import plugin

pytestmark = pytest.mark.long


def convoy(engine: VirtualEngine, chats: int = 12) -> list[float]:
    """A 20,000-token prompt, and chats that come while it is computed: their times to the first token."""
    start = engine.now
    engine.add("long", 20_000, 8)
    for i in range(chats):
        engine.until(start + 0.2 * (i + 1))
        engine.add(f"chat{i}", 200, 16)
    engine.run()
    return [engine.ttft_s(f"chat{i}") for i in range(chats)]


def test_the_installed_version_is_one_that_is_known() -> None:
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    report = plugin.compare(vllm.__version__, plugin.digests(Scheduler))
    assert report.known_as == vllm.__version__, report.moved


@pytest.mark.parametrize("asynchronous", [False, True])
def test_short_requests_do_not_wait_for_a_long_one_and_as_much_is_computed(asynchronous: bool) -> None:
    stock = VirtualEngine(stock=True, asynchronous=asynchronous)
    engine = VirtualEngine(asynchronous=asynchronous, settings={"t_target_ms": 50})
    waits = [max(convoy(each)) for each in (stock, engine)]
    assert waits[1] < 0.1 * waits[0]
    assert engine.scheduler.headway_errors == 0
    assert engine.used_blocks == 0
    assert engine.tokens_computed == stock.tokens_computed
    assert {n: engine.generated(n) for n in engine.arrived} == {n: stock.generated(n) for n in stock.arrived}


def test_chunks_keep_steps_near_the_aim() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 40})
    engine.add("chat", 100, 4_000)
    engine.until(engine.now + 1.0)
    engine.add("long", 24_000, 4)
    engine.until(engine.now + 0.5)  # the latency model has seen its first chunks
    steps = []

    def note() -> None:
        # The aim is for gaps between tokens: it bounds the steps while the chat decodes.
        if "chat" not in engine.finished:
            steps.append(engine.now)

    engine.run(each=note)
    times = sorted(b - a for a, b in pairwise(steps))
    assert len(times) > 100
    assert times[int(0.95 * len(times))] < 0.040 * 1.3


def test_several_long_prefills_in_a_small_pool_all_finish() -> None:
    engine = VirtualEngine(blocks=700, settings={"t_target_ms": 30})
    for i in range(6):
        engine.add(f"long{i}", 5_000, 4)
    for i in range(20):
        engine.until(engine.now + 0.1)
        engine.add(f"chat{i}", 150, 8)
    engine.run()
    assert len(engine.finished) == 26
    assert engine.used_blocks == 0
    assert engine.preemptions == 0  # what half-done prefills will need is set aside
    assert engine.scheduler.headway_errors == 0


def test_a_cached_prefix_is_not_computed_again_and_counts_as_done() -> None:
    stock, engine = VirtualEngine(stock=True), VirtualEngine()
    shared = [(i * 13) % 400 for i in range(8_000)]
    for each in (stock, engine):
        each.add("first", shared + [1] * 50, 2)
        each.run()
        each.add("second", shared + [2] * 50, 2)
        each.add("other", 6_000, 2)
        each.run()
    assert engine.tokens_computed == stock.tokens_computed
    assert engine.ttft_s("second") < 0.25 * engine.ttft_s("other")


def test_a_tighter_slo_goes_first() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 30, "policy": "edf"})
    engine.add("loose", 4_000, 1, extra={"slo_ttft_ms": 60_000})
    engine.add("tight", 4_000, 1, extra={"slo_ttft_ms": 400})
    engine.run()
    assert engine.finished["tight"] < engine.finished["loose"]


@pytest.mark.parametrize("speed", [1.0, 2.5])
def test_priority_goes_before_the_policy(speed: float) -> None:
    # At the higher speed the sooner request is long and the later one short.
    rates = replace(RATES, linear_flops=RATES.linear_flops * speed, attention_flops=RATES.attention_flops * speed)
    engine = VirtualEngine(policy="priority", settings={"t_target_ms": 30}, rates=rates)
    engine.add("later", 4_000, 1, priority=5)
    engine.add("sooner", 4_500, 1, priority=0)
    engine.run()
    assert engine.finished["sooner"] < engine.finished["later"]


def test_an_exception_in_the_policy_costs_one_step_in_stock_order(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VirtualEngine(settings={"t_target_ms": 30})
    engine.add("long", 9_000, 4)
    engine.add("chat", 100, 30)
    engine.step()
    driver_type = type(engine.scheduler._headway)
    plan = driver_type.plan
    calls = 0

    def sometimes(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 0 and calls < 20:
            raise RuntimeError("a fault in the policy")
        return plan(*args)

    monkeypatch.setattr(driver_type, "plan", sometimes)
    engine.run()
    assert engine.scheduler.headway_errors == 3
    assert set(engine.finished) == {"long", "chat"}
    assert engine.used_blocks == 0


def test_after_the_last_permitted_error_the_stock_order_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, engine = VirtualEngine(stock=True), VirtualEngine(settings={"max_errors": 3})

    def fails(*_: Any) -> Any:
        raise RuntimeError("a fault in the policy")

    monkeypatch.setattr(type(engine.scheduler._headway), "plan", fails)
    assert convoy(engine) == convoy(stock)
    assert engine.scheduler.headway_errors == 3
    assert engine.log == stock.log


def test_an_unknown_scheduler_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        raise AssertionError("not the method that is known")

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    monkeypatch.delenv(plugin.TRY_ANYWAY, raising=False)
    with pytest.raises(ConfigError, match=r"does not know the scheduler of vLLM.*these methods differ: schedule\."):
        VirtualEngine()
    monkeypatch.setenv(plugin.TRY_ANYWAY, "1")
    assert VirtualEngine().scheduler.headway_errors == 0


def test_requests_that_no_policy_decides_about_start_at_once() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 30})
    engine.add("long", 12_000, 2)
    for _ in range(3):
        engine.step()
    remote = engine.add("remote", 64, 2, extra={"kv_transfer_params": {"do_remote_prefill": True}})
    assert remote.request_id not in engine.scheduler._headway
    engine.run()
    assert engine.ttft_s("remote") < 0.3
    assert engine.used_blocks == 0


def test_seeded_requests_are_not_cut_on_a_cpu_where_that_ends_the_engine() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 10})
    engine.add("seeded", 1500, 2, seed=3)
    engine.add("drawn", 1500, 2)
    engine.run()
    chunks = {name: [step[name] for step in engine.log if step.get(name, 0) > 1] for name in ("seeded", "drawn")}
    assert chunks["seeded"] == [1500]
    assert len(chunks["drawn"]) > 1


def test_chunks_of_hybrid_models_end_at_blocks() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 20})
    scheduler = engine.scheduler
    scheduler.need_mamba_block_aligned_split = True
    scheduler._headway = None  # made anew, it knows the block
    engine.add("long", 9_003, 2)
    engine.add("chat", 101, 4)
    ends: list[int] = []

    def note() -> None:
        running = [r for r in scheduler.running if r.request_id == "long" and r.is_prefill_chunk]
        ends.extend(r.num_computed_tokens for r in running)

    engine.run(each=note)
    assert len(ends) > 10
    assert not [end for end in ends if end % BLOCK]
    assert scheduler.headway_errors == 0


def test_a_request_enters_when_its_grammar_is_compiled() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 30})
    engine.add("long", 9_000, 2)
    request = engine.add("schema", 120, 3, choices=["a", "b"])
    for _ in range(5):
        engine.step()
    assert "schema" not in engine.scheduler._headway
    assert request.num_computed_tokens == 0
    request.structured_output_request.grammar = mock.Mock()
    engine.run()
    assert set(engine.finished) == {"long", "schema"}
    assert engine.finished["schema"] < engine.finished["long"]
    assert engine.scheduler.headway_errors == 0


def test_the_pool_that_the_policy_sees_is_the_pool_of_the_engine() -> None:
    engine = VirtualEngine(blocks=500)
    pool = engine.scheduler._headway.pool
    engine.add("chat", 160, 60)
    while "chat" not in engine.first_token:
        engine.step()
    assert pool.n_blocks == 499
    assert pool.free_blocks == 499 - engine.used_blocks
    assert engine.used_blocks == -(-engine.scheduler.requests["chat"].num_computed_tokens // BLOCK)
