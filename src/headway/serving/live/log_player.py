"""The live page of a log: a replayed run, shown as of any of its times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from headway.core.errors import ConfigError
from headway.perf.latency.prefill_cache import PrefillCache
from headway.policy.iteration.efficient_chunks import reference_aim_s
from headway.runtime.engine.protocol import ChunkSample, EngineSamples, IterationSample
from headway.serving.errors import ApiError
from headway.serving.live.feed import FollowedRequest, InstanceLoad, LiveFeed
from headway.sim.counterfactual import outcomes
from headway.sim.explanation import explain
from headway.sim.metrics import RequestRecord
from headway.sim.replayed_run import ReplayedRun, ReplayedStep
from headway.sim.report.why_text import why_json

Happening = tuple[float, Callable[[LiveFeed], None]]
"""A time, and what then happens to a feed."""


class LogPlayer:
    """The `LivePage` of a run that was replayed with its steps. title: shown in the page's head."""

    def __init__(self, run: ReplayedRun, title: str) -> None:
        """Raises ConfigError for a run in which nothing happened."""
        self._run, self._title = run, title
        self._happenings = sorted(_happenings(run), key=lambda one: one[0])
        if not self._happenings:
            raise ConfigError(f"{title} says of no request and no iteration: there is nothing to show")
        self.span = (self._happenings[0][0], self._happenings[-1][0])
        aim_s = reference_aim_s(run.config, run.model)
        self._times = PrefillCache(run.model, aim_s, max(run.config.min_chunk, 16))
        self._rewinds = 0
        self._at_s = self.span[0]
        self._rewind()

    def page(self, after: int, bucket: int, at_s: float | None) -> dict[str, Any]:
        """See `LivePage`. An earlier time than the last one begins anew; `epoch` then differs."""
        at_s = self.span[0] if at_s is None else min(max(at_s, self.span[0]), self.span[1])
        if at_s < self._at_s:
            self._rewinds += 1
            self._rewind()
        while self._place < len(self._happenings) and self._happenings[self._place][0] <= at_s:
            self._happenings[self._place][1](self._feed)
            self._place += 1
        self._at_s = at_s
        self._feed.assess(self._assess)
        body = self._feed.page(at_s, after, bucket)
        return {**body, "title": self._title, "state": "log", "span": self.span, "epoch": self._rewinds}

    async def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """See `LivePage`."""
        try:
            told = explain(self._run, request_id)
            return why_json(told, outcomes(self._run, told.record.id, under) if under else ())
        except ConfigError as error:
            raise ApiError(404, str(error)) from None

    def _rewind(self) -> None:
        config = self._run.config
        self._feed = LiveFeed(config.policy, config.t_target_s, config.long_tokens)
        self._feed.instances = [InstanceLoad(0, self._run.engine, "log", 0, self._run.kv_tokens * config.kv_parallel)]
        self._place, self._at_s = 0, self.span[0]

    def _assess(self, request: FollowedRequest) -> None:
        """Set the work that is left and, where no latency was asked for, the policy's own deadline
        (`policy.iteration.urgency`)."""
        config, prompt = self._run.config, request.prompt_tokens
        request.work_s = self._times.remaining_s(prompt, request.computed)
        if request.due_s is None:
            cached = self._run.requests[request.id].cached_tokens
            alone_s = self._times.remaining_s(prompt, cached)
            request.due_s = request.arrival_s + max(config.deadline_base_s, config.deadline_factor * alone_s)


def _happenings(run: ReplayedRun) -> Iterator[Happening]:
    for record in run.records:
        yield from _life(run, record)
    for step in run.steps:
        yield step.end_s, _iteration(step, run.kv_tokens * run.config.kv_parallel)


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
    met = None if slo.ttft_s is None and slo.tbt_s is None else _is_met(record, slo.ttft_s, slo.tbt_s)
    yield end_s, lambda feed: feed.ended(record.id, end_s, record.error or "ended", met)


def _is_met(record: RequestRecord, ttft_s: float | None, tbt_s: float | None) -> bool:
    """Whether a request got its latencies, as `GenerationRecord.objectives` counts: TTFT, and the mean gap."""
    if not record.ok or not record.token_s:
        return False
    mean_s = (record.token_s[-1] - record.token_s[0]) / max(1, len(record.token_s) - 1)
    first_s = record.token_s[0] - record.arrival_s
    return (ttft_s is None or first_s <= ttft_s) and (tbt_s is None or mean_s <= tbt_s)


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
