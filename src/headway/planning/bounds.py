"""A bound in closed form: how many requests of a class must miss a TTFT limit, whatever the policy.

No machine exceeds its peak FLOP/s, so a prompt takes at least its model FLOPs over the peak of the instance, and all
instances together at least the sum over theirs. Candidates that fail even so need no simulation.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.perf.hardware.accelerators import AcceleratorSpec
from headway.perf.hardware.shapes import ModelShape
from headway.planning.candidates import DeploymentCandidate
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
