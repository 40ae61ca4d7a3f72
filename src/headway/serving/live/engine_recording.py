"""A replayed run of one engine, as the live page shows it and `headway why` explains it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.config import DEADLINE_BASE_S, DEADLINE_FACTOR, LONG_TOKENS
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample
from headway.serving.live.feed import FollowedRequest, InstanceLoad, LiveFeed
from headway.serving.live.log_player import Happening
from headway.sim.counterfactual import outcomes
from headway.sim.explanation import explain
from headway.sim.metrics import RequestRecord
from headway.sim.replayed_run import ReplayedRun, ReplayedStep
from headway.sim.report.why_text import why_json


class EngineRecording:
    """The `RecordedRun` of a run that was replayed with its steps."""

    def __init__(self, run: ReplayedRun) -> None:
        self._run = run
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
            yield from _life(run, record)
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

    def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """See `RecordedRun`."""
        told = explain(self._run, request_id)
        return why_json(told, outcomes(self._run, told.record.id, under) if under else ())


def _life(run: ReplayedRun, record: RequestRecord) -> Iterator[Happening]:
    slo = run.requests[record.id].slo

    def arrive(feed: LiveFeed) -> None:
        name, arrival_s, prompt = record.id, record.arrival_s, record.prompt_tokens
        feed.arrived(FollowedRequest(name, record.klass, arrival_s, prompt, slo.ttft_s, slo.tbt_s))

    yield record.arrival_s, arrive
    for at_s in record.token_s:
        yield at_s, lambda feed, at_s=at_s: feed.tokens(record.id, at_s)  # type: ignore[misc]
    if record.error == "unfinished":
        return
    end_s = record.finish_s if record.finish_s is not None else max(record.token_s, default=record.arrival_s)
    yield end_s, lambda feed: feed.finished(record.id, end_s, record.error)


def _iteration(step: ReplayedStep, kv_tokens: int) -> Callable[[LiveFeed], None]:
    chunks = tuple(ChunkSample(one.request, one.start, one.tokens, one.remaining, one.limit) for one in step.chunks)
    sample = IterationSample(
        0, 0, step.decided_s, step.start_s, step.end_s, step.predicted_s, len(step.decodes), chunks
    )

    def happen(feed: LiveFeed) -> None:
        feed.sampled(0, EngineSamples((sample,)))
        used = step.kv_used or 0
        feed.instances[0].kv_used = used
        feed.loaded(step.end_s, *feed.counts(), used / kv_tokens if step.kv_used is not None else None)

    return happen
