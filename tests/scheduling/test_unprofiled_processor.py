"""A document beside chats on a processor that nobody has profiled: the guess learns from the chunks that it chose, so
it must choose ones that tell, and it must not take small chunks for cheap ones."""

from __future__ import annotations

import random

import pytest
from tests.helpers.latency_models import table
from tests.scheduling.policy_alone import CountedPool

from headway.core.request import Request
from headway.perf.hardware import ModelShape
from headway.perf.latency.base import LatencyModel, decode_load, load_s
from headway.perf.latency.corrected import CorrectedLatency
from headway.perf.latency.table import MachineRates, roofline
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.vllm.latency import CPU_ATTENTION_ROWS

SHAPE = ModelShape(layers=8, hidden=512, q_heads=8, kv_heads=2, head_dim=64, mlp=1536, vocab=4096, dtype_bytes=4)
GUESS = MachineRates(
    linear_flops=1.2e11,
    attention_flops=5.4e10,
    bandwidth=1.2e10,
    fixed_s=5e-3,
    attention_rows=CPU_ATTENTION_ROWS,
    name="this processor",
)
DOCUMENT, CHAT = 20_000, 200


def kernel(slowness: float, waits_s: float = 0.0) -> LatencyModel:
    """The machine as `headway profile --vllm` measured it (vLLM 0.32, float32, one core), so many times slower: 8 to 96
    tokens over the same history take equally long. `waits_s`: what each step waits for its threads where others use the
    cores."""
    chunks = ((8, 4e-6), (96, 4.5e-6), (256, 8e-6), (512, 1.6e-5), (1024, 3e-5), (2048, 5.8e-5))
    return table(
        [(rows, waits_s + slowness * (0.012 + 1.2e-4 * rows)) for rows in (0, 1, 64, 1024, 8192)],
        [(0, 0.0, 0.0), *((c, slowness * p * c / 2, slowness * p) for c, p in chunks)],
        (0.0, 1e-3 * slowness, 2e-7 * slowness),
    )


@pytest.mark.parametrize("slowness", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("waits_s", [0.0, 0.05, 0.4, 2.0])
@pytest.mark.parametrize("decodes", [1, 3])
@pytest.mark.parametrize("spread", [0.0, 0.4])
def test_a_document_takes_less_than_twice_its_time_alone_beside_decodes(
    slowness: float, waits_s: float, decodes: int, spread: float
) -> None:
    """spread: of the logarithm of an iteration's time, on a machine that others use."""
    rng = random.Random(0)
    true, pool = kernel(slowness, waits_s), CountedPool(10_000, 16)
    policy = IterationPolicy(SchedulerConfig(), CorrectedLatency(roofline(SHAPE, GUESS), 0.3), pool)
    now, running = 0.0, 0

    def step() -> int:
        """One iteration; returns how far the document is."""
        nonlocal now, running
        decision = policy.pick(decode_load(policy.latency, running, running * 300), now)
        load, done = decode_load(true, running, running * 300), 0
        for name, tokens in decision.quotas.items():
            past = policy.holders[name].scheduled
            load = load.with_chunk(tokens, true.attention_s(past, tokens), past)
            policy.moved(name, past + tokens)
            if name == "document":
                done = past + tokens
            elif past + tokens == CHAT:
                policy.decoding(name)
                running += 1
        policy.began()
        seconds = load_s(true, load) * rng.lognormvariate(0.0, spread)
        policy.observed(decision.load, seconds)
        now += seconds
        return done

    for number in range(decodes):
        policy.enter(Request(id=f"chat {number}", arrival_s=now, prompt_tokens=CHAT, max_output_tokens=10_000))
        while running <= number:
            step()
    policy.enter(Request(id="document", arrival_s=now, prompt_tokens=DOCUMENT, max_output_tokens=1))
    began_s, done = now, 0
    while done < DOCUMENT - 1:
        done = max(done, step())
    alone_s = sum(true.rows_s(2048) + true.attention_s(past, 2048) for past in range(0, DOCUMENT, 2048))
    assert now - began_s < 2 * alone_s
