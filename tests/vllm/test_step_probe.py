"""What `headway profile --vllm` measures beside the steps themselves, on a made-up engine in virtual time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headway.perf.hardware import ModelShape
from headway.perf.latency.table import MachineRates, TableLatency, roofline
from headway.vllm import step_profile

LATENCY = roofline(
    ModelShape(layers=2, hidden=64, q_heads=4, kv_heads=2, head_dim=16, mlp=128, vocab=512),
    MachineRates(linear_flops=1e9, attention_flops=1e9, bandwidth=1e9, name="x"),
)
BETWEEN_S, WOKEN_S = 0.0007, 0.02


class FakeEngine:
    """Computes requests first come, first served; slower after a pause, with time of its own between steps."""

    def __init__(self) -> None:
        self.now = 0.0
        self._idle = True
        self.requests: dict[str, Any] = {}
        self.max_num_scheduled_tokens = 512
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=self))
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(get_vocab_size=lambda: 100, max_model_len=2048),
            cache_config=SimpleNamespace(num_gpu_blocks=1000, block_size=16),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
        )

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._idle = True

    def add_request(self, name: str, prompt: dict[str, list[int]], outputs: int) -> None:
        count = len(prompt["prompt_token_ids"])
        self.requests[name] = SimpleNamespace(left=count, wanted=outputs, num_output_tokens=0, num_tokens=count)

    def abort_request(self, names: list[str], internal: bool) -> None:
        for name in names:
            del self.requests[name]

    def has_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> list[tuple[str, int]]:
        room, taken = self.max_num_scheduled_tokens, []
        for name, request in self.requests.items():
            if room:
                taken.append((name, min(max(request.left, 1), room)))
                room -= taken[-1][1]
        return taken

    def update_from_output(self, taken: list[tuple[str, int]]) -> None:
        for name, tokens in taken:
            request = self.requests[name]
            request.left = max(0, request.left - tokens)
            if request.left == 0:
                request.num_output_tokens += 1
                if request.num_output_tokens == request.wanted:
                    del self.requests[name]

    def step(self) -> None:
        taken = self.schedule()
        rows = sum(tokens for _, tokens in taken)
        self.now += LATENCY.rows_s(rows) + LATENCY.attention_s(0, rows) + WOKEN_S * self._idle
        self._idle = False
        self.update_from_output(taken)
        self.now += BETWEEN_S


def test_time_after_a_pause_and_between_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(step_profile, "time", engine)
    probe = step_profile.StepProbe(engine, lambda outputs: outputs, 1.0)
    probe.measure_serving()
    overhead = probe.overhead(TableLatency(LATENCY.source))
    assert overhead.idle_s == pytest.approx(WOKEN_S)
    assert overhead.iteration_s == pytest.approx(BETWEEN_S)
    assert overhead.request_s == 0.0
    assert not engine.requests
