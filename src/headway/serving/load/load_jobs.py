"""Conversion of a workload to requests with prompts, each made shortly before it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.serving.load.client import LoadRequest
from headway.serving.load.goodput import GoodputTargets
from headway.serving.load.prompts import PromptPool
from headway.sim.workload import TraceRequest

CACHE_BLOCK = 64
"""Tokens per block of cached prefixes in traces: a prefix that reaches the end may be short by less than this."""


def jobs(requests: Sequence[TraceRequest], pool: PromptPool, goodput: GoodputTargets) -> Iterator[LoadRequest]:
    """Yield one request to send per request of the workload, in order; every prompt is new."""
    for number, request in enumerate(requests):
        yield job_of(number, request, pool.json(request.prompt_tokens), request.arrival_s, goodput)


def job_of(
    number: int, request: TraceRequest, prompt: bytes, due_s: float, goodput: GoodputTargets, *, keep_ids: bool = False
) -> LoadRequest:
    """Return one request to send. `keep_ids`: whether the ids of its answer are asked for."""
    return LoadRequest(
        id=f"bench-{number}",
        klass=request.klass,
        due_s=due_s,
        prompt=prompt,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        slo=goodput.of(request.klass),
        answer_ids=[] if keep_ids else None,
    )
