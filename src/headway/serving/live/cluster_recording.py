"""A run of a cluster from its logs, as the live page shows it and `headway why` explains it.

Explanations come from a feed that is filled up to the request's end, as those of a server: the logs say what each
instance computed and when, and how many requests decoded, not by which rule one was passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from headway.core.errors import ConfigError
from headway.policy.iteration.config import LONG_TOKENS, SchedulerConfig
from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample, TransferSample
from headway.serving.live.feed import FollowedRequest, InstanceLoad, LiveFeed
from headway.serving.live.log_player import Happening
from headway.sim.cluster_log import ClusterLogRun, ClusterRequestLife, GroupSpan
from headway.sim.explanation import KvTransfer, RequestExplanation, find
from headway.sim.replayed_run import limit_of_chunk
from headway.sim.report.why_text import why_json


class ClusterRecording:
    """The `RecordedRun` of a cluster."""

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
            yield from self._life(life)
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

    def explain(self, request_id: str) -> RequestExplanation:
        """Explain one request. Raises ConfigError for an unknown one."""
        name = find(self._run.requests.keys(), request_id)
        until_s = self._run.requests[name].end_s
        feed = self.new_feed()
        for at_s, happen in sorted(self.happenings(), key=lambda one: one[0]):
            if until_s is None or at_s <= until_s:
                happen(feed)
        return feed.explain(name)

    def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """See `RecordedRun`."""
        if under:
            raise ConfigError("counterfactuals are simulated from the log of one engine, not of a cluster")
        return why_json(self.explain(request_id))

    def _life(self, life: ClusterRequestLife) -> Iterator[Happening]:
        request = life.request
        kind = "long" if request.prompt_tokens > LONG_TOKENS else "short"
        slo = request.slo

        def arrive(feed: LiveFeed) -> None:
            name, prompt = request.id, request.prompt_tokens
            feed.arrived(FollowedRequest(name, kind, request.arrival_s, prompt, slo.ttft_s, slo.tbt_s))

        yield request.arrival_s, arrive
        if life.end_s is not None:
            end_s = life.end_s
            yield end_s, lambda feed: feed.finished(request.id, end_s, life.error)

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
            feed.loaded(at_s, *feed.counts(), None)

        return happen

    def _chunk(self, rows: int, name: str, start: int, tokens: int) -> ChunkSample:
        remaining = max(tokens, self._prompts.get(name, 0) - start)
        return ChunkSample(name, start, tokens, remaining, limit_of_chunk(self._config, tokens, remaining, rows, False))


def _transfer(feed: LiveFeed, name: str, moved: KvTransfer) -> None:
    sample = TransferSample(name, moved.source, moved.start_s, moved.end_s)
    feed.sampled(moved.target, EngineSamples(transfers=(sample,)))
