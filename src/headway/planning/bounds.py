"""Bounds in closed form of what no simulation need show: late prefills, and decodes that the KV cache is too small for.

No machine exceeds its peak FLOP/s, so a prompt takes at least its model FLOPs over the peak of the instance, and all
instances together at least the sum over theirs. A decode holds its request's KV, and no iteration is shorter than that
of a single row.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.perf.hardware.accelerators import AcceleratorSpec
from headway.perf.hardware.shapes import ModelShape
from headway.planning.candidates import DeploymentCandidate
from headway.planning.demand_watch import drained_by_s
from headway.planning.question import PlanQuestion
from headway.sim.build import instance_of
from headway.sim.cluster.build import cluster_of
from headway.sim.memory import InfeasibleError
from headway.sim.workload import TraceRequest


def prefill_flops(shape: ModelShape, request: TraceRequest) -> float:
    """Return the model FLOPs of a prompt's uncached part (the LM head is left out)."""
    cached = max(0, min(request.cached_tokens, request.prompt_tokens - 1))
    new = max(1, request.prompt_tokens) - cached
    return shape.linear_flops(new) + shape.attention_flops(new, cached)


def least_late(
    candidate: DeploymentCandidate,
    device: AcceleratorSpec,
    shape: ModelShape,
    requests: Sequence[TraceRequest],
    limit_s: float,
) -> int:
    """Return a lower bound of the number of these requests whose first token is later than `limit_s`.

    Two bounds, the larger counts: prompts that one instance cannot compute in time even alone; and prompts that all
    prefilling instances together cannot compute by the last deadline, the smallest counted as done first.
    """
    each = device.flops * candidate.tp * candidate.stages * candidate.kvp
    work = sorted(prefill_flops(shape, request) for request in requests)
    alone = sum(flops / each > limit_s for flops in work)
    first_s, last_s = min(r.arrival_s for r in requests), max(r.arrival_s for r in requests)
    budget = each * candidate.replicas * (last_s - first_s + limit_s)
    done = 0
    for flops in work:
        budget -= flops
        if budget < 0:
            break
        done += 1
    return max(alone, len(work) - done)


def falls_behind(candidate: DeploymentCandidate, question: PlanQuestion, requests: list[TraceRequest]) -> bool:
    """Return whether the KV caches are too small for all answers to end by `drained_by_s`, in whatever order.

    Each token of an answer after the first occupies its request's KV, in tokens, for at least one iteration through all
    stages; the product, summed over all answers, is at most the caches' size × the time there is."""
    scenario = candidate.scenario(question)
    try:
        if candidate.decoders:
            spec = cluster_of(scenario, requests)
            kv_tokens = sum(instance.capacity for instance in spec.instances if instance.role == "decode")
            latency = spec.engine([spec.instances[-1]]).latency
        else:
            instance = instance_of(scenario, requests)
            kv_tokens = candidate.replicas * instance.kv_tokens * candidate.kvp
            latency = instance.latency
    except InfeasibleError:
        return False
    token_s = candidate.stages * latency.least_rows_s(1)
    steps = [max(0, request.output_tokens - 1) for request in requests]
    held = sum(
        # a cached prefix may be shared; the cache grows by a token a step
        count * (request.prompt_tokens - request.cached_tokens) + count * (count - 1) // 2
        for count, request in zip(steps, requests, strict=True)
    )
    return held * token_s > kv_tokens * (
        drained_by_s(question.demand_list(), requests) - min(request.arrival_s for request in requests)
    )
