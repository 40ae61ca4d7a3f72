"""Conversion of a workload to requests with prompts, each made shortly before it is sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.serving.load.client import LoadRequest
from headway.serving.load.goodput import GoodputTargets
from headway.serving.load.prompts import PromptPool
from headway.sim.workload import TraceRequest

CACHE_BLOCK = 64
"""Tokens per block of cached prefixes in traces: a prefix that reaches the end may be short by less than this."""


class SessionPrompts:
    """Prompts whose shared prefixes are those that a trace recorded as cached.

    Each session has one sequence of tokens. A request whose cached prefix reaches the end of the tokens sent so far
    extends the sequence. Any other request takes its cached prefix from the sequence and continues with fresh tokens,
    which no later request shares.
    """

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool
        # By session: place of its sequence in the pool, and tokens sent of it.
        self._lines: dict[str, tuple[int, int]] = {}

    def prompt(self, session: str, tokens: int, cached: int) -> bytes:
        """Return the next prompt of a session, of `tokens` tokens with `cached` of them shared, as JSON."""
        if session not in self._lines:
            self._lines[session] = (self._pool.place(), 0)
        place, sent = self._lines[session]
        if cached + CACHE_BLOCK > sent:
            self._lines[session] = (place, max(sent, tokens))
            return self._pool.json(tokens, place)
        return self._pool.json_sharing(tokens, cached, place)


def jobs(
    requests: Sequence[TraceRequest], pool: PromptPool, goodput: GoodputTargets, *, share_prefixes: bool = False
) -> Iterator[LoadRequest]:
    """Yield one request to send per request of the workload, in order.

    share_prefixes: prompts of a session share prefixes (`SessionPrompts`); otherwise every prompt is new.
    """
    sessions = SessionPrompts(pool)
    for number, request in enumerate(requests):
        if share_prefixes and request.session is not None:
            prompt = sessions.prompt(request.session, request.prompt_tokens, request.cached_tokens)
        else:
            prompt = pool.json(request.prompt_tokens)
        yield job_of(number, request, prompt, request.arrival_s, goodput)


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
