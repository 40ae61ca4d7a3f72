"""From a workload to jobs: a prompt for each request, made when it is about to be sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.bench.client import Job
from headway.bench.goodput import Goodput
from headway.bench.prompts import PromptPool
from headway.workload import TraceRequest


def jobs(
    requests: Sequence[TraceRequest], pool: PromptPool, goodput: Goodput, *, share_prefixes: bool = False
) -> Iterator[Job]:
    """One job a request, in order. With `share_prefixes`, prompts of a session begin alike for as many tokens as the
    trace says were cached; otherwise every prompt is new."""
    places: dict[str, int] = {}
    for number, request in enumerate(requests):
        if share_prefixes and request.session is not None:
            place = places.setdefault(request.session, pool.place())
            prompt = pool.json_sharing(request.prompt_tokens, request.cached_tokens, place)
        else:
            prompt = pool.json(request.prompt_tokens)
        yield Job(
            id=f"bench-{number}",
            klass=request.klass,
            due_s=request.arrival_s,
            prompt=prompt,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            slo=goodput.of(request.klass),
        )
