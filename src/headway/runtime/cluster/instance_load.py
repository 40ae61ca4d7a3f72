"""The controller's estimate of each instance's work, between and from its engine's snapshots."""

from __future__ import annotations

from headway.runtime.engine.protocol import EngineStats


class InstanceLoad:
    """Requests on one instance's scheduler, the uncomputed tokens of their prompts, and the seconds that these take.

    Each snapshot has the engine's count of prefill tokens over all requests, not per request: progress is spread over
    the waiting prompts by length.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, float]] = {}
        self._here: set[str] = set()
        self._tokens, self._seconds = 0, 0.0
        self._credit = 0
        self._counted = 0

    def add(self, request: str, prompt_tokens: int, prefill_s: float) -> None:
        """Add a request whose prefill takes `prefill_s` seconds on an idle instance."""
        # Nothing waits: what was computed beyond the known prompts must not count for this one.
        if not self._waiting:
            self._credit, self._tokens, self._seconds = 0, 0, 0.0
        self._waiting[request] = (prompt_tokens, prefill_s)
        self._tokens += prompt_tokens
        self._seconds += prefill_s

    def entered(self, request: str) -> None:
        """Note a request on the scheduler, or one that will be there as soon as its KV has arrived."""
        self._here.add(request)

    def left(self, request: str) -> None:
        """Note that a request is not on the scheduler any more. Harmless when repeated."""
        self._here.discard(request)

    @property
    def requests(self) -> int:
        """Number of requests on the scheduler."""
        return len(self._here)

    def first_token(self, request: str) -> None:
        """Note that a request's prompt is computed. Harmless when repeated."""
        # Its tokens leave both the total and the credit: the progress was made on this prompt.
        self._credit = max(0, self._credit - self._pop(request))

    def remove(self, request: str) -> None:
        """Remove a request that has ended or left."""
        self._pop(request)
        self._here.discard(request)

    def _pop(self, request: str) -> int:
        """Take a request's prompt out of the waiting ones; return its tokens."""
        tokens, seconds = self._waiting.pop(request, (0, 0.0))
        self._tokens -= tokens
        self._seconds = max(0.0, self._seconds - seconds)
        return tokens

    def take(self, stats: EngineStats) -> None:
        """Take in a snapshot; the same one may be given again."""
        # Tokens of span tasks are counted by the engine too, but are no progress of the scheduler's prompts.
        counted = stats.prefill_tokens_total - stats.run_tokens_total
        self._credit += max(0, counted - self._counted)
        self._counted = max(self._counted, counted)

    @property
    def expects(self) -> bool:
        """Whether there are prompts that are not computed."""
        return bool(self._waiting)

    @property
    def queued(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, self._tokens - self._credit)

    @property
    def left_s(self) -> float:
        """Predicted seconds of prefill that are not computed yet."""
        return self._seconds * self.queued / self._tokens if self._tokens else 0.0
