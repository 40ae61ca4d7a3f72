"""State of a cluster simulation: its inputs (`ClusterSpec`), its instances and requests, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from headway.core.errors import ConfigError
from headway.core.request import Phase, Request
from headway.perf.hardware import ModelShape
from headway.perf.latency.base import PrefillCache
from headway.perf.latency.groups import GroupLatency
from headway.perf.latency.table import NO_OVERHEAD, ServingOverhead
from headway.perf.utilisation import UtilisationBase
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.placement.contract import ALL_CAPABILITIES, Capability, ClusterInstance, ClusterLinks
from headway.policy.placement.registry import PolicyContext
from headway.sim.engine import DecodeTrack, SimulatedEngine
from headway.sim.metrics import NO_TARGETS, RequestRecord, SloTargets
from headway.sim.result import SimResult, later, record_of
from headway.sim.spec import InstanceSpec
from headway.sim.vllm.engine import SimulatedVllm
from headway.sim.workload import TraceRequest

FOREVER = float("inf")


class SimulatedInstance:
    """The engine of an instance, or of a group that works as one, with its prefill backlog in tokens and seconds."""

    def __init__(self, index: int, group: tuple[int, ...], replica: SimulatedEngine | SimulatedVllm) -> None:
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
        while track.request.id in self.replica:
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
        return later(record_of(self, targets), serving, self.source.prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """The cluster at the start of a simulation: as a scenario describes it, or as a live one was measured."""

    instances: tuple[ClusterInstance, ...]
    """In order of id."""
    engine: Callable[[Sequence[ClusterInstance]], InstanceSpec]
    """Returns the specification of the engine on an instance, or on a group that works as one."""
    spans: GroupLatency
    """Predicts the time of a span; noise comes on top. Policies may be given another model."""
    shape: ModelShape
    """The model that all instances serve."""
    serving: ServingOverhead = field(default_factory=ServingOverhead)
    """What a server adds to requests and spans."""
    links: ClusterLinks
    """Network links inside a node and between nodes."""
    backends: int = 16
    """KV transfers that an instance receives at the same time."""
    sends_layers: bool = True
    """Whether KV slices that are `overlapped` have sent all layers but the last while they were computed."""
    rows: int = 0
    """Most rows of a span that an instance computes at once (0: all): where it can be paused, see
    `perf.latency.groups`."""
    handshake: str = "handshake"
    """Order in which transfers are admitted at a receiver."""
    utilisation_base: UtilisationBase | None = None
    """FLOPs and bytes of one instance, the mean over all; None: utilisation is not reported."""
    balance: bool = True
    """Whether spreading earlier KV over a larger group costs what does not overlap with compute (Tetris §4.1)."""

    kv_reservations: bool = True
    """Whether KV outside of schedulers takes blocks too, and spans and transfers wait for them as in live clusters."""
    capabilities: frozenset[Capability] = ALL_CAPABILITIES
    """See `InstanceBackend.capabilities`."""
    pads_heads: bool = True
    """See `PolicyContext.pads_heads`."""
    copies_prefixes: bool = True
    """See `PolicyContext.copies_prefixes`."""
    whole_prompts: bool = False
    """See `PolicyContext.whole_prompts`."""
    longest: int = 0
    """Tokens of the longest request that is served, output included; longer ones are refused, as by a live cluster. 0:
    not limited."""

    @property
    def engines(self) -> tuple[InstanceSpec, ...]:
        """The engine of each instance, where it works alone."""
        return tuple(self.engine([instance]) for instance in self.instances)

    @property
    def policy_context(self) -> PolicyContext:
        """The context of placement policies: they predict spans with the simulator's own model."""
        return PolicyContext(
            latency=self.spans,
            shape=self.shape,
            rows=self.rows,
            pads_heads=self.pads_heads,
            copies_prefixes=self.copies_prefixes,
            whole_prompts=self.whole_prompts,
        )

    def __post_init__(self) -> None:
        if not self.instances:
            raise ConfigError("a cluster needs at least one instance")
        if self.backends < 1:
            raise ConfigError(f"backends must be at least 1, not {self.backends}")


BarKind = Literal["span", "hold", "pause", "transfer", "batch"]


class GanttBar(NamedTuple):
    """One bar of a Gantt chart."""

    kind: BarKind
    """"batch": a stretch of scheduler iterations of one prompt, or of decodes, without a break."""
    instance: int
    """Instance id; of a transfer, the sender."""
    start_s: float
    end_s: float
    request: str
    """Of batches the one whose prompt advanced furthest; empty where all only decoded."""
    note: str = ""
    """The target of a transfer, or the tokens of a span."""


@dataclass(frozen=True)
class ClusterResult:
    """One simulated cluster run."""

    sim: SimResult
    instances: tuple[ClusterInstance, ...] = ()
    bars: tuple[GanttBar, ...] = ()
    """Empty unless they were kept."""
    spans: int = 0
    """Spans that ran."""
    chunked: int = 0
    """Requests that had more than one span."""
    paused: int = 0
    """Preemptions of spans."""
    refused: int = 0
    """Actions of the policy that were refused."""
    busy_s: tuple[float, ...] = ()
    """By instance."""
    decision_s: tuple[float, ...] = field(default=(), repr=False)
    """Seconds of each call of the policy, where a stopwatch was given."""
