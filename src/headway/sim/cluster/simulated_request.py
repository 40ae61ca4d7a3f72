"""One request of a cluster simulation: its source, its track in a scheduler, and the times of its tokens."""

from __future__ import annotations

import msgspec

from headway.core.request import Request
from headway.core.span import Phase
from headway.perf.latency.serving_overhead import NO_OVERHEAD, ServingOverhead
from headway.sim.decode_cohorts import DecodeTrack
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets
from headway.sim.records import later, record_of
from headway.sim.workload import TraceRequest


class SimRequest:
    """A request across the spans and the schedulers that serve it."""

    __slots__ = ("cached_tokens", "ended_s", "error", "rejected", "request", "scheduled_s", "source", "times", "track")

    def __init__(self, request: Request, source: TraceRequest) -> None:
        self.request, self.source = request, source
        self.track: DecodeTrack | None = None
        """Its track in the scheduler where it is resident, if any."""
        self.times: list[float] = []
        """Times of output tokens, virtual seconds, without those still in `track`."""
        self.scheduled_s: float | None = None
        self.ended_s: float | None = None
        self.error: str | None = None
        self.rejected = False
        self.cached_tokens = 0
        """Tokens of the prompt that were cached where it was first scheduled."""

    @property
    def missing_tokens(self) -> int:
        """Output tokens still to come, as of the request's last exit from a scheduler."""
        return max(1, self.source.output_tokens) - len(self.times)

    @property
    def kv_tokens(self) -> int:
        """Tokens that have KV once the prompt is computed: all but the newest."""
        return self.request.prompt_tokens + max(0, len(self.times) - 1)

    def track_for(self, phase: Phase) -> DecodeTrack:
        """Return a new track with the request as a scheduler sees it in a phase.

        Where it only decodes, all KV but that of the last token is cached: its first iteration is a chunk of one token,
        a decode step in all but name.
        """
        request, left = self.request, self.missing_tokens
        # a prefill-only request ends with its first token; the decode instance serves the rest
        if phase == "prefill":
            request, left = msgspec.structs.replace(request, max_output_tokens=1), 1
        elif phase == "decode" or self.times:
            # tokens that were generated elsewhere are part of the prompt here
            known = request.prompt_tokens + len(self.times)
            request = msgspec.structs.replace(
                request,
                prompt_tokens=known,
                # the KV has been transferred; otherwise it is computed again from the start
                cached_tokens=known - 1 if phase == "decode" else 0,
                max_output_tokens=max(1, request.max_output_tokens - len(self.times)),
            )
        source = TraceRequest(request.arrival_s, request.prompt_tokens, left, self.source.klass, text=self.source.text)
        return DecodeTrack(request, source)

    def take_tokens(self, track: DecodeTrack) -> None:
        """Copy the token times of a track that has left its scheduler."""
        track.settle()
        self.times += track.times
        if self.scheduled_s is None:
            self.scheduled_s, self.cached_tokens = track.scheduled_s, track.cached_tokens
        self.track = None

    def record(self, targets: SloTargets = NO_TARGETS, serving: ServingOverhead = NO_OVERHEAD) -> RequestRecord:
        """Return the record of the request, finished or not. serving: what its client waits longer for all of it."""
        if self.track is not None:
            self.take_tokens(self.track)
        return later(record_of(self, targets), serving)
