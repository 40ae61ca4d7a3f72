"""Outcome of a replay: iterations with their members, records of requests, and decisions that differ."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from headway.core.request import Request, Slo
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.corrected import LoadTerms
from headway.perf.latency.table_latency import TableLatency
from headway.policy.iteration.config import LONG_TOKENS, SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.ordering import LADDER
from headway.sim.metrics import RequestRecord

MOST_DIFFERENCES = 10
"""After the first difference two schedulers diverge: more of them carry no information."""


@dataclass(frozen=True)
class BatchTimes:
    """Times of one iteration, seconds."""

    predicted_s: float
    """As the running scheduler predicted it."""
    profile_s: float
    """As the profile predicts it that the scheduler started from."""
    elapsed_s: float
    """As measured."""
    waited_s: float
    """Time since the end of the batch before it, if requests were waiting then: the engine's own time. Otherwise 0."""
    terms: LoadTerms | None = None
    """By the profile; None where several KV groups or a host's own rules made the batch."""
    woken_s: float | None = None
    """From the arrival at an engine that had nothing to do to the end of this, its first iteration then."""


ChunkLimit = Literal["rest of the prompt", "token limit", "time", "smallest chunk", "host or KV shard"]
"""What made a chunk no larger. time: the iteration's aim. smallest chunk: less would have fitted the aim. host or KV
shard: limits outside the policy."""


class ReplayedChunk(NamedTuple):
    """One prefill chunk of an iteration."""

    request: str
    start: int
    tokens: int
    remaining: int
    """Tokens of the prompt that were left to compute before this chunk."""
    last: bool
    """Whether the iteration yields a token of the request."""
    limit: ChunkLimit


@dataclass(frozen=True)
class ReplayedStep:
    """One iteration as it ran."""

    number: int
    """Its number in the log."""
    decided_s: float
    start_s: float
    end_s: float
    predicted_s: float
    aim_s: float
    """Longest iteration aimed at when it was decided: the setting, or the shortest TBT target of a running request."""
    decodes: frozenset[str]
    chunks: tuple[ReplayedChunk, ...]
    short_of_kv: Mapping[str, int] = field(default_factory=dict)
    """Waiting requests that were passed over for lack of free blocks, and how many they need."""
    kv_used: int | None = None
    """KV tokens in use when it had ended; None: the host's blocks are not in the log."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Why each other waiting request had no tokens, by request."""


class ReplayedPreemption(NamedTuple):
    """KV of a request that was freed, and is computed again."""

    request: str
    at_s: float
    tokens: int


@dataclass
class ReplayedRun:
    """The outcome of a replay."""

    config: SchedulerConfig
    table: TableLatency
    """The profile at the start of the run."""
    model: LatencyModel
    """The scheduler's model at the end of the run; the profile itself where nothing is learned."""
    kv_tokens: int
    block_tokens: int
    engine: str = "headway"
    """"vllm" for a log of the plug-in."""
    asynchronous: bool = False
    """Whether vLLM scheduled a step while the one before was computed."""
    batches: list[BatchTimes] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """Decisions that differ from the recorded ones, as sentences; empty when the replay is exact."""
    records: list[RequestRecord] = field(default_factory=list)
    """One record for each request of the log."""
    requests: dict[str, Request] = field(default_factory=dict)
    """The requests of `records`, by id."""
    steps: list[ReplayedStep] = field(default_factory=list)
    preemptions: list[ReplayedPreemption] = field(default_factory=list)

    @property
    def diverged(self) -> bool:
        """Whether so many decisions differ that the rest need not be replayed."""
        return len(self.differences) >= MOST_DIFFERENCES


class RequestTimes:
    """Times of the requests of a replay, and their records when they end."""

    def __init__(self, run: ReplayedRun) -> None:
        self._run = run
        # By request id: the request, times of its chunks, times of its tokens.
        self._open: dict[str, tuple[Request, list[float], list[float]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def arrived(self, request: Request) -> None:
        """Note a new request."""
        self._run.requests[request.id] = request
        self._open[request.id] = (request, [], [])

    def scheduled(self, name: str, at_s: float) -> None:
        """Note that a chunk of a request was scheduled."""
        if name in self._open:
            self._open[name][1].append(at_s)

    def token(self, name: str, at_s: float) -> None:
        """Note an output token."""
        if name in self._open:
            self._open[name][2].append(at_s)

    def refused(self, request: Request, predicted_s: float) -> None:
        """Make the record of a request that was refused on arrival for its predicted time to first token."""
        asked_s = request.slo.ttft_s
        self.arrived(request)
        why = f"its first token would have come after {predicted_s:.3g} s, later than the {asked_s:g} s asked for"
        self.ended(request.id, None, f"refused: {why}", rejected=True)

    def ended(self, name: str, finish_s: float | None, error: str | None, rejected: bool = False) -> None:
        """Make the record of a request; unknown ones are ignored."""
        request, scheduled, tokens = self._open.pop(name, (None, [], []))
        if request is None:
            return
        self._run.records.append(
            RequestRecord(
                id=name,
                klass="long" if request.prompt_tokens > LONG_TOKENS else "short",
                arrival_s=request.arrival_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=len(tokens),
                scheduled_s=scheduled[0] if scheduled else None,
                token_s=tuple(tokens),
                finish_s=finish_s,
                error=error,
                rejected=rejected,
            )
        )

    def finish(self) -> None:
        """Make records of the requests that the log leaves unfinished."""
        for name in list(self._open):
            self.ended(name, None, "unfinished")


def request_of(event: Mapping[str, Any]) -> Request:
    """Return the request of an `add` event."""
    return Request(
        id=event["request"],
        arrival_s=event["arrival_s"],
        prompt_tokens=event["prompt"],
        max_output_tokens=event["max_output"],
        cached_tokens=event.get("cached", 0),
        slo=Slo(ttft_s=event["ttft_s"], tbt_s=event["tbt_s"]),
        priority=event["priority"],
    )


def limit_of_chunk(config: SchedulerConfig, tokens: int, remaining: int, rows: int, cut_outside: bool) -> ChunkLimit:
    """Return what made a chunk no larger. `rows`: of the whole iteration. `cut_outside`: it is not the size that the
    policy chose for the prompt as a whole."""
    if tokens >= remaining:
        return "rest of the prompt"
    if cut_outside:
        return "host or KV shard"
    if rows >= config.max_num_batched_tokens or config.chunking != "adaptive":
        return "token limit"
    return "smallest chunk" if tokens <= config.min_chunk else "time"


def short_of_kv(policies: Iterable[IterationPolicy]) -> dict[str, int]:
    """Return the waiting requests that were passed over for lack of free blocks, and how many they need."""
    return {
        state.request.id: state.needed_blocks
        for policy in policies
        for state in policy.queue
        if state.skipped_since is not None and not state.holds_kv
    }


def waiting_rules(policy: IterationPolicy, chosen: Collection[str], now: float) -> dict[str, str]:
    """Return why each waiting request of the ladder has no tokens in an iteration, whose chunks are of `chosen`."""
    if policy.config.policy != LADDER:
        return {}
    order = policy.order(now)
    first = next((state for state in order if state.request.id in chosen), None)
    rules, in_time = {}, 0
    for state in order:
        name = state.request.id
        if name in chosen or first is None:
            in_time += not state.steps
            continue
        if first.request.priority < state.request.priority:
            rules[name] = "lower priority"
        elif first.generated and not state.generated:
            rules[name] = "an answer goes on first"
        elif state.steps and in_time:
            rules[name] = f"{_count(in_time, 'request')} would have been late"
        elif first.work_s < state.work_s:
            rules[name] = f"shorter by {state.work_s - first.work_s:.2g} s"
        else:
            rules[name] = f"due {max(0.0, state.deadline_s - first.deadline_s):.2g} s earlier"
        in_time += not state.steps
    return rules


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
