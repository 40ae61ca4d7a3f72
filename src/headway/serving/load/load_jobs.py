"""From a workload to jobs: a prompt for each request, made when it is about to be sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway.serving.load.client import LoadRequest
from headway.serving.load.goodput import GoodputTargets
from headway.serving.load.prompts import PromptPool
from headway.sim.workload import TraceRequest

CACHE_BLOCK = 64
"""Traces count cached prefixes in blocks of this size, so that what extends a prompt may fall short of it."""


class SessionPrompts:
    """Prompts that share what their trace says was cached.

    Each session has one line of tokens. A request whose cached part reaches the end of what was sent of it extends the
    line; any other one shares its cached part with the line and goes on with fresh tokens, which nobody shares later.
    """

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool
        self._lines: dict[str, tuple[int, int]] = {}

    def prompt(self, session: str, tokens: int, cached: int) -> bytes:
        """The next prompt of this session, as JSON."""
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
    """One job a request, in order. With `share_prefixes`, prompts of a session begin alike as `SessionPrompts` says;
    else
    every prompt is new."""
    sessions = SessionPrompts(pool)
    for number, request in enumerate(requests):
        if share_prefixes and request.session is not None:
            prompt = sessions.prompt(request.session, request.prompt_tokens, request.cached_tokens)
        else:
            prompt = pool.json(request.prompt_tokens)
        yield LoadRequest(
            id=f"bench-{number}",
            klass=request.klass,
            due_s=request.arrival_s,
            prompt=prompt,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            slo=goodput.of(request.klass),
        )
