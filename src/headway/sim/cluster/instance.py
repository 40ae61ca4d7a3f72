"""One simulated engine in a cluster, with the load of its resident requests."""

from __future__ import annotations

import msgspec

from headway.core.request import Request
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.sim.decode_cohorts import DecodeTrack
from headway.sim.replica import SimulatedEngine

FOREVER = float("inf")


class SimulatedInstance:
    """The engine of an instance, or of a group that works as one, with its prefill backlog in tokens and seconds."""

    def __init__(self, index: int, group: tuple[int, ...], replica: SimulatedEngine) -> None:
        self.index, self.group, self.replica = index, group, replica
        self.resident: dict[str, DecodeTrack] = {}
        """Unfinished requests by id (`DecodeTrack.owner`), in order of their arrival at this engine."""
        self.free_at_s = 0.0
        """Expected end of the resident prefills, virtual seconds; predicted again whenever one advances."""
        self.queued_tokens = 0
        """Tokens of resident prefills that are not complete, counted whole until the prefill ends."""
        # by id in the scheduler: tokens of its prefill, predicted seconds that are left, and tokens of its prompt
        self._prefills: dict[str, tuple[int, float, int]] = {}
        self._prefill_backlog_s = 0.0
        self._times = PrefillCache(replica.spec.latency, reference_aim_s(replica.spec.config, replica.spec.latency))

    def add(self, track: DecodeTrack, now: float, coming: int = 0) -> None:
        """Admit a request, of whose prompt another instance sends `coming` tokens' KV. Raises RequestError when it can
        never be served here."""
        while track.request.id in self.replica.scheduler:
            # Back before its last iteration here, which goes on without it, has ended: under another id, as live.
            track.request = msgspec.structs.replace(track.request, id=f"{track.request.id}'")
        self.replica.add(track, now)
        request = track.request
        self.resident[track.owner] = track
        if coming > request.cached_tokens:
            request = msgspec.structs.replace(request, cached_tokens=coming)
        tokens, seconds = self.work(request)
        self._prefills[request.id] = (tokens, seconds, request.prompt_tokens)
        self.queued_tokens += tokens
        self._prefill_backlog_s += seconds
        self.free_at_s = max(self.free_at_s, now) + seconds

    def work(self, request: Request) -> tuple[int, float]:
        """Return (tokens to prefill, predicted seconds) of a request alone on this engine."""
        tokens = request.prompt_tokens - request.cached_tokens
        # a request that only decodes here: its one token counts as a decode step
        if tokens <= 1:
            return tokens, 0.0
        return tokens, self._times.remaining_s(request.prompt_tokens, request.cached_tokens)

    def drop(self, name: str, now: float, error: str) -> DecodeTrack | None:
        """Remove a request, at once or when its batch is done. Return its track, with the times of its tokens."""
        track = self.resident.pop(name, None)
        if track is not None:
            self._remove_prefill(track.request.id, now)
            self.replica.abort(track, now, error)
        return track

    def complete(self, batch: int, now: float) -> list[DecodeTrack]:
        """Complete a batch. Return the tracks that have ended with it, in order of arrival here."""
        # read the chunks first: `complete` takes the batch out of flight
        for name, done, last in self.replica.prompt_progress(batch):
            self._remove_prefill(name, now) if last else self._shorten_prefill(name, done, now)
        ended = self.replica.complete(batch, now)
        if len(ended) > 1:
            # the replica returns them by token count; events must come in a fixed order
            ended = [track for track in self.resident.values() if track.ended_s is not None]
        for track in ended:
            del self.resident[track.owner]
        return ended

    def _shorten_prefill(self, name: str, done: int, now: float) -> None:
        """Reduce the backlog after a prefill's first `done` tokens have been computed."""
        if name not in self._prefills:
            return
        tokens, seconds, prompt = self._prefills[name]
        # never longer than before, also after a preemption that starts the prompt again
        left_s = min(seconds, self._times.remaining_s(prompt, done))
        self._prefills[name] = (tokens, left_s, prompt)
        self._prefill_backlog_s = max(0.0, self._prefill_backlog_s - seconds + left_s)
        self.free_at_s = now + self._prefill_backlog_s

    def _remove_prefill(self, name: str, now: float) -> None:
        tokens, seconds, _ = self._prefills.pop(name, (0, 0.0, 0))
        if tokens:
            self.queued_tokens -= tokens
            # reset to exactly 0 without prefills, so that rounding errors do not add up
            self._prefill_backlog_s = max(0.0, self._prefill_backlog_s - seconds) if self._prefills else 0.0
            self.free_at_s = now + self._prefill_backlog_s
