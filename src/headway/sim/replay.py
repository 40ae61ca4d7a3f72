"""Replay of a live run, native or inside vLLM: its event log through a fresh scheduler, which must decide the same
again.

The log (`headway serve --event-log FILE`, JSON lines) begins with `start` (settings, KV pool of a group, latency model,
exchange between KV groups if any, order of eviction of a prefix cache) and has one line for each request added (with
the keys of its blocks, for the cache) or aborted, each batch scheduled (with the groups that were `free`, if not all),
and each batch done (over all of its parts, with the keys of blocks that answers have filled).
The log of the vLLM plug-in has more lines. A difference means that the scheduler depends on something
that is not in the log, or that its code has changed since.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from headway.control.log import SCHEMA
from headway.control.log import read_log as read_decisions
from headway.core.batch import Batch, RequestProgress
from headway.core.errors import ConfigError, reading
from headway.core.files import read_lines
from headway.core.logs import numbered_lines
from headway.core.request import Request, RequestEvent, Slo, Span
from headway.kv.block_manager import BlockManager
from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.perf.latency.corrected import LoadTerms, load_terms, restore
from headway.perf.latency.groups import ShardExchangeCost, batch_loads, exchange_of
from headway.perf.latency.table import TableLatency
from headway.policy.hosted.driver import PolicyDriver, ReservedKvPool, StepPlan
from headway.policy.iteration.admission import make_prefix_cache
from headway.policy.iteration.config import LONG_TOKENS, SchedulerConfig
from headway.policy.iteration.decision import IterationPolicy
from headway.policy.iteration.groups import group_policies, make_scheduler
from headway.policy.iteration.ordering import LADDER
from headway.policy.placement.contract import ClusterInstance
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
    woken_s: float | None = None
    """From the arrival at an engine that had nothing to do to the end of this, its first iteration then."""
    terms: LoadTerms | None = None
    """By the profile; None where several KV groups or a host's own rules made the batch."""


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
        # End of the latest iteration, None while no request is open; and the arrival that ended such a time, until its
        # first iteration ends.
        self._done_s: float | None = None
        self._woken_at_s: float | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._open

    def arrived(self, request: Request, at_s: float) -> None:
        """Note a new request."""
        # time before a request came is no host time
        if not self._open:
            self._done_s, self._woken_at_s = None, at_s
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

    def iteration(self, begun_s: float, ended_s: float) -> tuple[float, float | None]:
        """Note an iteration; return its `BatchTimes.waited_s` and `BatchTimes.woken_s`. Called before its requests end.

        begun_s: when the engine itself had no more to do for it."""
        waited_s = max(0.0, begun_s - self._done_s) if self._done_s is not None else 0.0
        woken_s = ended_s - self._woken_at_s if self._woken_at_s is not None else None
        self._done_s, self._woken_at_s = ended_s, None
        return waited_s, woken_s

    def refused(self, request: Request, predicted_s: float, at_s: float) -> None:
        """Make the record of a request that was refused on arrival for its predicted time to first token."""
        asked_s = request.slo.ttft_s
        self.arrived(request, at_s)
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


# Replay of a hosted policy's log (`policy.hosted.log`): the vLLM plug-in's decisions, without vLLM.
#
# The host's answers about blocks come from the log. Each decision must be the recorded one, with the same prediction.

Event = Mapping[str, Any]


class _HostRequest:
    """The attributes of vLLM's request that a driver reads."""

    def __init__(self, facts: Request) -> None:
        self.request_id = facts.id
        self.num_tokens = facts.prompt_tokens
        self.num_computed_tokens = facts.cached_tokens
        self.is_prefill_chunk = True


class _RecordedStep:
    """One step from its decision to its results."""

    def __init__(self, event: Event, plan: StepPlan, aim_s: float | None) -> None:
        self.event, self.plan, self.aim_s = event, plan, aim_s
        self.load = BatchLoad()
        self.chunks: tuple[ReplayedChunk, ...] = ()
        self.decodes: frozenset[str] = frozenset()
        # Prompts that had their last chunk in it, and decodes.
        self.yielding: list[str] = []
        self.short_of_kv: dict[str, int] = {}
        self.rules: dict[str, str] = {}


class HostedReplay:
    """The state of one replay. `on_<event>` applies an event of the log."""

    def __init__(self, replayed: ReplayedRun, blocks: int, detail: bool) -> None:
        self.replayed, self.detail, self.blocks = replayed, detail, blocks
        self.times = RequestTimes(replayed)
        # The host's answers in the current event.
        self._free = 0
        self._needs: dict[tuple[str, int], int] = {}
        self._driver = self._make_driver()
        self._requests: dict[str, _HostRequest] = {}
        self._decisions: dict[int, _RecordedStep] = {}

    def _make_driver(self) -> PolicyDriver:
        run = self.replayed
        pool = ReservedKvPool(
            self.blocks,
            run.kv_tokens,
            lambda: self._free,
            lambda name, tokens: self._needs.get((name, tokens), 0),
            run.block_tokens,
        )
        return PolicyDriver(IterationPolicy(run.config, run.model, pool), pool)

    def _answers(self, event: Event) -> None:
        """Take over the host's answers."""
        self._free = event.get("free", self._free)
        self._needs = {(name, tokens): blocks for name, tokens, blocks in event.get("needs", ())}

    def on_rebuild(self, _: Event) -> None:
        self._driver = self._make_driver()

    def on_add(self, event: Event) -> None:
        self._answers(event)
        facts = request_of(event)
        running = event.get("running", False)
        request = self._requests[facts.id] = _HostRequest(facts)
        if facts.id not in self.times:  # else the policy was made anew
            self.times.arrived(facts, event["at_s"])
        self._driver.enter(facts, request, running)

    def on_preempt(self, event: Event) -> None:
        self._answers(event)
        request = self._requests[event["request"]]
        request.num_tokens, request.num_computed_tokens, request.is_prefill_chunk = event["tokens"], 0, True
        self._driver.lost(request)
        self.replayed.preemptions.append(ReplayedPreemption(request.request_id, event["at_s"], event["tokens"]))

    def on_end(self, event: Event) -> None:
        name = event["request"]
        self._driver.ended(name)
        self._requests.pop(name, None)
        self.times.ended(name, None, "aborted" if event.get("aborted") else None)

    def on_schedule(self, event: Event) -> None:
        self._answers(event)
        policy = self._driver.policy
        aim_s = policy.budget_s(event["at_s"]) if self.detail else None
        load = event["decodes"], event["rows"], event["kv_sum"]
        barred = frozenset(event.get("barred", ()))
        plan = self._driver.plan(*load, event["at_s"], event["admits_new"], barred)
        step, ours = event["id"], [list(quota) for quota in plan.quotas.items()]
        if ours != [list(quota) for quota in event["quotas"]]:
            self.replayed.differences.append(f"step {step} gave {event['quotas']}, and here {ours}")
        elif plan.predicted_s != event["predicted_s"]:
            self.replayed.differences.append(
                f"step {step} was to take {event['predicted_s']} s, and here {plan.predicted_s} s"
            )
        decision = self._decisions[step] = _RecordedStep(event, plan, aim_s)
        if self.detail:
            decision.short_of_kv = short_of_kv([policy])
            decision.rules = waiting_rules(policy, plan.quotas, event["at_s"])
        # Steps that were never carried out have no further events.
        self._decisions.pop(step - 64, None)

    def on_scheduled(self, event: Event) -> None:
        self._answers(event)
        decision = self._decisions[event["id"]]
        tokens = {name: count for name, _, count, _ in event["chunks"]}
        if self.detail:
            decision.chunks = tuple(self._chunk(decision, chunk, event) for chunk in event["chunks"])
        decision.decodes = frozenset(self._driver.decoding.keys() - set(event.get("left_out", ())))
        decision.yielding = [*decision.decodes, *(name for name, *_, last in event["chunks"] if last)]
        for name, start, count, last in event["chunks"]:
            request = self._requests[name]
            request.num_computed_tokens, request.is_prefill_chunk = start + count, not last
            self.times.scheduled(name, decision.event["at_s"])
        decision.load = self._driver.advance(decision.plan, tokens, event["others"], event["rows"])

    def on_batch(self, event: Event) -> None:
        decision = self._decisions.pop(event["id"], None)
        if decision is None:
            return
        at_s, elapsed_s = event["at_s"], event["elapsed_s"]
        waited = self.times.iteration(at_s - elapsed_s, at_s)
        ended = set(event["ended"])
        for name in sorted(decision.yielding):
            self.times.token(name, at_s)
            if name in ended:
                self.times.ended(name, at_s, None)
        terms = load_terms(self.replayed.table, decision.load, decision.load.chunk_scale or 1.0)
        self.replayed.batches.append(BatchTimes(event["predicted_s"], sum(terms), elapsed_s, *waited, terms))
        if decision.aim_s is not None:
            self.replayed.steps.append(
                ReplayedStep(
                    event["id"],
                    decision.event["at_s"],
                    at_s - elapsed_s,
                    at_s,
                    event["predicted_s"],
                    decision.aim_s,
                    decision.decodes,
                    decision.chunks,
                    decision.short_of_kv,
                    rules=decision.rules,
                )
            )
        self._driver.observed(decision.load, elapsed_s)

    def _chunk(self, decision: _RecordedStep, chunk: tuple[str, int, int, bool], event: Event) -> ReplayedChunk:
        name, start, tokens, last = chunk
        remaining = tokens if last else self._requests[name].num_tokens - start
        rows = event["rows"] + sum(count for _, _, count, _ in event["chunks"])
        other = decision.plan.quotas.get(name) != tokens
        limit = limit_of_chunk(self.replayed.config, tokens, remaining, rows, other)
        return ReplayedChunk(name, start, tokens, remaining, last, limit)


Events = Iterable[Mapping[str, Any]]


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a log. Raises ConfigError for a file or a line that cannot be read."""
    try:
        for _, event in numbered_lines(read_lines(path)):
            yield event
    except (ConfigError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from error


def replay(events: Events, detail: bool = False) -> ReplayedRun:
    """Run a log through a fresh scheduler. Raises ConfigError on a log that cannot be replayed.

    `detail`: keep `ReplayedRun.steps`, what each iteration held and why."""
    stream = iter(events)
    start = next(stream, None)
    if start is None or start.get("event") != "start":
        raise ConfigError("not an event log of this version: it does not begin with a start event")
    with reading("the log's start event cannot be read"):
        table, model = restore(start["latency"])
        config = SchedulerConfig.of_fields(start["config"])
        run = ReplayedRun(config, table, model, start["kv_tokens"], start["block_tokens"])
        run.engine, run.asynchronous = start.get("engine", run.engine), start.get("asynchronous", False)
        state = HostedReplay(run, start["blocks"], detail) if run.engine == "vllm" else _ReplayState(run, start, detail)
    for number, event in enumerate(stream, start=2):
        if event.get("event") == "missing":
            raise ConfigError(f"{event.get('lines')} lines are missing from the log: its disk took none for a while")
        with reading(f"line {number} of the log cannot be replayed"):
            getattr(state, f"on_{event['event']}")(event)
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

    @property
    def policies(self) -> list[IterationPolicy]:
        return group_policies(self.scheduler)

    def on_add(self, event: Mapping[str, Any]) -> None:
        request = request_of(event)
        if self.cache is not None and "keys" in event:
            keys = self.keys[request.id] = list(event["keys"])
            cached = self.cache.register(request.id, keys, request.prompt_tokens)
            if cached != request.cached_tokens:
                self.replayed.differences.append(
                    f"{request.id} found {request.cached_tokens} tokens cached, and here {cached}"
                )
        self.scheduler.add(Span.whole(request), event["at_s"])
        self.times.arrived(request, event["at_s"])

    def on_refuse(self, event: Mapping[str, Any]) -> None:
        request = request_of(event)
        predicted_s = self.scheduler.predicted_ttft_s(request, event["at_s"])
        if abs(predicted_s - event["predicted_s"]) > 1e-9:
            self.replayed.differences.append(
                f"{request.id} was predicted to wait {event['predicted_s']} s, and here {predicted_s} s"
            )
        self.times.refused(request, event["predicted_s"], event["at_s"])

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
        waited = self.times.iteration(at_s, event["at_s"])
        loads = batch_loads(self.replayed.table, batch.parts, self.exchange)
        profile_s = max(load_s(self.replayed.table, load) for load in loads)
        terms = load_terms(self.replayed.table, loads[0]) if len(loads) == 1 else None
        self.replayed.batches.append(BatchTimes(event["predicted_s"], profile_s, event["elapsed_s"], *waited, terms))
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


# What a cluster did, from its logs: that of its router (`headway cluster --event-log FILE`) and, beside it, those of
# its instances' schedulers (FILE.0, FILE.1, …; after a restart FILE.0.1). Times are seconds of the router's clock;
# those of instances on other hosts are as their own clocks had them.


@dataclass(frozen=True)
class GroupSpan:
    """A part of a prompt that a group of instances computed, from its begin or resumption to its end or pause."""

    request: str
    group: tuple[int, ...]
    start: int
    end: int
    start_s: float
    end_s: float
    last: bool
    """Whether the prompt ends with it."""


@dataclass(frozen=True)
class KvTransfer:
    """KV of the request on its way between two instances. Seconds on the log's clock."""

    source: int
    target: int
    start_s: float
    end_s: float


@dataclass
class ClusterRequestLife:
    """One attempt at a request, under the id that the router gave it."""

    request: Request
    end_s: float | None = None
    error: str | None = None


@dataclass
class ClusterLogRun:
    """A run of a cluster."""

    instances: list[ClusterInstance] = field(default_factory=list)
    requests: dict[str, ClusterRequestLife] = field(default_factory=dict)
    spans: list[GroupSpan] = field(default_factory=list)
    transfers: list[tuple[str, KvTransfer]] = field(default_factory=list)
    """(request, slice)."""
    batches: dict[int, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Events of each instance's own log, in order: those of all its processes."""


def open_log(path: Path) -> ClusterLogRun | Iterator[Mapping[str, Any]]:
    """Return the run of a router's log, or the events of an engine's. Raises ConfigError for a file that is neither."""
    return read_cluster(path) if is_cluster_log(path) else read_log(path)


def engine_log(path: Path) -> Iterator[Mapping[str, Any]]:
    """Return the events of an engine's log. Raises ConfigError for a router's, which has no batches."""
    if is_cluster_log(path):
        raise ConfigError(
            f"{path} is the log of a cluster's router; those of its instances' schedulers are {path}.0, {path}.1 and "
            "so on"
        )
    return read_log(path)


def is_cluster_log(path: Path) -> bool:
    """Whether a file begins as a router's log does, of whatever version. Raises ConfigError for an unreadable file."""
    return str(next(read_log(path), {}).get("schema", "")).startswith(SCHEMA.rpartition("/")[0])


def read_cluster(path: Path) -> ClusterLogRun:
    """Read a router's log and those of its instances beside it. Raises ConfigError."""
    run = ClusterLogRun()
    try:
        lines = read_decisions(read_lines(path))[1]
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', error)}") from error
    for number, line in lines:
        with reading(f"{path}: line {number} is not that of a cluster's log"):
            _take(run, line)
    own = re.compile(re.escape(path.name) + r"\.(\d+)(\.\d+)*")
    for file in sorted(path.parent.glob(f"{path.name}.*")):
        match = own.fullmatch(file.name)
        if match is not None:
            run.batches.setdefault(int(match[1]), []).extend(read_log(file))
    return run


def _take(run: ClusterLogRun, line: Mapping[str, Any]) -> None:
    kind, at_s = line["event"], line.get("at_s", 0.0)
    if kind == "instance":
        # others of an instance's lines change its load
        if line["instance"]["id"] == len(run.instances):
            run.instances.append(msgspec.convert(line["instance"], ClusterInstance))
    elif kind == "span":
        tokens, times = (line["start"], line["end"]), (line["began_s"], at_s)
        run.spans.append(GroupSpan(line["request"], tuple(line["group"]), *tokens, *times, line["last"]))
    elif kind == "sent":
        run.transfers.append((line["request"], KvTransfer(line["source"], line["target"], line["began_s"], at_s)))
    elif kind == "decided":
        of, fields = line["of"]
        if of == "RequestArrived":
            request = msgspec.convert(fields["request"], Request)
            run.requests[request.id] = ClusterRequestLife(request)
        elif of in ("RequestFinished", "RequestDropped"):
            life = run.requests[fields["request"]]
            life.end_s, life.error = at_s, fields.get("why")
