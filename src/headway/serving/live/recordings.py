"""A run from its logs, of an engine or of a cluster: what happened when, for the live page and for `headway why`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from headway.core.errors import ConfigError
from headway.core.request import Slo
from headway.perf.latency.base import PrefillCache
from headway.policy.iteration.budget import reference_aim_s
from headway.policy.iteration.config import DEADLINE_BASE_S, DEADLINE_FACTOR, LONG_TOKENS, SchedulerConfig
from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample, TransferSample
from headway.serving.live.feed import MOST_BLOCKS, FeedBlock, FeedTransfer, FollowedRequest, InstanceLoad, LiveFeed
from headway.sim.explanation import (
    CounterfactualOutcome,
    RequestExplanation,
    RequestSurroundings,
    explain,
    explain_record,
    find,
    outcomes,
)
from headway.sim.metrics import RequestRecord
from headway.sim.replay import (
    ClusterLogRun,
    GroupSpan,
    KvTransfer,
    ReplayedChunk,
    ReplayedRun,
    ReplayedStep,
    limit_of_chunk,
    open_log,
    replay,
)

Happening = tuple[float, Callable[[LiveFeed], None]]
"""A time, and what then happens to a feed."""


class RecordedRun(Protocol):
    """A run that has ended."""

    differs: str | None
    """The first decision that this version takes otherwise; explanations then may not hold."""

    def new_feed(self) -> LiveFeed:
        """Return a feed as at the run's start."""

    def happenings(self) -> Iterable[Happening]:
        """Return all that happened, in any order."""

    def assess(self, request: FollowedRequest) -> None:
        """Set what the scheduler thought of a request without a first token: when it is due, and the work left."""

    def why(self, request_id: str, under: Sequence[str]) -> tuple[RequestExplanation, list[CounterfactualOutcome]]:
        """Explain one request, and what it would have been under each of some settings. Raises ConfigError."""


class EngineRecording:
    """The `RecordedRun` of a run that was replayed with its steps."""

    def __init__(self, run: ReplayedRun) -> None:
        self._run = run
        # What the log says itself still holds; which requests decoded in an iteration comes from the replay.
        self.differs: str | None = run.differences[0] if run.differences else None
        aim_s = reference_aim_s(run.config, run.model)
        self._times = PrefillCache(run.model, aim_s, max(run.config.min_chunk, 16))

    def new_feed(self) -> LiveFeed:
        """See `RecordedRun`."""
        config = self._run.config
        feed = LiveFeed(config.policy, config.t_target_s, LONG_TOKENS)
        feed.instances = [InstanceLoad(0, self._run.engine, "log", 0, self._run.kv_tokens * config.kv_parallel)]
        return feed

    def happenings(self) -> Iterator[Happening]:
        """See `RecordedRun`."""
        run = self._run
        for record in run.records:
            end_s = record.finish_s if record.finish_s is not None else max(record.token_s, default=record.arrival_s)
            left = None if record.error == "unfinished" else end_s
            slo = run.requests[record.id].slo
            arrival = (record.id, record.arrival_s, record.prompt_tokens)
            yield from _life(*arrival, slo, left, record.error, record.token_s)
        for step in run.steps:
            yield step.end_s, _iteration(step, run.kv_tokens * run.config.kv_parallel)

    def assess(self, request: FollowedRequest) -> None:
        """Set the work that is left and, where no latency was asked for, the policy's own deadline
        (`policy.iteration.config`)."""
        prompt = request.prompt_tokens
        request.work_s = self._times.remaining_s(prompt, request.computed)
        if request.due_s is None:
            cached = self._run.requests[request.id].cached_tokens
            alone_s = self._times.remaining_s(prompt, cached)
            request.due_s = request.arrival_s + max(DEADLINE_BASE_S, DEADLINE_FACTOR * alone_s)

    def why(self, request_id: str, under: Sequence[str]) -> tuple[RequestExplanation, list[CounterfactualOutcome]]:
        """See `RecordedRun`."""
        explanation = explain(self._run, request_id)
        return explanation, outcomes(self._run, explanation.record.id, under) if under else []


def _life(
    name: str,
    arrival_s: float,
    prompt: int,
    slo: Slo,
    end_s: float | None,
    error: str | None,
    token_s: Iterable[float] = (),
) -> Iterator[Happening]:
    kind = "long" if prompt > LONG_TOKENS else "short"
    yield arrival_s, lambda feed: feed.arrived(FollowedRequest(name, kind, arrival_s, prompt, slo.ttft_s, slo.tbt_s))
    for at_s in token_s:
        yield at_s, lambda feed, at_s=at_s: feed.tokens(name, at_s)  # type: ignore[misc]
    if end_s is not None:
        yield end_s, lambda feed: feed.finished(name, end_s, error)


def _iteration(step: ReplayedStep, kv_tokens: int) -> Callable[[LiveFeed], None]:
    chunks = tuple(ChunkSample(one.request, one.start, one.tokens, one.remaining, one.limit) for one in step.chunks)
    sample = IterationSample(
        0, 0, step.decided_s, step.start_s, step.end_s, step.predicted_s, len(step.decodes), chunks
    )

    def happen(feed: LiveFeed) -> None:
        feed.sampled(0, EngineSamples((sample,)))
        used = step.kv_used or 0
        feed.instances[0].kv_used = used
        feed.loaded(step.end_s, used / kv_tokens if step.kv_used is not None else None)

    return happen


# A run of a cluster from its logs, as the live page shows it and `headway why` explains it.
#
# Explanations come from a feed that is filled up to the request's end, as those of a server: the logs say what each
# instance computed and when, and how many requests decoded, not by which rule one was passed over.


class ClusterRecording:
    """The `RecordedRun` of a cluster."""

    differs: str | None = None

    def __init__(self, run: ClusterLogRun) -> None:
        """Raises ConfigError for settings of another version."""
        self._run = run
        starts = [event for events in run.batches.values() for event in events if event["event"] == "start"]
        try:
            self._config = SchedulerConfig.of_fields(starts[0]["config"]) if starts else SchedulerConfig()
        except TypeError as error:
            raise ConfigError(f"the settings of an instance's log cannot be read: {error}") from error

    def new_feed(self) -> LiveFeed:
        """See `RecordedRun`."""
        feed = LiveFeed(self._config.policy, self._config.t_target_s, LONG_TOKENS)
        feed.instances = [InstanceLoad(one.id, one.role, "log") for one in self._run.instances]
        return feed

    def happenings(self) -> Iterator[Happening]:
        """See `RecordedRun`."""
        for life in self._run.requests.values():
            one = life.request
            yield from _life(one.id, one.arrival_s, one.prompt_tokens, one.slo, life.end_s, life.error)
        yield from self._spans()
        for name, moved in self._run.transfers:
            yield moved.end_s, lambda feed, name=name, moved=moved: _transfer(feed, name, moved)  # type: ignore[misc]
        for instance, events in self._run.batches.items():
            scheduler = _InstanceBatches(instance, self._config, self._run)
            for event in events:
                happen = scheduler.happening(event)
                if happen is not None:
                    yield event["at_s"], happen

    def assess(self, request: FollowedRequest) -> None:
        """Set nothing: the logs do not say what the schedulers thought."""

    def why(self, request_id: str, under: Sequence[str]) -> tuple[RequestExplanation, list[CounterfactualOutcome]]:
        """See `RecordedRun`."""
        if under:
            raise ConfigError("counterfactuals are simulated from the log of one engine, not of a cluster")
        name = find(self._run.requests.keys(), request_id)
        until_s = self._run.requests[name].end_s
        feed = self.new_feed()
        for at_s, happen in sorted(self.happenings(), key=lambda one: one[0]):
            if until_s is None or at_s <= until_s:
                happen(feed)
        return feed.explain(name), []

    def _spans(self) -> Iterator[Happening]:
        """Yield the spans; the parts of one that was paused share its tokens by their time."""
        parts: dict[tuple[str, int, int], list[GroupSpan]] = {}
        for span in self._run.spans:
            parts.setdefault((span.request, span.start, span.end), []).append(span)
        for (_, start, end), spans in parts.items():
            whole_s = sum(one.end_s - one.start_s for one in spans) or 1.0
            passed_s = 0.0
            for one in spans:
                first, passed_s = passed_s, passed_s + one.end_s - one.start_s
                edges = [start + round((end - start) * at_s / whole_s) for at_s in (first, passed_s)]
                yield one.end_s, lambda feed, one=one, edges=edges: self._part(feed, one, *edges)  # type: ignore[misc]
            if spans[-1].last:
                yield spans[-1].end_s, lambda feed, one=spans[-1]: feed.tokens(one.request, one.end_s)  # type: ignore[misc]

    def _part(self, feed: LiveFeed, span: GroupSpan, start: int, end: int) -> None:
        """Add a part of a span, tokens [start, end), to its instances, each with its share."""
        prompt = self._run.requests[span.request].request.prompt_tokens
        share = -(-(end - start) // len(span.group))
        for place, instance in enumerate(span.group):
            first = min(end, start + place * share)
            limit = "rest of the prompt" if end >= prompt else "host or KV shard"
            chunk = ChunkSample(span.request, first, min(share, end - first), prompt - first, limit)
            sample = IterationSample(0, 0, span.start_s, span.start_s, span.end_s, 0.0, 0, (chunk,))
            feed.sampled(instance, EngineSamples((sample,)))


class _InstanceBatches:
    """The iterations of one instance, with the requests that decode in each."""

    def __init__(self, instance: int, config: SchedulerConfig, run: ClusterLogRun) -> None:
        self._instance, self._config, self._run = instance, config, run
        # Requests that decode, and prompts of those that do not yet, in order of coming.
        self._decoding: dict[str, None] = {}
        self._prompts: dict[str, int] = {}
        self._decided: dict[int, float] = {}

    def happening(self, event: Mapping[str, Any]) -> Callable[[LiveFeed], None] | None:
        """Take in the next event; return what it does to a feed, if anything."""
        match event["event"]:
            case "add":
                name = event["request"]
                if event.get("phase") == "decode":
                    self._decoding[name] = None
                else:
                    self._prompts[name] = event["prompt"]
            case "abort":
                self._decoding.pop(event["request"], None)
            case "lost":
                self._decoding.clear()
            case "schedule":
                self._decided[event["id"]] = event["at_s"]
            case "batch":
                return self._batch(event)
        return None

    def _batch(self, event: Mapping[str, Any]) -> Callable[[LiveFeed], None]:
        # The oldest decode where not all do.
        emitted = list(self._decoding)[: event["decodes"]]
        for name, start, tokens in event["chunks"]:
            if start + tokens >= self._prompts.get(name, 1 << 62):
                emitted.append(name)
                self._decoding[name] = None
        for name in event["ended"]:
            self._decoding.pop(name, None)
        at_s, decided_s = event["at_s"], self._decided.pop(event["id"], event["at_s"])
        rows = event["decodes"] + sum(tokens for _, _, tokens in event["chunks"])
        samples = EngineSamples(
            tuple(
                IterationSample(
                    group,
                    stage,
                    decided_s,
                    start_s,
                    at_s if stage == len(stages) - 1 else end_s,
                    event["predicted_s"],
                    decodes,
                    tuple(self._chunk(rows, *chunk) for chunk in chunks),
                )
                for group, decodes, chunks, stages in event["parts"]
                for stage, (start_s, end_s) in enumerate(stages)
            )
        )

        def happen(feed: LiveFeed) -> None:
            feed.sampled(self._instance, samples)
            for name in emitted:
                feed.tokens(feed.name_of(name), at_s)
            feed.loaded(at_s, None)

        return happen

    def _chunk(self, rows: int, name: str, start: int, tokens: int) -> ChunkSample:
        remaining = max(tokens, self._prompts.get(name, 0) - start)
        return ChunkSample(name, start, tokens, remaining, limit_of_chunk(self._config, tokens, remaining, rows, False))


def _transfer(feed: LiveFeed, name: str, moved: KvTransfer) -> None:
    sample = TransferSample(name, moved.source, moved.start_s, moved.end_s)
    feed.sampled(moved.target, EngineSamples(transfers=(sample,)))


def recording(path: Path) -> RecordedRun:
    """Return the run that a log is of, an engine's or a cluster's. Raises ConfigError for a file that is no log."""
    log = open_log(path)
    if isinstance(log, ClusterLogRun):
        return ClusterRecording(log)
    return EngineRecording(replayed(log, path, detail=True))


def replayed(log: Iterable[Mapping[str, Any]], path: Path, detail: bool = False) -> ReplayedRun:
    """Replay the log of an engine in `path`. Raises ConfigError, which names the file."""
    try:
        return replay(log, detail=detail)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


# Explanation of a request by the samples that a feed has kept of it.


def explain_request(
    feed: LiveFeed,
    request_id: str,
    known: Mapping[str, FollowedRequest],
    blocks: Sequence[FeedBlock],
    transfers_kept: Iterable[FeedTransfer],
) -> RequestExplanation:
    """Explain one of the `known` requests by the samples and slices that are kept. Raises ConfigError for any other."""
    request = known[find(known.keys(), request_id, "the last minutes' feed")]
    until_s = request.last_token_s if request.ended_s is not None and request.last_token_s is not None else math.inf
    around = [one for one in blocks if request.arrival_s < one.sample.end_s and one.sample.start_s < until_s]
    transfers = [_moved(one) for one in transfers_kept if one.request == request.id]
    computed_on = {one.instance for one in around for chunk in one.sample.chunks if chunk.request == request.id}
    # Where its prompt is computed; with its first token it may go elsewhere.
    before = computed_on or {one.instance for one in around}
    after = {one.target for one in transfers} or before
    if blocks and len(blocks) == MOST_BLOCKS and blocks[0].sample.start_s > request.arrival_s:
        raise ConfigError(f"{request.id}: its first iterations are no longer kept; serve with --event-log for that")
    first, last = request.first_token_s, request.last_token_s
    record = RequestRecord(
        id=request.id,
        klass=request.request_class,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        token_s=() if first is None else (first,) if last is None or last == first else (first, last),
        finish_s=request.ended_s,
        error=None if first is not None else request.reason or "it still waits",
    )
    around_it = RequestSurroundings(
        [
            _step(one, request)
            for one in around
            if one.instance in (before if first is None or one.sample.end_s <= first else after)
        ],
        feed.policy,
        feed.aim_s,
        transfers=transfers,
    )
    return explain_record(record, around_it, request.worst_gap)


def _moved(one: FeedTransfer) -> KvTransfer:
    return KvTransfer(one.sample.source, one.target, one.sample.start_s, one.sample.end_s)


def _step(block: FeedBlock, request: FollowedRequest) -> ReplayedStep:
    one = block.sample
    own = frozenset((request.id,)) if _decodes(request, one.end_s) else frozenset[str]()
    chunks = tuple(
        ReplayedChunk(c.request, c.start, c.tokens, c.remaining, c.tokens >= c.remaining, c.limit)  # type: ignore[arg-type]
        for c in one.chunks
    )
    decoding = own | _others(one.decodes - len(own))
    return ReplayedStep(block.number, one.decided_s, one.start_s, one.end_s, one.predicted_s, 0.0, decoding, chunks)


@cache
def _others(count: int) -> frozenset[str]:
    """Return names of decodes of which the sample has the number only."""
    return frozenset(f"decode {number}" for number in range(count))


def _decodes(request: FollowedRequest, at_s: float) -> bool:
    """Whether an iteration that ended at `at_s` gave a request a token after its first."""
    first_s, last_s, gap = request.first_token_s, request.last_token_s, request.worst_gap
    if first_s is None or last_s is None or not first_s < at_s <= last_s:
        return False
    return gap is None or not gap[0] < at_s < gap[1]
