"""Decisions of the simulator's model of vLLM and of vLLM's real scheduler classes, in virtual time: step by step equal.

Random worlds of arrivals, clients that leave, small pools, priorities and thresholds. All times are sums of powers of
two, so that equal decisions give equal floats.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.config", reason="vLLM is not in this environment: make test-vllm")

from tests.vllm.contract.virtual_engine import BLOCK, VirtualEngine

import headway.vllm.scheduler as plugin
from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds, decode_load, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.policy.hosted.settings import TRUST_PROFILE, VllmSettings
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.loop import InstanceSimulation
from headway.sim.spec import InstanceSpec, RunSpec, VllmSpec
from headway.sim.vllm.engine import SimulatedVllm
from headway.sim.workload import TraceRequest
from headway.vllm import adapter

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not adapter.version().startswith(("0.31.", "0.32.", "0.33.")),
        reason="the simulator's rules are those of 0.31 on",
    ),
]

PATIENCE_S = 8.0


class BinaryLatency(LatencyModel):
    """Exact in floating point: sums and products of powers of two, with which no rounding differs."""

    def token_s(self, first: int, last: int) -> Seconds:
        return 2.0**-9 + 2.0**-14 * np.arange(first, last + 1, dtype=np.float64)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return 2.0**-27 * past * np.arange(first, last + 1, dtype=np.float64)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return 2.0**-24 * kv_sum


@dataclass(frozen=True)
class World:
    """One random deployment and workload."""

    stock: bool
    asynchronous: bool
    by_priority: bool
    threshold: int
    adaptive: bool
    blocks: int
    batched_tokens: int
    max_num_seqs: int
    caching: bool
    leave: bool
    t_target_ms: float
    policy: str
    requests: list[TraceRequest] = field(default_factory=list)
    priorities: dict[str, int] = field(default_factory=dict)
    prefill_interval: int = 1


def world(seed: int, stock: bool) -> World:
    chance = random.Random(f"world {seed}")
    blocks = chance.choice([200, 400, 700, 2000])
    longest = (blocks - 1) * BLOCK - 200
    lengths = [1, 15, 16, 17, 40, 200, 900, 3_000, 7_000, 20_000]
    requests = []
    at = 0.0
    for _ in range(chance.randrange(5, 40)):
        at += chance.randrange(0, 4096) / 2 ** chance.choice([12, 14])
        prompt = min(chance.choice(lengths), longest)
        requests.append(TraceRequest(at, prompt, chance.randrange(1, 150), klass=chance.choice(["a", "b", "c"])))
    return World(
        stock, chance.random() < 0.5, chance.random() < 0.4,
        chance.choice([0, 0, 64, 128, 500]) if stock else 0, chance.random() < 0.3,
        blocks, chance.choice([64, 256, 2048]), chance.choice([2, 8, 64]), chance.random() < 0.7, chance.random() < 0.5,
        chance.choice([4.0, 16.0, 60.0]), chance.choice(["lars", "fcfs", "edf", "srpt"]),
        requests, {"a": 0, "b": 1, "c": -1},
        chance.choice([1, 2, 5]) if stock and adapter.version().startswith("0.33.") else 1,
    )  # fmt: skip


def simulated(world: World) -> tuple[list[dict[str, int]], dict[str, tuple[float, ...]], SimulatedVllm]:
    """The steps and the token times of the simulator."""
    spec = VllmSpec(
        num_blocks=world.blocks, block_size=BLOCK, max_num_batched_tokens=world.batched_tokens,
        max_num_seqs=world.max_num_seqs, by_priority=world.by_priority, long_prefill_token_threshold=world.threshold,
        long_prefill_token_threshold_adaptive=world.adaptive, async_scheduling=world.asynchronous,
        enable_prefix_caching=world.caching, priorities=world.priorities,
        prefill_schedule_interval=world.prefill_interval,
        plugged=None if world.stock else VllmSettings.model_validate(
            {"t_target_ms": world.t_target_ms, "policy": world.policy}
        ).scheduler_config(world.max_num_seqs, world.batched_tokens, 1, 1),
    )  # fmt: skip
    latency = BinaryLatency()
    instance = InstanceSpec(
        config=SchedulerConfig(), latency=latency, kv_tokens=world.blocks * BLOCK, vllm=spec, learns=True
    )
    run = InstanceSimulation(
        instance, world.requests, RunSpec(patience_s=PATIENCE_S if world.leave else None, keep_iterations=True), None
    )
    engine = run.replicas[0]
    assert isinstance(engine, SimulatedVllm)
    steps: list[dict[str, int]] = []
    schedule = engine.scheduler.schedule

    def noted(now: float) -> Any:
        step = schedule(now)
        if step.tokens:
            steps.append(dict(step.tokens))
        return step

    engine.scheduler.schedule = noted  # type: ignore[method-assign]
    run.run_events()
    return steps, {track.request.id: tuple(track.times) for track in run.tracks}, engine


class ReplayedEngine(VirtualEngine):
    """vLLM's classes under the same events: they are applied when the engine's loop would see them."""

    def __init__(self, world: World) -> None:
        super().__init__(
            stock=world.stock, asynchronous=world.asynchronous, blocks=world.blocks,
            batched_tokens=world.batched_tokens, max_num_seqs=world.max_num_seqs, threshold=world.threshold,
            policy="priority" if world.by_priority else "fcfs", adaptive=world.adaptive, caching=world.caching,
            settings={"t_target_ms": world.t_target_ms, "policy": world.policy},
            prefill_interval=world.prefill_interval,
        )  # fmt: skip
        self.now = 0.0
        self.world = world
        self.latency = BinaryLatency()
        self.times: dict[str, tuple[float, ...]] = {}
        self.steps_taken: list[dict[str, int]] = []
        self._seconds: dict[int, float] = {}
        patience = random.Random("patience 0")
        events: list[tuple[float, int, int, str]] = []
        for number, request in enumerate(world.requests):
            events.append((request.arrival_s, 1, number, f"r{number}"))
            if world.leave:
                leaves_s = request.arrival_s + patience.expovariate(1.0 / PATIENCE_S)
                events.append((leaves_s, 0, number, f"r{number}"))
        self.events = sorted(events)

    def step(self) -> bool:
        real = self.scheduler.schedule

        def noted(*args: Any) -> Any:
            before = {name: r.num_computed_tokens for name, r in self.scheduler.requests.items()}
            output = real(*args)
            self._note(output, before)
            return output

        self.scheduler.schedule = noted
        try:
            return super().step()
        finally:
            del self.scheduler.schedule

    def play(self) -> None:
        while True:
            self._apply(self.now)
            if not self.step():
                if not self.events:
                    return
                self.now = max(self.now, self.events[0][0])

    def _apply(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self._one(*self.events.pop(0))

    def _one(self, at_s: float, kind: int, number: int, name: str) -> None:
        if kind == 0:
            self.abort(name)
            return
        source = self.world.requests[number]
        now, self.now = self.now, at_s
        # The plugin converts arrivals with its clocks, which stand at the arrival here.
        self.add(name, source.prompt_tokens, source.output_tokens, priority=self.world.priorities[source.klass])
        self.now = now

    def _note(self, output: Any, before: dict[str, int]) -> None:
        """Compute the time of a step when it is made, from the cursors before it."""
        if not output.total_num_scheduled_tokens:
            return
        self.steps_taken.append(dict(output.num_scheduled_tokens))
        rows = []
        for name, tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            past = request.num_computed_tokens - tokens
            rows.append((past, tokens, tokens == 1 and past >= request.num_prompt_tokens))
        decodes = [past for past, _, decode in rows if decode]
        load: BatchLoad = decode_load(self.latency, len(decodes), sum(decodes))
        for past, tokens, decode in rows:
            if not decode:
                load = load.with_chunk(tokens, self.latency.attention_s(past, tokens), past)
        self._seconds[id(output)] = load_s(self.latency, load)

    def _cost_s(self, output: Any) -> float:
        seconds = self._seconds.pop(id(output), 0.0)
        # What comes while the step is computed is seen before its results are.
        while self.events and self.events[0][0] < self.now + seconds:
            self._one(*self.events.pop(0))
        return seconds

    def on_token(self, name: str, count: int) -> None:
        self.times[name] = self.times.get(name, ()) + (self.now,) * count


@pytest.mark.parametrize("stock", [True, False], ids=["stock", "plugged"])
@pytest.mark.parametrize("seed", range(24))
def test_the_simulator_decides_as_vllm_does(monkeypatch: pytest.MonkeyPatch, seed: int, stock: bool) -> None:
    monkeypatch.setattr(
        plugin, "latency_model", lambda *_: (CorrectedLatency(BinaryLatency(), TRUST_PROFILE), "a test's latencies")
    )
    given = world(seed, stock)
    if adapter.version().startswith("0.33.") and given.by_priority:
        pytest.skip("where a request preempts itself by priority, 0.33 goes on to the next, and the simulator does not")
    engine = ReplayedEngine(given)
    engine.play()
    steps, times, replica = simulated(given)
    assert steps == engine.steps_taken
    assert [list(step) for step in steps] == [list(step) for step in engine.steps_taken]
    assert {name: at for name, at in times.items() if at} == engine.times
    assert replica.use(1e9).preemptions == engine.preemptions
    assert replica.scheduler.pool.used_blocks == engine.used_blocks == 0


def test_the_worlds_preempt() -> None:
    preempting = [seed for seed in range(24) if simulated(world(seed, stock=True))[2].use(1e9).preemptions]
    assert len(preempting) >= 5
