"""Replay of a live run: the engine's event log through a fresh scheduler, which must decide the same again.

The log (`headway serve --event-log FILE`, JSON lines) begins with `start` (settings, KV pool of a group, latency model,
exchange between KV groups if any) and has one line for each request added or aborted, each batch scheduled (with the
groups that were `free`, if not all), and each batch done (over all of its parts). A difference means that the scheduler
depends on something that is not in the log, or that its code has changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError
from headway.core.request import Request, Slo
from headway.core.span import Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import LatencyModel
from headway.perf.latency.parts import parts_s
from headway.perf.latency.recorded import restore
from headway.perf.latency.shard_exchange import ShardExchangeCost, exchange_of
from headway.perf.latency.tables import TableLatency
from headway.policy.iteration.base import InstanceScheduler
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.grouped_scheduler import make_scheduler
from headway.sim.metrics import RequestRecord

Events = Iterable[Mapping[str, Any]]


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
    batches: list[BatchTimes] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    """Decisions that differ from the recorded ones, as sentences; empty when the replay is exact."""
    records: list[RequestRecord] = field(default_factory=list)
    """One record for each request of the log."""


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log. ConfigError names the line that cannot be read; a torn last line is ignored."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # a process that is killed may leave its last line incomplete
            if number < len(lines):
                raise ConfigError(f"{path}:{number}: not an event ({error})") from error


def replay(events: Events) -> ReplayedRun:
    """Run a log through a fresh scheduler. Raises ConfigError on a log that cannot be replayed."""
    stream = iter(events)
    start = next(stream, None)
    if start is None or start.get("event") != "start":
        raise ConfigError("not an event log of this version: it does not begin with a start event")
    table, model = restore(start["latency"])
    config = SchedulerConfig(**start["config"])
    replayed = ReplayedRun(config, table, model, start["kv_tokens"], start["block_tokens"])
    block_managers = [BlockManager(replayed.kv_tokens, replayed.block_tokens) for _ in range(config.kv_parallel)]
    exchange = ShardExchangeCost(*start["exchange"]) if "exchange" in start else exchange_of(table.source)
    run = _ReplayState(replayed, make_scheduler(config, model, block_managers, exchange), model, exchange)
    for event in stream:
        try:
            getattr(run, f"on_{event['event']}")(event)
        except (KeyError, AttributeError) as error:
            raise ConfigError(f"the event {event!r} cannot be replayed: {error}") from error
        # after the first difference the two schedulers diverge: more of them carry no information
        if len(replayed.differences) >= 10:
            break
    run.finish()
    return replayed


class _ReplayState:
    """The state of one replay. `on_<event>` applies an event of the log."""

    def __init__(
        self, replayed: ReplayedRun, scheduler: InstanceScheduler, model: LatencyModel, exchange: ShardExchangeCost
    ) -> None:
        self.replayed, self.scheduler, self.model, self.exchange = replayed, scheduler, model, exchange
        # by batch id: the batch and when it was scheduled
        self.batches: dict[int, tuple[Batch, float]] = {}
        # by request id: the request, times of its chunks, times of its tokens
        self.requests: dict[str, tuple[Request, list[float], list[float]]] = {}
        # end of the latest batch; None while the engine is idle
        self.done_s: float | None = None

    def on_add(self, event: Mapping[str, Any]) -> None:
        request = Request(
            id=event["request"],
            arrival_s=event["arrival_s"],
            prompt_tokens=event["prompt"],
            max_output_tokens=event["max_output"],
            slo=Slo(ttft_s=event["ttft_s"], tbt_s=event["tbt_s"]),
            priority=event["priority"],
        )
        # time before this request came is no host time
        if self.scheduler.idle:
            self.done_s = None
        self.scheduler.add(Span.whole(request), event["at_s"])
        self.requests[request.id] = (request, [], [])

    def on_abort(self, event: Mapping[str, Any]) -> None:
        self.scheduler.abort(event["request"], event["at_s"])
        self._record(event["request"], None, "aborted")

    def on_schedule(self, event: Mapping[str, Any]) -> None:
        batch = self.scheduler.schedule(event["at_s"], 1, event.get("free"))
        if batch is None or batch.id != event["id"]:
            self.replayed.differences.append(f"batch {event['id']} was scheduled, and here {batch and batch.id}")
            return
        self.batches[batch.id] = (batch, event["at_s"])
        for chunk in (chunk for part in batch.parts for chunk in part.prefills):
            self.requests[chunk.request][1].append(event["at_s"])

    def on_batch(self, event: Mapping[str, Any]) -> None:
        # its schedule event differed already
        if event["id"] not in self.batches:
            return
        batch, at_s = self.batches.pop(event["id"])
        chunks = [chunk for part in batch.parts for chunk in part.prefills]
        ours = (
            sum(part.decodes.count for part in batch.parts),
            sum(part.decodes.kv_sum for part in batch.parts),
            [[chunk.request, chunk.start, chunk.tokens] for chunk in chunks],
        )
        recorded = (event["decodes"], event["kv_sum"], [list(chunk) for chunk in event["chunks"]])
        if ours != recorded:
            self.replayed.differences.append(f"batch {batch.id} was {recorded}, and here {ours}")
        # same batch, other prediction: the latency model was corrected differently
        elif abs(batch.predicted_s - event["predicted_s"]) > 1e-9:
            self.replayed.differences.append(
                f"batch {batch.id} was to take {event['predicted_s']}, here {batch.predicted_s}"
            )
        waited_s = max(0.0, at_s - self.done_s) if self.done_s is not None else 0.0
        times = BatchTimes(event["predicted_s"], self._profile_s(batch), event["elapsed_s"], waited_s)
        self.replayed.batches.append(times)
        self.done_s = event["at_s"]
        ended = set(event["ended"])
        decoded = [name for part in batch.parts for name in part.decodes.members]
        for name in (*decoded, *(chunk.request for chunk in chunks if chunk.last)):
            if name in self.requests:
                self.requests[name][2].append(event["at_s"])
                if name in ended:
                    self._record(name, event["at_s"], None)
        results = [RequestProgress(name, 1, True) for name in event["ended"]]
        self.scheduler.complete(batch.id, results, event["at_s"], event["elapsed_s"])

    def on_lost(self, event: Mapping[str, Any]) -> None:
        self.batches.clear()
        self.scheduler.lost(0, event["at_s"])

    def _profile_s(self, batch: Batch) -> float:
        return parts_s(self.replayed.table, batch.parts, self.exchange)

    def _record(self, name: str, finish_s: float | None, error: str | None) -> None:
        request, scheduled, tokens = self.requests.pop(name, (None, [], []))
        if request is None:
            return
        self.replayed.records.append(
            RequestRecord(
                id=name,
                klass="long" if request.prompt_tokens > self.replayed.config.long_tokens else "short",
                arrival_s=request.arrival_s,
                prompt_tokens=request.prompt_tokens,
                output_tokens=len(tokens),
                scheduled_s=scheduled[0] if scheduled else None,
                token_s=tuple(tokens),
                finish_s=finish_s,
                error=error,
            )
        )

    def finish(self) -> None:
        for name in list(self.requests):
            self._record(name, None, "unfinished")
