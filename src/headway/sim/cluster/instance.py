"""The real scheduler of an instance, or of a group that works as one: what a cluster needs to know of it."""

from __future__ import annotations

from headway.core.request import Request
from headway.perf.latency.prefill_cache import PrefillCache
from headway.sim.decode_cohorts import DecodeTrack
from headway.sim.replica import SimulatedEngine

FOREVER = float("inf")


class SimulatedInstance:
    """`stays`: unfinished requests. free_at_s: when the prefills in it are expected to be done, anchored anew whenever
    one advances; queued: the tokens of those that are not complete."""

    def __init__(self, index: int, group: tuple[int, ...], replica: SimulatedEngine) -> None:
        self.index, self.group, self.replica = index, group, replica
        self.stays: dict[str, DecodeTrack] = {}
        self.free_at_s = 0.0
        self._prefills: dict[str, tuple[int, float]] = {}
        self.queued = 0
        self._waiting_s = 0.0
        self._times = PrefillCache(replica.spec.latency, replica.spec.config.t_target_s)

    def add(self, track: DecodeTrack, now: float) -> None:
        """Raises RequestError when it can never be served there."""
        self.replica.add(track, now)
        name, request = track.request.id, track.request
        self.stays[name] = track
        tokens, seconds = self.work(request)
        self._prefills[name] = (tokens, seconds)
        self.queued += tokens
        self._waiting_s += seconds
        self.free_at_s = max(self.free_at_s, now) + seconds

    def work(self, request: Request) -> tuple[int, float]:
        """Tokens to prefill, and how long they take here, alone."""
        tokens = request.prompt_tokens - request.cached_tokens
        if tokens <= 1:
            return tokens, 0.0
        return tokens, self._times.remaining_s(request.prompt_tokens, request.cached_tokens)

    def drop(self, name: str, now: float, error: str) -> DecodeTrack | None:
        """The request leaves, at once or when its batch is done; its track, with the tokens that it got."""
        track = self.stays.pop(name, None)
        if track is not None:
            self._prefilled(name, now)
            self.replica.abort(track, now, error)
        return track

    def complete(self, batch: int, now: float) -> list[DecodeTrack]:
        """A batch is done; the tracks that have ended with it."""
        for name, done, last in self.replica.prompts(batch):
            self._prefilled(name, now) if last else self._advanced(name, done, now)
        ended = self.replica.complete(batch, now)
        if len(ended) > 1:  # in the order in which they came
            ended = [track for track in self.stays.values() if track.ended_s is not None]
        for track in ended:
            del self.stays[track.request.id]
        return ended

    def _advanced(self, name: str, done: int, now: float) -> None:
        """A prompt's first `done` tokens are computed."""
        if name not in self._prefills:
            return
        tokens, seconds = self._prefills[name]
        left_s = min(seconds, self._times.remaining_s(self.stays[name].request.prompt_tokens, done))
        self._prefills[name] = (tokens, left_s)
        self._waiting_s = max(0.0, self._waiting_s - seconds + left_s)
        self.free_at_s = now + self._waiting_s

    def _prefilled(self, name: str, now: float) -> None:
        tokens, seconds = self._prefills.pop(name, (0, 0.0))
        if tokens:
            self.queued -= tokens
            self._waiting_s = max(0.0, self._waiting_s - seconds) if self._prefills else 0.0
            self.free_at_s = now + self._waiting_s
