"""Evaluation of one streamed answer, event by event: times and number of tokens, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.sse import SseEvent
from headway.sim.metrics import RequestRecord

if TYPE_CHECKING:
    from headway.serving.load.client import LoadRequest

# Finish reasons that count as success.
GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "content_filter"})


class StreamedAnswer:
    """Collector of one answer. A chunk's token count is the growth of its usage, else the number of its ids, else one.

    Tokens that only the final usage counts (a server may hold text back) get the time of the last chunk.
    """

    def __init__(self, on_first_token: Callable[[float], None] | None = None) -> None:
        self._on_first_token = on_first_token
        self._token_s: list[float] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._last_chunk_s: float | None = None
        self._usage: dict[str, Any] = {}
        self._finish_reason: str | None = None
        self._done = False
        self._error: str | None = None

    def take(self, event: SseEvent, now: float) -> None:
        """Add one event that arrived at `now`, in seconds on the run's clock."""
        if event.data.strip() == b"[DONE]":
            self._done = True
            return
        try:
            body = msgspec.json.decode(event.data)
        except msgspec.DecodeError:
            self._error = self._error or f"bad chunk: {event.data[:100]!r}"
            return
        if not isinstance(body, dict):
            self._error = self._error or f"bad chunk: {event.data[:100]!r}"
        elif event.name == "error" or body.get("error"):
            inner = body.get("error") or body
            message = inner.get("message", inner) if isinstance(inner, dict) else inner
            self._error = self._error or f"error event: {str(message)[:300]}"
        else:
            self._chunk(body, now)

    def _chunk(self, body: dict[str, Any], now: float) -> None:
        usage = body.get("usage") or {}
        self._usage = usage or self._usage
        choices = body.get("choices") or []
        # A last chunk with usage only.
        if not choices:
            return
        choice = choices[0]
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids")
        self._ids += ids if isinstance(ids, list) else []
        reason = choice.get("finish_reason")
        if "completion_tokens" in usage:
            # Usage is cumulative: the growth since the last chunk.
            count = max(0, int(usage["completion_tokens"]) - len(self._token_s))
        elif isinstance(ids, list):
            count = len(ids)
        else:
            # A completions chunk with empty text is a token in parts; a chat chunk without content has the role only.
            count = 1 if text or (reason is None and "text" in choice) else 0
        self._arrived(count, now)
        self._last_chunk_s = now
        self._texts.append(text)
        self._finish_reason = reason or self._finish_reason

    def _arrived(self, count: int, now: float) -> None:
        if count and not self._token_s and self._on_first_token is not None:
            self._on_first_token(now)
        self._token_s.extend([now] * count)

    def verdict(self) -> str | None:
        """Return what was wrong with the answer, or None; called when the stream has ended."""
        if self._error is not None:
            return self._error
        if self._finish_reason is None and not self._done:
            return "stream ended early: neither a finish reason nor [DONE]"
        if self._finish_reason is not None and self._finish_reason not in GOOD_ENDS:
            return f"finished by {self._finish_reason}: after {len(self._token_s)} tokens"
        if not self._token_s and not self._usage.get("completion_tokens"):
            return "no output token: the answer is empty"
        return None

    def record(self, job: LoadRequest, *, sent_s: float, finish_s: float, error: str | None) -> RequestRecord:
        """Make the record of the answer to `job`. Times in seconds on the run's clock."""
        counted = int(self._usage.get("completion_tokens") or 0)
        if self._last_chunk_s is not None and counted > len(self._token_s):
            self._arrived(counted - len(self._token_s), self._last_chunk_s)
        if job.answer_ids is not None:
            job.answer_ids.extend(self._ids)
        details = self._usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            id=job.id,
            klass=job.klass,
            arrival_s=job.due_s,
            sent_s=sent_s,
            prompt_tokens=int(self._usage.get("prompt_tokens") or job.prompt_tokens),
            output_tokens=len(self._token_s),
            token_s=tuple(self._token_s),
            finish_s=finish_s,
            slo=job.slo,
            finish_reason=self._finish_reason,
            error=error,
            text="".join(self._texts) if job.keep_text else None,
            cached_tokens=int(details.get("cached_tokens") or 0),
        )
