"""A prompt is as long as what is left of it to compute: one with a cached prefix does not wait as a document does."""

from __future__ import annotations

from headway.perf.hardware import ParallelLayout, accelerator, model
from headway.perf.latency.fitted import fitted
from headway.policy.iteration.config import SchedulerConfig
from headway.sim import InstanceSpec, simulate
from headway.sim.metrics import ttft_s
from headway.sim.workload import TraceRequest


def _wait_s(prompt: int, cached: int) -> float:
    """Return the time to the first token of a prompt that comes while a document is being prefilled."""
    latency = fitted(accelerator("a100-80gb"), model("llama-3-8b"), ParallelLayout(tp=1, stages=1), 0)
    spec = InstanceSpec(config=SchedulerConfig.named("default"), latency=latency, kv_tokens=440_000)
    requests = [TraceRequest(0.0, 100_000, 8), TraceRequest(1.0, prompt, 8, cached_tokens=cached)]
    return ttft_s(simulate(spec, requests).records[1])


def test_new_tokens_behind_a_long_cached_prefix_do_not_wait_for_a_document() -> None:
    """100 tokens behind 59,900 cached ones waited 0.9 s when the cached part made the prompt a long one."""
    assert _wait_s(60_000, 59_900) < 0.2
    assert _wait_s(60_000, 0) > 2.0
