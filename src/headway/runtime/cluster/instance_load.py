"""The controller's estimate of each instance's work, between and from its engine's snapshots."""

from __future__ import annotations

from headway.runtime.engine.protocol import EngineStats


class InstanceLoad:
    """One instance: requests that it has, what of their prompts is left, and when that will be done.

    The engine's count of prefill tokens, in each snapshot, says how far the waiting prompts have come together; which
    of them is not said, so that progress is spread over them by length.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, float]] = {}
        self._here: set[str] = set()
        self._tokens, self._seconds = 0, 0.0
        self._credit = 0
        self._counted = 0

    def add(self, request: str, prompt_tokens: int, prefill_s: float) -> None:
        """A request is placed there; its prefill alone takes `prefill_s`."""
        if not self._waiting:
            self._credit, self._tokens, self._seconds = 0, 0, 0.0
        self._waiting[request] = (prompt_tokens, prefill_s)
        self._tokens += prompt_tokens
        self._seconds += prefill_s

    def entered(self, request: str) -> None:
        """It is in the scheduler, or will be as soon as its KV is there."""
        self._here.add(request)

    def left(self, request: str) -> None:
        """It is not any more. Harmless when repeated."""
        self._here.discard(request)

    @property
    def requests(self) -> int:
        """In the scheduler."""
        return len(self._here)

    def first_token(self, request: str) -> None:
        """Its prompt is computed. Harmless when repeated."""
        self._credit = max(0, self._credit - self._pop(request))

    def remove(self, request: str) -> None:
        """It has ended, or left."""
        self._pop(request)
        self._here.discard(request)

    def _pop(self, request: str) -> int:
        """Its prompt's tokens, which do not wait any more."""
        tokens, seconds = self._waiting.pop(request, (0, 0.0))
        self._tokens -= tokens
        self._seconds = max(0.0, self._seconds - seconds)
        return tokens

    def take(self, stats: EngineStats) -> None:
        """A snapshot; the same one may be given again."""
        counted = stats.prefill_tokens_total - stats.run_tokens_total
        self._credit += max(0, counted - self._counted)
        self._counted = max(self._counted, counted)

    @property
    def expects(self) -> bool:
        """Whether prompts are there that are not computed."""
        return bool(self._waiting)

    @property
    def queued(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(0, self._tokens - self._credit)

    @property
    def left_s(self) -> float:
        """Predicted seconds of prefill that are not computed yet."""
        return self._seconds * self.queued / self._tokens if self._tokens else 0.0
