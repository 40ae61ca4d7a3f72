"""State of the live page, bounded in memory: iterations in a ring, requests, and latencies of the last minutes.

Producers are a server (`serving.live.feed`) and a log (`serving.live.recordings`). Times are arguments, seconds of one
clock.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from msgspec.structs import replace

from headway.core.errors import UnavailableError
from headway.runtime.cluster.instances import InstanceAdmin
from headway.runtime.engine.protocol import EngineClient, EngineSamples, IterationSample, SampledEngine, TransferSample
from headway.serving.errors import ApiError
from headway.serving.metrics import GenerationRecord
from headway.vllm.endpoint import LogExplainer

if TYPE_CHECKING:
    from headway.sim.explanation import RequestExplanation


BUCKET_S = 2.0
MOST_BUCKETS = 450
"""15 minutes."""
_STEP = math.log(1.1)
"""Durations are counted in classes 10% apart: percentiles are off by 5% at most."""
_SHORTEST_S, _LONGEST_S = 1e-4, 1e5


class DurationHistogram:
    """Counts of durations in classes that grow by 10%: at most 218 of them."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float, count: int = 1) -> None:
        """Add a duration so many times."""
        self._counts[round(math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S)) / _STEP)] += count

    def merge(self, other: DurationHistogram) -> None:
        """Add the other's durations."""
        self._counts.update(other._counts)

    def quantile(self, share: float) -> float | None:
        """Return the duration below which this share lies, within 5%; None of nothing."""
        left = share * self._counts.total()
        for index in sorted(self._counts):
            left -= self._counts[index]
            if left <= 0:
                return math.exp(index * _STEP)
        return None


@dataclass
class HistoryBucket:
    """What happened within `BUCKET_S` seconds."""

    number: int
    """Its start, in units of `BUCKET_S` on the feed's clock."""
    short_ttft: DurationHistogram = field(default_factory=DurationHistogram)
    long_ttft: DurationHistogram = field(default_factory=DurationHistogram)
    gaps: DurationHistogram = field(default_factory=DurationHistogram)
    met: int = 0
    missed: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    kv_share: float | None = None
    waiting: int = 0
    running: int = 0

    def row(self) -> list[float | int | None]:
        """Return it as the page has it: start, TTFT and TBT (median, P99), KV share, waiting, running, tokens a second
        of prefill and decode, met, missed."""
        ttft = DurationHistogram()
        ttft.merge(self.short_ttft)
        ttft.merge(self.long_ttft)
        times = [ttft.quantile(0.5), ttft.quantile(0.99), self.gaps.quantile(0.5), self.gaps.quantile(0.99)]
        rates = [self.prefill_tokens / BUCKET_S, self.decode_tokens / BUCKET_S]
        loads = [self.kv_share, self.waiting, self.running]
        return [self.number * BUCKET_S, *times, *loads, *rates, self.met, self.missed]


class LatencyHistory:
    """The last `MOST_BUCKETS` buckets in which anything happened."""

    def __init__(self) -> None:
        self._buckets: deque[HistoryBucket] = deque(maxlen=MOST_BUCKETS)

    def at(self, now: float) -> HistoryBucket:
        """Return the bucket of a time; a time before the newest bucket belongs to the newest."""
        number = int(now // BUCKET_S)
        if not self._buckets or number > self._buckets[-1].number:
            self._buckets.append(HistoryBucket(number))
        return self._buckets[-1]

    def rows(self, since: int) -> list[list[float | int | None]]:
        """Return the rows of all buckets from a number on; the newest may still change."""
        return [bucket.row() for bucket in self._buckets if bucket.number >= since]

    def latencies(self, since_s: float) -> dict[str, float | None]:
        """Return percentiles of TTFT, of short and of long prompts, and of gaps, over all buckets that begin after a
        time, in seconds."""
        short, long, gaps = DurationHistogram(), DurationHistogram(), DurationHistogram()
        for bucket in self._buckets:
            if bucket.number * BUCKET_S > since_s:
                short.merge(bucket.short_ttft)
                long.merge(bucket.long_ttft)
                gaps.merge(bucket.gaps)
        return {
            "short_ttft_p50_s": short.quantile(0.5),
            "short_ttft_p99_s": short.quantile(0.99),
            "long_ttft_p50_s": long.quantile(0.5),
            "long_ttft_p99_s": long.quantile(0.99),
            "tbt_p99_s": gaps.quantile(0.99),
        }

    @property
    def newest(self) -> int:
        """Number of the newest bucket; -1 without any."""
        return self._buckets[-1].number if self._buckets else -1


MOST_BLOCKS = 20_000
"""Samples kept: at the sampler's limit of 640 a second those of the last half minute, usually of several minutes."""
MOST_ENDED = 500
"""Requests kept after their end."""
MOST_LIVE = 4_000
"""Requests that are followed before their end; beyond that the oldest is dropped."""
MOST_TRANSFERS = 2_000
MOST_SENT_BLOCKS = 3_000
"""Samples in one answer."""
MOST_SENT_REQUESTS = 200
T = TypeVar("T", "FeedBlock", "FeedTransfer")
_RESTARTS = re.compile("'+$")


class FeedBlock(NamedTuple):
    """A sample on its instance."""

    number: int
    """Counts all samples of the feed."""
    instance: int
    sample: IterationSample


class FeedTransfer(NamedTuple):
    """A KV slice that has arrived."""

    number: int
    request: str
    target: int
    sample: TransferSample


@dataclass
class FollowedRequest:
    """A request as the page shows it. Seconds of the feed's clock."""

    id: str
    request_class: str
    arrival_s: float
    prompt_tokens: int
    ttft_slo_s: float | None = None
    tbt_slo_s: float | None = None
    due_s: float | None = None
    """When its first token is due: as asked for, or as the scheduler last reported."""
    work_s: float | None = None
    """Seconds that the rest of its prompt would take alone, as the scheduler last reported."""
    computed: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    worst_gap: tuple[float, float] | None = None
    ended_s: float | None = None
    reason: str | None = None
    met: bool | None = None
    """Whether it got the latencies that it asked for; None: it asked for none, or has not ended."""

    def kept(self, ok: bool) -> bool | None:
        """Return whether it got its latencies, as `GenerationRecord.objectives` counts: TTFT and mean gap. None: it
        asked for none. ok: it ended well."""
        if self.ttft_slo_s is None and self.tbt_slo_s is None:
            return None
        if not ok or self.first_token_s is None or self.last_token_s is None:
            return False
        mean_s = (self.last_token_s - self.first_token_s) / max(1, self.output_tokens - 1)
        first_s = self.first_token_s - self.arrival_s
        return (self.ttft_slo_s is None or first_s <= self.ttft_slo_s) and (
            self.tbt_slo_s is None or mean_s <= self.tbt_slo_s
        )

    def row(self) -> dict[str, Any]:
        """Return it as the page has it."""
        gap = self.worst_gap
        return {
            "id": self.id,
            "class": self.request_class,
            "arrival_s": self.arrival_s,
            "prompt": self.prompt_tokens,
            "computed": self.computed,
            "due_s": self.due_s,
            "work_s": self.work_s,
            "ttft_slo_s": self.ttft_slo_s,
            "ttft_s": None if self.first_token_s is None else self.first_token_s - self.arrival_s,
            "output": self.output_tokens,
            "worst_gap_s": None if gap is None else gap[1] - gap[0],
            "ended_s": self.ended_s,
            "reason": self.reason,
            "met": self.met,
        }


@dataclass
class InstanceLoad:
    """One instance now."""

    id: int
    role: str = "mixed"
    state: str = "ready"
    kv_used: int = 0
    kv_total: int = 0
    running: int = 0
    waiting: int = 0


@dataclass
class LiveFeed:
    """All that the live page shows. policy, aim_s: of the schedulers, for explanations."""

    policy: str = ""
    aim_s: float | None = None
    long_tokens: int = 8192
    instances: list[InstanceLoad] = field(default_factory=list)
    met_total: int = 0
    missed_total: int = 0

    def __post_init__(self) -> None:
        self._count = 0
        self._blocks: deque[FeedBlock] = deque(maxlen=MOST_BLOCKS)
        self._transfers: deque[FeedTransfer] = deque(maxlen=MOST_TRANSFERS)
        self._live: dict[str, FollowedRequest] = {}
        self._ended: dict[str, FollowedRequest] = {}
        self._history = LatencyHistory()

    # -- what happens ---------------------------------------------------------------------------------------------

    def arrived(self, request: FollowedRequest) -> None:
        """Follow a new request."""
        if len(self._live) >= MOST_LIVE:
            del self._live[next(iter(self._live))]
        if request.ttft_slo_s is not None:
            request.due_s = request.arrival_s + request.ttft_slo_s
        self._live[request.id] = request

    def tokens(self, name: str, at_s: float, count: int = 1) -> None:
        """Note output tokens of a request."""
        request = self._live.get(name)
        if request is None:
            return
        bucket = self._history.at(at_s)
        bucket.decode_tokens += count
        if request.first_token_s is None or request.last_token_s is None:
            request.first_token_s = at_s
            request.computed = request.prompt_tokens
            long = request.prompt_tokens > self.long_tokens
            (bucket.long_ttft if long else bucket.short_ttft).add(at_s - request.arrival_s)
        else:
            gap_s = at_s - request.last_token_s
            bucket.gaps.add(gap_s / count, count)
            if request.worst_gap is None or gap_s > request.worst_gap[1] - request.worst_gap[0]:
                request.worst_gap = (request.last_token_s, at_s)
        request.last_token_s = at_s
        request.output_tokens += count

    def finished(self, name: str, at_s: float, error: str | None) -> None:
        """Note the end of a request of a log."""
        if name in self._live:
            self.ended(name, at_s, error or "ended", self._live[name].kept(error is None))

    def ended(self, name: str, at_s: float, reason: str, met: bool | None) -> None:
        """Note the end of a request; met: whether it got the latencies that it asked for, None: it asked for none."""
        request = self._live.pop(name, None)
        if request is None:
            return
        request.ended_s, request.reason, request.met = at_s, reason, met
        if met is not None:
            bucket = self._history.at(at_s)
            bucket.met += met
            bucket.missed += not met
            self.met_total += met
            self.missed_total += not met
        self._ended[name] = request
        if len(self._ended) > MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    def sampled(self, instance: int, samples: EngineSamples) -> None:
        """Add an instance's samples."""
        for sample in samples.iterations:
            self._count += 1
            self._blocks.append(FeedBlock(self._count, instance, self._named(sample)))
            # Every stage computes the same tokens.
            if sample.stage == 0:
                self._history.at(sample.end_s).prefill_tokens += sum(chunk.tokens for chunk in sample.chunks)
            for chunk in sample.chunks:
                request = self._live.get(self.name_of(chunk.request))
                if request is not None:
                    request.computed = max(request.computed, chunk.start + chunk.tokens)
        for waiting in samples.waiting:
            request = self._live.get(self.name_of(waiting.request))
            if request is not None:
                request.due_s, request.work_s = waiting.due_s, waiting.work_s
        for one in samples.transfers:
            self._count += 1
            self._transfers.append(FeedTransfer(self._count, self.name_of(one.request), instance, one))

    def assess(self, assess: Callable[[FollowedRequest], None]) -> None:
        """Call `assess` with each request without a first token."""
        for request in self._live.values():
            if request.first_token_s is None:
                assess(request)

    def counts(self) -> tuple[int, int]:
        """Return how many requests have no first token, and how many have one and go on."""
        early = sum(one.first_token_s is None for one in self._live.values())
        return early, len(self._live) - early

    def loaded(self, now: float, kv_share: float | None) -> None:
        """Note the load of the whole server. Everywhere on the page, what waits has no first token."""
        bucket = self._history.at(now)
        bucket.waiting, bucket.running = self.counts()
        bucket.kv_share = kv_share

    def name_of(self, name: str) -> str:
        """Return the followed request's id. A cluster adds `#`, the attempt's number, and a mark for each restart."""
        name = _RESTARTS.sub("", name)
        while name not in self._live and name not in self._ended and "#" in name:
            name = name.rpartition("#")[0]
        return name

    # -- what is shown --------------------------------------------------------------------------------------------

    def page(self, now: float, after: int = 0, bucket: int = 0) -> dict[str, Any]:
        """Return what is new: samples after number `after`, history from bucket number `bucket` on; the newest
        `MOST_SENT_BLOCKS` and `MOST_SENT_REQUESTS` at most."""
        waiting, running = self.counts()
        live = sorted(self._live.values(), key=lambda one: (one.first_token_s is not None, one.arrival_s))
        ended = list(self._ended.values())[::-1]
        blocks = _after(self._blocks, after)[-MOST_SENT_BLOCKS:]
        return {
            "schema": "headway.live/1",
            "now_s": now,
            "cursor": self._count,
            "bucket": self._history.newest,
            "bucket_s": BUCKET_S,
            "policy": self.policy,
            "long_tokens": self.long_tokens,
            "instances": [vars(one) for one in self.instances],
            "blocks": [_block_row(one) for one in blocks],
            "transfers": [
                [one.request, one.sample.source, one.target, one.sample.start_s, one.sample.end_s]
                for one in _after(self._transfers, after)
            ],
            "requests": [one.row() for one in (*live[:MOST_SENT_REQUESTS], *ended[:50])],
            "waiting": waiting,
            "running": running,
            "history": self._history.rows(bucket),
            "minute": self._history.latencies(now - 60.0),
            "met": self.met_total,
            "missed": self.missed_total,
        }

    def explain(self, request_id: str) -> RequestExplanation:
        """Explain a followed request by the samples that are kept. Raises ConfigError for any other."""
        return self.explanation(request_id)()

    def explanation(self, request_id: str) -> Callable[[], RequestExplanation]:
        """Return `explain` on copies, for another thread."""
        known, blocks, transfers = {**self._ended, **self._live}, list(self._blocks), list(self._transfers)

        def explain() -> RequestExplanation:
            # Imported here: explanations bring numpy, which the server's process does without until it is asked.
            from headway.serving.live.recordings import explain_request

            return explain_request(self, request_id, known, blocks, transfers)

        return explain

    def _named(self, sample: IterationSample) -> IterationSample:
        """Return a sample whose chunks have the ids of followed requests."""
        if all(chunk.request in self._live for chunk in sample.chunks):
            return sample
        return replace(
            sample, chunks=tuple(replace(chunk, request=self.name_of(chunk.request)) for chunk in sample.chunks)
        )


def _after(items: deque[T], number: int) -> list[T]:
    """Return the newest items, those after a number."""
    newest = takewhile(lambda one: one.number > number, reversed(items))
    return list(newest)[::-1]


def _block_row(block: FeedBlock) -> list[Any]:
    one = block.sample
    chunks = [[chunk.request, chunk.start, chunk.tokens, chunk.remaining, chunk.limit] for chunk in one.chunks]
    times = [round(one.start_s, 6), round(one.end_s, 6), round(one.predicted_s, 6)]
    return [block.instance, one.group, one.stage, *times, one.decodes, one.iterations, chunks]


def instance_loads(reports: Sequence[Any]) -> list[InstanceLoad]:
    """Return the loads of a cluster's instances from its reports (`runtime.cluster.instances`)."""
    return [
        InstanceLoad(one.id, one.role, one.state, one.kv_tokens_used, one.kv_tokens_total, one.running, one.waiting)
        for one in reports
    ]


class ServerFeed:
    """The `LivePage` of one server. event_log: of its only engine; explanations then come from a replay of it."""

    def __init__(self, engine: EngineClient, event_log: Path | None) -> None:
        self.feed = LiveFeed()
        self._engine = engine
        self._explainer = None if event_log is None else LogExplainer()
        self._event_log = event_log
        if isinstance(engine, SampledEngine):
            engine.on_samples(self._sampled)

    def follow(self, name: str, record: GenerationRecord) -> None:
        """Follow a request by its record. name: its id in the engine."""
        feed, first, gap, finish, reject = (
            self.feed, record.on_first, record.on_gap, record.on_finish, record.on_reject,
        )  # fmt: skip

        def on_first(of: GenerationRecord, seconds: float, tokens: int) -> None:
            first(of, seconds, tokens)
            feed.tokens(name, of.received_s + seconds, tokens)

        def on_gap(of: GenerationRecord, seconds: float, tokens: int) -> None:
            gap(of, seconds, tokens)
            feed.tokens(name, (of.last_token_s or of.received_s) + seconds, tokens)

        def on_finish(of: GenerationRecord) -> None:
            finish(of)
            objectives = of.objectives()
            met = all(objectives.values()) if objectives else None
            feed.ended(name, time.monotonic(), str(of.reason), met)

        def on_reject(status: int) -> None:
            reject(status)
            feed.ended(name, time.monotonic(), f"refused with {status}", None)

        record.on_first, record.on_gap, record.on_finish, record.on_reject = on_first, on_gap, on_finish, on_reject
        slo = record.slo
        feed.arrived(
            FollowedRequest(name, record.request_class, record.received_s, record.prompt_tokens, slo.ttft_s, slo.tbt_s)
        )

    def page(self, after: int, bucket: int, at_s: float | None) -> dict[str, Any]:
        """See `LivePage`."""
        now = time.monotonic()
        self._refresh(now)
        return {**self.feed.page(now, after, bucket), "title": self._title(), "state": self._engine.state}

    async def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """See `LivePage`."""
        if self._explainer is not None and self._event_log is not None:
            # A restarted engine writes a log of its own.
            restarts = self._engine.stats.engine_restarts_total
            log = Path(f"{self._event_log}.{restarts}") if restarts else self._event_log
            status, body = await self._explainer.explain(log, request_id, under)
            if status != 200:
                raise ApiError(status, body["error"]["message"])
            return body
        if under:
            raise ApiError(400, "counterfactuals need the decisions: serve one engine with --event-log FILE", "under")
        explain = self.feed.explanation(request_id)

        def work() -> dict[str, Any]:
            from headway.sim.report.why import why_json  # brings numpy

            return why_json(explain())

        return await asyncio.to_thread(work)

    def _sampled(self, instance: int, samples: EngineSamples) -> None:
        self.feed.sampled(instance, samples)
        self._refresh(time.monotonic())

    def _refresh(self, now: float) -> None:
        engine, feed = self._engine, self.feed
        try:
            info = engine.info
        except UnavailableError:
            return
        feed.policy, feed.aim_s, feed.long_tokens = info.policy, info.t_target_s, info.long_tokens
        stats = engine.stats
        if isinstance(engine, InstanceAdmin):
            feed.instances = instance_loads(engine.report().instances)
        else:
            load = InstanceLoad(0, "engine", engine.state, stats.kv_tokens_used, stats.kv_tokens_total)
            load.running, load.waiting = stats.running, stats.waiting
            feed.instances = [load]
        total = stats.kv_tokens_total
        feed.loaded(now, stats.kv_tokens_used / total if total else 0.0)

    def _title(self) -> str:
        try:
            return self._engine.info.model
        except UnavailableError:
            return "starting"
