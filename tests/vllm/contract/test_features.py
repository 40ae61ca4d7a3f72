"""Headway inside vLLM's real scheduler with features that change what a request may take in a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

from tests.vllm.contract.virtual_engine import VirtualEngine, storm

from headway.policy.iteration.fill import even_rows
from headway.sim.replay import read_log, replay
from headway.vllm import adapter

pytestmark = pytest.mark.long


# -- sliding windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(512,), (0, 512)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_models_with_sliding_windows_compute_as_many_tokens_as_stock(
    windows: tuple[int, ...], asynchronous: bool
) -> None:
    engines = [VirtualEngine(stock=stock, windows=windows, asynchronous=asynchronous) for stock in (True, False)]
    for engine in engines:
        engine.add("long", 12_000, 8)
        for i in range(6):
            engine.until(engine.now + 0.1)
            engine.add(f"chat{i}", 200, 16)
        engine.run()
    stock, plugged = engines
    assert plugged.tokens_computed == stock.tokens_computed
    assert max(plugged.ttft_s(f"chat{i}") for i in range(6)) < 0.5 * max(stock.ttft_s(f"chat{i}") for i in range(6))
    assert plugged.scheduler.headway_errors == 0


def test_a_sliding_window_lets_prompts_in_that_are_longer_than_the_pool() -> None:
    # 500 blocks hold 8,000 tokens; a window of 512 and a step of 1,024 need 97 of them.
    engine = VirtualEngine(windows=(512,), blocks=500, batched_tokens=1024, settings={"t_target_ms": 30})
    for i in range(3):
        engine.add(f"long{i}", 20_000, 40)
    for i in range(10):
        engine.until(engine.now + 0.2)
        engine.add(f"chat{i}", 150, 8)
    engine.run()
    assert len(engine.finished) == 13
    assert engine.preemptions == 0
    assert max(engine.ttft_s(f"chat{i}") for i in range(10)) < 0.3
    assert engine.used_blocks == 0
    assert engine.scheduler.headway_errors == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_requests_over_sliding_windows_leave_no_block(asynchronous: bool) -> None:
    storm(VirtualEngine(windows=(0, 512), blocks=900, asynchronous=asynchronous, settings={"t_target_ms": 25}), seed=5)


# -- speculative decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_speculative_decoding_goes_on_beside_chunked_prompts(asynchronous: bool) -> None:
    engine = VirtualEngine(drafts=3, asynchronous=asynchronous, settings={"t_target_ms": 40})
    for i in range(4):
        engine.add(f"chat{i}", 100, 1_000)
    engine.until(engine.now + 0.1)
    engine.add("long", 12_000, 8)
    engine.run()
    assert {engine.generated(f"chat{i}") for i in range(4)} == {1_000}
    assert engine.generated("long") == 8
    chats = [tokens for step in engine.log for name, tokens in step.items() if name.startswith("chat")]
    assert 4 in chats  # a token and three drafts
    assert set(chats) <= {1, 2, 3, 4, 100}
    beside_chats = [step["long"] for step in engine.log if "long" in step and len(step) > 1]
    assert len(beside_chats) > 20
    assert max(beside_chats[2:]) < 700  # the first two are sized by a roofline
    assert engine.used_blocks == 0
    assert engine.scheduler.headway_errors == 0


def test_speculative_rows_count_in_the_time_of_a_step() -> None:
    engine = VirtualEngine(drafts=3, settings={"t_target_ms": 40})
    for i in range(32):
        engine.add(f"chat{i}", 20, 400)
    engine.until(engine.now + 1.0)
    plan = engine.scheduler._headway_plan
    assert plan.load.decodes == 32
    assert plan.load.tokens == 4 * 32


@pytest.mark.parametrize("asynchronous", [False, True])
def test_random_requests_with_speculative_decoding_leave_no_block(asynchronous: bool) -> None:
    storm(VirtualEngine(drafts=4, blocks=700, asynchronous=asynchronous, settings={"t_target_ms": 25}), seed=6)


# -- CUDA graphs --------------------------------------------------------------------------------------------------


def sizes_beside_a_decode(engine: VirtualEngine) -> list[int]:
    """Tokens of the steps in which a long prompt is cut."""
    engine.add("chat", 100, 2_000)
    engine.until(engine.now + 0.1)
    engine.add("long", 9_000, 1)
    while "long" not in engine.finished:
        engine.step()
    return [sum(step.values()) for step in engine.log if "long" in step][:-1]


def test_the_padding_of_a_cuda_graph_is_used_for_the_prompt(tmp_path: Path) -> None:
    # Multiples of 12: sizes that chunks do not have by themselves.
    sizes = [1, 2, 4, *range(12, 513, 12)]
    steps: dict[bool, int] = {}
    for plugged_graphs in (False, True):
        settings = {"t_target_ms": 30, "log": str(tmp_path / f"log{plugged_graphs}")}
        engine = VirtualEngine(graphs=sizes, settings=settings)
        if not plugged_graphs:
            engine.scheduler._headway_graphs = []
        chunks = sizes_beside_a_decode(engine)
        steps[plugged_graphs] = len(chunks)
        padded = [tokens for tokens in chunks if tokens <= 512 and tokens not in sizes]
        assert bool(padded) != plugged_graphs
        assert replay(read_log(tmp_path / f"log{plugged_graphs}")).differences == []
        assert engine.scheduler.headway_errors == 0
    assert steps[True] <= steps[False]


def test_on_a_cpu_the_sizes_of_steps_recur() -> None:
    engine = VirtualEngine(settings={"t_target_ms": 30})
    rows = sizes_beside_a_decode(engine)
    assert len(rows) > 10
    assert all(each == even_rows(each) for each in rows)
    assert engine.scheduler.headway_errors == 0


def test_graphs_are_those_of_steps_with_prefills() -> None:
    from vllm.config import CUDAGraphMode

    def sizes(mode: CUDAGraphMode, eager: bool = False, drafts: int = 0) -> list[int]:
        compilation = SimpleNamespace(cudagraph_mode=mode, cudagraph_capture_sizes=[1, 8, 16])
        model = SimpleNamespace(enforce_eager=eager)
        config = SimpleNamespace(compilation_config=compilation, model_config=model, num_speculative_tokens=drafts)
        return adapter.graph_sizes(config)

    assert sizes(CUDAGraphMode.FULL_AND_PIECEWISE) == sizes(CUDAGraphMode.PIECEWISE) == [1, 8, 16]
    assert sizes(CUDAGraphMode.FULL_DECODE_ONLY) == sizes(CUDAGraphMode.NONE) == []
    assert sizes(CUDAGraphMode.PIECEWISE, eager=True) == sizes(CUDAGraphMode.PIECEWISE, drafts=3) == []


# -- LoRA ---------------------------------------------------------------------------------------------------------


def test_a_request_whose_adapter_has_no_slot_holds_nothing() -> None:
    engine = VirtualEngine(max_loras=1, settings={"t_target_ms": 30})
    engine.add("first", 400, 200, adapter=1)
    engine.until(engine.now + 0.2)
    engine.add("blocked", 3_000, 4, adapter=2)
    engine.step()
    driver = engine.scheduler._headway
    assert "blocked" not in driver.policy.holders
    assert driver.pool.pledged_blocks == 0
    engine.add("base", 3_000, 4)
    engine.add("same", 3_000, 4, adapter=1)
    engine.run()
    assert engine.finished["base"] < engine.finished["first"]
    assert engine.finished["same"] < engine.finished["first"]
    assert engine.first_token["blocked"] > engine.finished["first"]
    assert engine.scheduler.headway_errors == 0


def test_a_long_prompt_yields_no_time_to_blocked_adapters() -> None:
    ttft = []
    for blocked in (0, 3):
        engine = VirtualEngine(max_loras=1, settings={"t_target_ms": 40})
        engine.add("first", 100, 600, adapter=1)
        engine.until(engine.now + 0.1)
        engine.add("long", 20_000, 1)
        for i in range(blocked):
            engine.add(f"blocked{i}", 200, 1, adapter=2)
        engine.run()
        ttft.append(engine.ttft_s("long"))
    assert ttft[1] < 1.01 * ttft[0]


def test_an_adapter_keeps_its_slot_while_its_half_done_prompt_waits() -> None:
    # vLLM counts the adapters of a step. One that a withheld prompt uses must not be given away: both would run next.
    engine = VirtualEngine(max_loras=1, settings={"t_target_ms": 10})
    engine.add("long", 20_000, 4, adapter=1)
    for _ in range(8):
        engine.step()
    for i in range(8):
        engine.add(f"urgent{i}", 300, 4, extra={"slo_ttft_ms": 1})
        engine.add(f"other{i}", 20, 4, adapter=2, extra={"slo_ttft_ms": 1})
        for _ in range(5):
            engine.step()
    engine.run()
    assert len(engine.finished) == 17
    assert [step for step in engine.log if "long" not in step][:1] != []
    assert engine.scheduler.headway_errors == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("max_loras", [1, 2])
def test_random_requests_of_many_adapters_all_end(max_loras: int, asynchronous: bool) -> None:
    engine = VirtualEngine(max_loras=max_loras, blocks=700, asynchronous=asynchronous, settings={"t_target_ms": 20})
    storm(engine, seed=7, adapters=5)


def test_waiting_requests_are_put_in_order_only_where_adapters_lack_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[set[str]] = []
    barred = adapter.barred

    def keep(scheduler: Any, waiting: list[Any]) -> set[str]:
        asked.append(barred(scheduler, waiting))
        return asked[-1]

    monkeypatch.setattr(adapter, "barred", keep)
    engine = VirtualEngine(max_loras=2, settings={"t_target_ms": 30})
    for i in range(9):
        engine.add(f"r{i}", 3_000, 20, adapter=i % 3 and 1 + i % 2)
    engine.until(engine.now + 0.1)
    assert asked == []
    engine.add("third", 3_000, 4, adapter=3)
    engine.step()
    assert len(asked) == 1
    assert asked[0]
    engine.run()
    assert len(engine.finished) == 10


def test_steps_with_blocked_adapters_are_replayed(tmp_path: Path) -> None:
    engine = VirtualEngine(max_loras=1, blocks=700, settings={"t_target_ms": 20, "log": str(tmp_path / "log")})
    storm(engine, seed=8, adapters=4, requests=80)
    assert replay(read_log(tmp_path / "log")).differences == []


# -- sleep --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_an_engine_that_slept_goes_on(mode: str, asynchronous: bool) -> None:
    """What `EngineCore.sleep(1)` and `wake_up` do to a scheduler, by the mode of the pause."""
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.request import RequestStatus

    engine = VirtualEngine(asynchronous=asynchronous, settings={"t_target_ms": 30})
    scheduler = engine.scheduler
    engine.add("long", 9_000, 4)
    engine.add("chat", 100, 50)
    for _ in range(6):
        engine.step()
    if mode == "abort":
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
    engine.add("while asleep", 2_000, 4)
    # The engine's loop goes on until nothing is left to do but what waits for the end of the pause.
    engine.run()
    assert "while asleep" not in engine.first_token
    assert ("chat" in engine.finished) == (mode == "wait")
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    scheduler.reset_encoder_cache()
    assert engine.used_blocks == 0
    engine.now += 3600.0
    scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.add("after", 2_000, 4)
    engine.run()
    left = {"while asleep", "after"} | ({"long", "chat"} if mode != "abort" else set())
    assert set(engine.finished) == left
    assert engine.generated("while asleep") == 4
    assert mode == "abort" or (engine.generated("long"), engine.generated("chat")) == (4, 50)
    assert engine.used_blocks == 0
    assert scheduler.headway_errors == 0
