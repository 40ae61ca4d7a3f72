"""Storms of aborts, a pool that runs dry, many streams: vLLM's own count of blocks returns to zero, and all ends."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

from tests.vllm.contract.virtual_engine import VirtualEngine

pytestmark = pytest.mark.long


def assert_nothing_is_left(engine: VirtualEngine) -> None:
    scheduler = engine.scheduler
    scheduler.schedule()  # the policy has the last events now
    driver = scheduler._headway
    assert engine.used_blocks == 0
    assert not scheduler.requests
    assert scheduler.headway_errors == 0
    assert driver.pool.pledged_blocks == 0
    assert not driver.prefills
    assert not driver.decoding
    assert not driver.policy.holders
    assert not len(driver.policy.queue)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_thousand_aborts_at_random_moments_leave_nothing(policy: str, asynchronous: bool) -> None:
    chance = random.Random(15)
    engine = VirtualEngine(
        blocks=900, max_num_seqs=48, policy=policy, asynchronous=asynchronous, settings={"t_target_ms": 25}
    )
    shared = [(i * 13) % 400 for i in range(2_000)]
    alive: list[str] = []
    aborted = added = 0
    while aborted < 1_000:
        if len(alive) < 120:
            tokens = chance.choice([1, 30, 200, 2_500, 6_000])
            prompt = [*shared[: chance.randrange(1, 2_000)], added % 500] if added % 4 == 0 else tokens
            engine.add(f"r{added}", prompt, chance.randrange(1, 40), priority=chance.choice([0, 0, 1]))
            alive.append(f"r{added}")
            added += 1
        # Bursts, also of requests that have ended, and between a step's decision and its results.
        for _ in range(min(chance.choice([0, 0, 0, 1, 3, 30]), len(alive))):
            engine.abort(alive.pop(chance.randrange(len(alive))))
            aborted += 1
        for _ in range(chance.randrange(12)):
            engine.step()
    engine.run()
    assert len(engine.finished) > 50
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_id_may_be_used_again_before_the_next_step(asynchronous: bool) -> None:
    engine = VirtualEngine(asynchronous=asynchronous, settings={"t_target_ms": 25})
    engine.add("chat", 3_000, 20)
    for _ in range(3):
        engine.step()
    engine.abort("chat")
    engine.add("chat", 200, 5)
    engine.run()
    assert "chat" in engine.finished
    engine.add("chat", 200, 5, extra={"slo_ttft_ms": 9_000})
    engine.run()
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decodes_that_exhaust_the_pool_all_finish(asynchronous: bool) -> None:
    engine = VirtualEngine(blocks=260, max_num_seqs=64, asynchronous=asynchronous, settings={"t_target_ms": 25})
    for i in range(64):
        engine.add(f"r{i}", 40 + i, 200)  # 64 × 15 blocks at their ends
    engine.run()
    assert len(engine.finished) == 64
    assert engine.preemptions > 0
    assert all(engine.generated(f"r{i}") == 200 for i in range(64))
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_256_streams_finish_while_others_are_aborted(asynchronous: bool) -> None:
    chance = random.Random(256)
    engine = VirtualEngine(blocks=2_500, max_num_seqs=256, batched_tokens=4096, asynchronous=asynchronous)
    for i in range(256):
        engine.add(f"r{i}", chance.randrange(20, 900), chance.randrange(30, 80))
    leaving = chance.sample(range(256), 64)

    def leave() -> None:
        if leaving and chance.random() < 0.5:
            engine.abort(f"r{leaving.pop()}")

    engine.run(each=leave)
    assert len(engine.finished) >= 192
    assert_nothing_is_left(engine)
