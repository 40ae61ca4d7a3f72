"""Instances of role prefill: each prompt goes to the one that is expected to have it first."""

from __future__ import annotations

from collections.abc import Mapping

from headway.runtime.http_cluster.answer_stream import AnswerStream
from headway.runtime.http_cluster.http_instance import HttpInstance


class PrefillServers:
    """Those of a cluster's instances. Where none is ready, requests are computed whole where they decode."""

    def __init__(self, instances: Mapping[int, HttpInstance]) -> None:
        self._servers = [each for each in instances.values() if not each.decodes]

    def choose(self, request: str, prompt_tokens: int, now: float) -> HttpInstance | None:
        """Return the instance that is to compute a prompt, which counts as queued there; None: none is ready."""
        ready = [each for each in self._servers if each.state == "ready"]
        if not ready:
            return None
        chosen = min(ready, key=lambda each: (each.queue.left_s(now), each.queue.requests, each.number))
        chosen.queue.add(request, prompt_tokens, now)
        return chosen

    def done(self, stream: AnswerStream, request: str, now: float) -> None:
        """Record that the prompt of a stream is computed."""
        prefill, stream.prefill = stream.prefill, None
        if prefill is not None:
            prefill.note_alive()
            prefill.queue.first_token(request, now)
            prefill.queue.remove(request, now)
