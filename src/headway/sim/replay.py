"""Replay of a live run: the engine's event log through a fresh scheduler, which must decide the same again.

The log (`headway serve --event-log FILE`, JSON lines) begins with `start` (settings, KV pool of a group, latency model,
exchange between KV groups if any, order of eviction of a prefix cache) and has one line for each request added (with
the keys of its blocks, for the cache) or aborted, each batch scheduled (with the groups that were `free`, if not all),
each batch interrupted, and each batch done (over all of its parts, with the keys of blocks that answers have filled).
The log of the vLLM plug-in has more lines (`hosted_replay`). A difference means that the scheduler depends on something
that is not in the log, or that its code has changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError
from headway.core.events import RequestEvent
from headway.core.span import Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import load_s
from headway.perf.latency.corrected import load_terms
from headway.perf.latency.parts import batch_loads
from headway.perf.latency.recorded import restore
from headway.perf.latency.shard_exchange import ShardExchangeCost, exchange_of
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.grouped_scheduler import group_policies, make_scheduler
from headway.policy.iteration.prefix_caches import make_prefix_cache
from headway.sim.hosted_replay import HostedReplay
from headway.sim.replayed_run import (
    BatchTimes,
    ReplayedChunk,
    ReplayedPreemption,
    ReplayedRun,
    ReplayedStep,
    RequestTimes,
    limit_of_chunk,
    request_of,
    short_of_kv,
    waiting_rules,
)

Events = Iterable[Mapping[str, Any]]


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


def replay(events: Events, detail: bool = False) -> ReplayedRun:
    """Run a log through a fresh scheduler. Raises ConfigError on a log that cannot be replayed.

    `detail`: keep `ReplayedRun.steps`, what each iteration held and why."""
    stream = iter(events)
    start = next(stream, None)
    if start is None or start.get("event") != "start":
        raise ConfigError("not an event log of this version: it does not begin with a start event")
    try:
        table, model = restore(start["latency"])
        config = SchedulerConfig.of_fields(start["config"])
        run = ReplayedRun(config, table, model, start["kv_tokens"], start["block_tokens"])
        run.engine, run.asynchronous = start.get("engine", run.engine), start.get("asynchronous", False)
        state = HostedReplay(run, start["blocks"], detail) if run.engine == "vllm" else _ReplayState(run, start, detail)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the log's start event cannot be read: {error}") from error
    for event in stream:
        if event.get("event") == "missing":
            raise ConfigError(f"{event.get('lines')} lines are missing from the log: its disk took none for a while")
        try:
            getattr(state, f"on_{event['event']}")(event)
        except (KeyError, AttributeError) as error:
            raise ConfigError(f"the event {event!r} cannot be replayed: {error}") from error
        if run.diverged:
            break
    state.times.finish()
    return run


class _ReplayState:
    """The state of one replay of the native engine. `on_<event>` applies an event of the log."""

    def __init__(self, replayed: ReplayedRun, start: Mapping[str, Any], detail: bool) -> None:
        self.replayed, self.detail = replayed, detail
        config, model = replayed.config, replayed.model
        eviction, size = start.get("eviction"), replayed.block_tokens
        # None: the engine had no prefix cache.
        self.cache = None if eviction is None else make_prefix_cache(eviction, model, size)
        self.managers = [BlockManager(replayed.kv_tokens, size, self.cache) for _ in range(config.kv_parallel)]
        # Keys of the blocks of each request's text, for those that use the cache.
        self.keys: dict[str, list[str]] = {}
        exchange = start.get("exchange")
        self.exchange = exchange_of(replayed.table.source) if exchange is None else ShardExchangeCost(*exchange)
        self.scheduler = make_scheduler(config, model, self.managers, self.exchange)
        self.times = RequestTimes(replayed)
        # by batch id: the batch, when it was scheduled, the shortest aim, and why others had to wait
        self.batches: dict[int, tuple[Batch, float, float, dict[str, str]]] = {}
        # end of the latest batch; None while the engine is idle
        self.done_s: float | None = None
        # arrival at an idle engine, until its first batch ends
        self.woken_at_s: float | None = None

    @property
    def policies(self) -> list[IterationPolicy]:
        return group_policies(self.scheduler)

    def on_add(self, event: Mapping[str, Any]) -> None:
        # time before this request came is no host time
        if self.scheduler.idle:
            self.done_s, self.woken_at_s = None, event["at_s"]
        request = request_of(event)
        if self.cache is not None and "keys" in event:
            keys = self.keys[request.id] = list(event["keys"])
            cached = self.cache.register(request.id, keys, request.prompt_tokens)
            if cached != request.cached_tokens:
                self.replayed.differences.append(
                    f"{request.id} found {request.cached_tokens} tokens cached, and here {cached}"
                )
        self.scheduler.add(Span.whole(request), event["at_s"])
        self.times.arrived(request)

    def on_refuse(self, event: Mapping[str, Any]) -> None:
        request = request_of(event)
        predicted_s = self.scheduler.predicted_ttft_s(request, event["at_s"])
        if abs(predicted_s - event["predicted_s"]) > 1e-9:
            self.replayed.differences.append(
                f"{request.id} was predicted to wait {event['predicted_s']} s, and here {predicted_s} s"
            )
        self.times.refused(request, event["predicted_s"])

    def on_abort(self, event: Mapping[str, Any]) -> None:
        self._apply(self.scheduler.abort(event["request"], event["at_s"]))
        self.times.ended(event["request"], None, "aborted")

    def on_schedule(self, event: Mapping[str, Any]) -> None:
        now, rules = event["at_s"], dict[str, str]()
        aim_s = min(policy.budget_s(now) for policy in self.policies) if self.detail else 0.0
        batch = self.scheduler.schedule(event["at_s"], 1, event.get("free"))
        if batch is None or batch.id != event["id"]:
            self.replayed.differences.append(f"batch {event['id']} was scheduled, and here {batch and batch.id}")
            return
        if self.detail:
            chosen = {chunk.request for part in batch.parts for chunk in part.prefills}
            for policy in self.policies:
                rules |= waiting_rules(policy, chosen, now)
        self.batches[batch.id] = (batch, now, aim_s, rules)
        for chunk in (chunk for part in batch.parts for chunk in part.prefills):
            self.times.scheduled(chunk.request, event["at_s"])

    def on_batch(self, event: Mapping[str, Any]) -> None:
        # its schedule event differed already
        if event["id"] not in self.batches:
            return
        batch, at_s, aim_s, rules = self.batches.pop(event["id"])
        self._compare(batch, event)
        chunks = [chunk for part in batch.parts for chunk in part.prefills]
        if self.detail:
            self.replayed.steps.append(self._step(batch, at_s, aim_s, rules, event))
        waited_s = max(0.0, at_s - self.done_s) if self.done_s is not None else 0.0
        woken_s = event["at_s"] - self.woken_at_s if self.woken_at_s is not None else None
        loads = batch_loads(self.replayed.table, batch.parts, self.exchange)
        profile_s = max(load_s(self.replayed.table, load) for load in loads)
        terms = load_terms(self.replayed.table, loads[0]) if len(loads) == 1 else None
        self.replayed.batches.append(
            BatchTimes(event["predicted_s"], profile_s, event["elapsed_s"], waited_s, terms, woken_s)
        )
        self.done_s, self.woken_at_s = event["at_s"], None
        ended = set(event["ended"])
        decoded = [name for part in batch.parts for name in part.decodes.members]
        for name in (*decoded, *(chunk.request for chunk in chunks if chunk.last)):
            self.times.token(name, event["at_s"])
            if name in ended:
                self.times.ended(name, event["at_s"], None)
        for name, key in event.get("filled", {}).items():
            self.keys[name].append(key)
        results = [RequestProgress(name, 1, True) for name in event["ended"]]
        self._apply(self.scheduler.complete(batch.id, results, event["at_s"], event["elapsed_s"]))

    def on_interrupt(self, event: Mapping[str, Any]) -> None:
        # its schedule event differed already
        if self.batches.pop(event["id"], None) is None:
            return
        self.done_s, self.woken_at_s = event["at_s"], None
        self._apply(self.scheduler.interrupted(event["id"], event["at_s"]))

    def on_lost(self, event: Mapping[str, Any]) -> None:
        self.batches.clear()
        self._apply(self.scheduler.lost(0, event["at_s"]))

    def _compare(self, batch: Batch, event: Mapping[str, Any]) -> None:
        """Note where a batch is not the recorded one."""
        ours = (
            sum(part.decodes.count for part in batch.parts),
            sum(part.decodes.kv_sum for part in batch.parts),
            [[chunk.request, chunk.start, chunk.tokens] for part in batch.parts for chunk in part.prefills],
        )
        recorded = (event["decodes"], event["kv_sum"], [list(chunk) for chunk in event["chunks"]])
        if ours != recorded:
            self.replayed.differences.append(f"batch {batch.id} was {recorded}, and here {ours}")
        # same batch, other prediction: the latency model was corrected differently
        elif abs(batch.predicted_s - event["predicted_s"]) > 1e-9:
            self.replayed.differences.append(
                f"batch {batch.id} was to take {event['predicted_s']}, here {batch.predicted_s}"
            )

    def _step(
        self, batch: Batch, at_s: float, aim_s: float, rules: dict[str, str], event: Mapping[str, Any]
    ) -> ReplayedStep:
        config, policies = self.replayed.config, self.policies
        chunks = []
        for part in batch.parts:
            holders = policies[part.group].holders
            for chunk in part.prefills:
                state = holders.get(chunk.request)
                remaining = chunk.tokens if state is None or chunk.last else state.known - chunk.start
                limit = limit_of_chunk(config, chunk.tokens, remaining, part.tokens, config.kv_parallel > 1)
                chunks.append(ReplayedChunk(chunk.request, chunk.start, chunk.tokens, remaining, chunk.last, limit))
        return ReplayedStep(
            batch.id,
            at_s,
            # stages compute one after another: the batch begins with the first
            min([stages[0][0] for *_, stages in event.get("parts", ()) if stages], default=event["at_s"]),
            event["at_s"],
            event["predicted_s"],
            aim_s,
            frozenset(name for part in batch.parts for name in part.decodes.members),
            tuple(chunks),
            short_of_kv(policies),
            sum(each.used_tokens for each in self.managers),
            rules,
        )

    def _apply(self, events: Iterable[RequestEvent]) -> None:
        self.replayed.preemptions.extend(
            ReplayedPreemption(one.request, one.at_s, one.tokens) for one in events if one.kind == "preempted"
        )
