"""The arithmetic of lone prefills against the simulator, and of KV groups against Amdahl's law."""

from __future__ import annotations

import pytest

from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, StageLink, simulate
from headway.sim.workload import TraceRequest
from headway_research.medha.arithmetic import adaptive_prefill, machine, static_prefill
from headway_research.medha.counts import gpus_for, most_tokens
from headway_research.medha.kvp import speedup
from headway_research.medha.pipelines import fits
from headway_research.medha.worked_example import BY_HAND, QUANTUM_S, finish_times


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("chunking", ["static:2048", "adaptive"])
def test_a_lone_prefill_takes_as_long_as_in_the_simulator(stages: int, chunking: str) -> None:
    m = machine("llama-3-8b", stages, "default")
    prompt = 100_000
    config = SchedulerConfig.named(
        "paper", policy="fcfs", chunking=chunking, stages=stages, t_target_s=0.02, max_num_batched_tokens=16_384
    )
    hop = m.layout.stage_link(m.device)
    row_s = m.shape.hidden * m.shape.dtype_bytes / m.layout.tp / (hop.bytes_per_s * hop.efficiency)
    spec = InstanceSpec(config=config, latency=m.latency, kv_tokens=2 * prompt, link=StageLink(hop.latency_s, row_s))
    (record,) = simulate(spec, [TraceRequest(0.0, prompt, 1)]).records
    ours = static_prefill(m, prompt, 2048) if chunking != "adaptive" else adaptive_prefill(m, prompt, 0.02)
    assert ours.ttft_s == pytest.approx(record.token_s[0], rel=0.01)


def test_sampling_equal_chunks_does_not_change_a_prefill() -> None:
    m = machine("llama-3-8b", 1, "default")
    whole = sum(m.chunk_s(past, 64) for past in range(0, 64_000, 64))
    assert static_prefill(m, 64_000, 64).ttft_s == pytest.approx(whole, rel=2e-3)


def test_kv_groups_help_longer_contexts_more_and_never_by_their_number() -> None:
    gains = [speedup("llama-3-8b", context, 4, "default") for context in (1_000_000, 4_000_000, 10_000_000)]
    assert gains == sorted(gains)
    assert 1.0 < gains[0] < gains[-1] < 4.0


def test_a_layout_fits_if_memory_holds_weights_and_kv() -> None:
    assert fits("llama-3-8b", 1, 1_000_000)
    assert not fits("llama-3-70b", 1, 10_000_000)
    assert fits("llama-3-70b", 16, 10_000_000)


def test_resources_follow_the_square_of_the_context() -> None:
    assert gpus_for(2 << 20, "paper") == pytest.approx(4 * gpus_for(1 << 20, "paper"), abs=3)
    assert gpus_for(1 << 20, "default") < gpus_for(1 << 20, "paper")
    assert most_tokens(8, "default")["compute"] > most_tokens(8, "paper")["compute"]


@pytest.mark.parametrize("policy", BY_HAND)
def test_the_worked_example_gives_the_finish_times_computed_by_hand(policy: str) -> None:
    assert finish_times(policy, "paper") == {
        name: pytest.approx(at, abs=2 * QUANTUM_S + 1e-6) for name, at in BY_HAND[policy].items()
    }
