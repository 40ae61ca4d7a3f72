"""A request's life as intervals, each with its cause: why its first token, or its worst gap, came so late.

Reads a replay with its steps (`replay(events, detail=True)`), so a live server, the simulator and the vLLM plug-in are
explained alike. The intervals of a span of time are disjoint and fill it: their seconds sum to the span.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal

from headway.core.errors import ConfigError
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import POLICIES
from headway.sim.calibration import simulate_again
from headway.sim.metrics import RequestRecord, tbt_s, ttft_s
from headway.sim.replay import KvTransfer, ReplayedChunk, ReplayedRun, ReplayedStep
from headway.sim.result import SimResult

Cause = Literal["own chunk", "own token", "KV transfer", "under way", "queued", "no KV", "computed again", "engine"]
"""own chunk: an iteration with tokens of its prompt. own token: an iteration in which it decoded. KV transfer: its KV
was on its way to another instance. under way: the iteration that ran when it came. queued: iterations of others. no KV:
the same, and it was passed over for lack of free blocks. computed again: iterations since its KV was freed. engine: no
iteration ran."""

_ANSWER_PREFIX = re.compile("^(chatcmpl|cmpl|resp)[-_]")

RULES = {
    "ladder": "as few late as possible, then the shortest that harms no other",
    "fcfs": "first come, first served",
    "edf": "earliest deadline first",
    "lrs": "least slack first",
    "srpt": "least work left first",
    "lars": "least slack relative to length first",
}


@dataclass(frozen=True)
class LifeInterval:
    """A part of a request's life with one cause. Seconds on the log's clock."""

    cause: Cause
    start_s: float
    end_s: float
    steps: tuple[int, ...] = ()
    """Numbers of the iterations that it covers."""
    chunk: ReplayedChunk | None = None
    """Its own chunk."""
    beside: tuple[tuple[str, int], ...] = ()
    """Other requests with chunks in these iterations, and their tokens."""
    decodes: int = 0
    """Most decodes of others in one of these iterations."""
    rule: str = ""
    """Why others were before it; of a KV transfer, from where to where."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class RequestExplanation:
    """Why a request's first token and its worst gap came when they did."""

    record: RequestRecord
    cached_tokens: int
    policy: str
    to_first_token: tuple[LifeInterval, ...]
    """Arrival to first token, or to the end of the log where none came. Sums to the TTFT."""
    worst_gap: tuple[LifeInterval, ...]
    """The longest time between two tokens; empty with fewer than two."""
    preemptions: int
    aim_s: float | None
    """Target between two tokens by the settings; None: it is derived from the machine."""

    @property
    def ttft_s(self) -> float | None:
        """None: there was no first token."""
        return self.record.token_s[0] - self.record.arrival_s if self.record.token_s else None


@dataclass(frozen=True)
class RequestSurroundings:
    """What ran while a request lived, and by which rules."""

    steps: Sequence[ReplayedStep]
    policy: str
    aim_s: float | None
    cached_tokens: int = 0
    freed_s: Sequence[float] = ()
    """When its KV was freed."""
    transfers: Sequence[KvTransfer] = ()
    """Moves of its KV between instances."""


def explain(run: ReplayedRun, request_id: str) -> RequestExplanation:
    """Explain one request. Raises ConfigError for an id that the log does not have."""
    name = find({record.id for record in run.records}, request_id)
    record = next(one for one in reversed(run.records) if one.id == name)
    freed_s = [one.at_s for one in run.preemptions if one.request == name]
    around = RequestSurroundings(
        run.steps, run.config.policy, run.config.t_target_s, run.requests[name].cached_tokens, freed_s
    )
    gaps = list(pairwise(record.token_s))
    worst = max(gaps, key=lambda gap: gap[1] - gap[0]) if gaps else None
    return explain_record(record, around, worst)


def explain_record(
    record: RequestRecord, around: RequestSurroundings, worst: tuple[float, float] | None
) -> RequestExplanation:
    """Explain a request by what ran around it. worst: start and end of its worst gap; None: it has no gap."""
    life = _RequestLife(around, record)
    last_s = max([step.end_s for step in around.steps], default=record.arrival_s)
    end_s = record.arrival_s if record.rejected else max(last_s, record.arrival_s)
    first_s = record.token_s[0] if record.token_s else end_s
    return RequestExplanation(
        record=record,
        cached_tokens=around.cached_tokens,
        policy=around.policy,
        to_first_token=tuple(life.intervals(record.arrival_s, first_s)),
        worst_gap=tuple(life.intervals(*worst)) if worst is not None else (),
        preemptions=len(around.freed_s),
        aim_s=around.aim_s,
    )


def find(known: Collection[str], request_id: str, where: str = "the log") -> str:
    """Return the one of the known ids that is meant: the same, or the only one that contains it (servers add prefixes
    and suffixes), with or without the prefix that an answer's id has.

    Raises ConfigError that names some of the ids."""
    if request_id in known:
        return request_id
    close = _containing(known, request_id) or _containing(known, _ANSWER_PREFIX.sub("", request_id))
    if len(close) == 1:
        return close[0]
    some = ", ".join((close or sorted(known))[:5]) or "none"
    what = "several requests have it in their id" if close else f"{where} has no such request"
    raise ConfigError(f"{request_id!r}: {what}; name one of {len(close or known)}, such as {some}")


def _containing(names: Iterable[str], part: str) -> list[str]:
    return sorted(name for name in names if part and part in name)


def shares(intervals: Iterable[LifeInterval]) -> dict[str, float]:
    """Return seconds by cause, the largest first; iterations of others count for each request by its tokens there."""
    found: dict[str, float] = {}
    for one in intervals:
        for label, seconds in _labelled(one):
            found[label] = found.get(label, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def merged(intervals: Iterable[LifeInterval]) -> list[LifeInterval]:
    """Join neighbours of one cause with the same others beside them; own chunks, if the same limit bound them."""
    result: list[LifeInterval] = []
    for one in intervals:
        last = result[-1] if result else None
        same = last is not None and (last.cause, last.rule, _names(last)) == (one.cause, one.rule, _names(one))
        if last is None or not same or (one.chunk and last.chunk and one.chunk.limit != last.chunk.limit):
            result.append(one)
            continue
        chunk = last.chunk
        if chunk is not None and one.chunk is not None:
            chunk = chunk._replace(tokens=chunk.tokens + one.chunk.tokens, last=one.chunk.last)
        tokens = dict(last.beside)
        for name, count in one.beside:
            tokens[name] = tokens.get(name, 0) + count
        result[-1] = replace(
            last,
            end_s=one.end_s,
            chunk=chunk,
            steps=(*last.steps, *(step for step in one.steps if step not in last.steps)),
            beside=tuple(tokens.items()),
            decodes=max(last.decodes, one.decodes),
        )
    return result


def _names(one: LifeInterval) -> frozenset[str]:
    return frozenset(name for name, _ in one.beside)


def _labelled(one: LifeInterval) -> Iterator[tuple[str, float]]:
    """Yield (cause in words, seconds) of an interval."""
    tokens = sum(count for _, count in one.beside)
    if one.cause in ("queued", "own token") and tokens:
        word = "queued behind" if one.cause == "queued" else "iterations with chunks of"
        for name, count in one.beside:
            yield f"{word} {name}", one.seconds * count / tokens
    elif one.cause == "queued":
        yield "queued while only decodes ran", one.seconds
    else:
        yield _WORDS[one.cause], one.seconds


_WORDS: dict[Cause, str] = {
    "own chunk": "its own prefill",
    "own token": "its own decode",
    "KV transfer": "its KV on the way to another instance",
    "under way": "the iteration under way when it came",
    "no KV": "no free KV blocks",
    "computed again": "its KV was freed, others ran",
    "engine": "no iteration ran",
}


class _RequestLife:
    """One request among the steps of a run."""

    def __init__(self, around: RequestSurroundings, record: RequestRecord) -> None:
        self._around, self._record = around, record
        # Several stages: steps overlap, and may end in another order than they began.
        self._steps = sorted(around.steps, key=lambda step: step.start_s)
        self._starts = [step.start_s for step in self._steps]
        self._longest_s = max([step.end_s - step.start_s for step in around.steps], default=0.0)
        self._freed = around.freed_s

    def intervals(self, start_s: float, end_s: float) -> list[LifeInterval]:
        """Return the intervals that fill a span of the request's life, in order."""
        first = bisect_left(self._starts, start_s - self._longest_s)
        steps = [step for step in self._steps[first : bisect_right(self._starts, end_s)] if step.end_s > start_s]
        edges = {start_s, end_s}
        busy = [(one.start_s, one.end_s) for one in steps] + [
            (one.start_s, one.end_s) for one in self._around.transfers
        ]
        edges.update(at_s for pair in busy for at_s in pair if start_s < at_s < end_s)
        result: list[LifeInterval] = []
        # Steps in flight: those that have begun and not ended; few at a time.
        running: list[ReplayedStep] = []
        place = 0
        for left_s, right_s in pairwise(sorted(edges)):
            while place < len(steps) and steps[place].start_s <= left_s:
                running.append(steps[place])
                place += 1
            running = [step for step in running if step.end_s > left_s]
            one = self._interval(left_s, right_s, running)
            last = result[-1] if result else None
            # One step is cut where another begins or ends; its parts belong together.
            if last is not None and replace(one, start_s=last.start_s, end_s=last.end_s) == last:
                result[-1] = replace(last, end_s=right_s)
            else:
                result.append(one)
        return result

    def _interval(self, start_s: float, end_s: float, running: list[ReplayedStep]) -> LifeInterval:
        name = self._record.id
        moving = self._moving(start_s, end_s)
        if not running:
            return moving or LifeInterval("engine", start_s, end_s)
        own = [step for step in running if any(chunk.request == name for chunk in step.chunks)]
        decoding = [step for step in running if name in step.decodes]
        # Of several steps in flight the oldest is the one that is waited for.
        step = min(own or decoding or running, key=lambda one: one.end_s)
        beside: dict[str, int] = {}
        for chunk in step.chunks:
            if chunk.request != name:
                beside[chunk.request] = beside.get(chunk.request, 0) + chunk.tokens
        common = LifeInterval(
            "queued", start_s, end_s, (step.number,), None, tuple(beside.items()), len(step.decodes - {name})
        )
        if own:
            chunk = next(chunk for chunk in step.chunks if chunk.request == name)
            return replace(common, cause="own chunk", chunk=chunk)
        if decoding:
            return replace(common, cause="own token")
        if moving is not None:
            return moving
        if step.decided_s < self._record.arrival_s:
            return replace(common, cause="under way")
        if any(at_s <= step.end_s for at_s in self._freed) and self._lost_at(step):
            return replace(common, cause="computed again")
        if name in step.short_of_kv:
            return replace(common, cause="no KV", rule=f"no KV for {step.short_of_kv[name]} blocks")
        return replace(common, rule=self._rule(step))

    def _moving(self, start_s: float, end_s: float) -> LifeInterval | None:
        """Return the interval as a transfer of its KV, if one was under way."""
        routes = {
            f"from instance {one.source} to {one.target}"
            for one in self._around.transfers
            if one.start_s <= start_s and one.end_s >= end_s
        }
        return LifeInterval("KV transfer", start_s, end_s, rule=", ".join(sorted(routes))) if routes else None

    def _lost_at(self, step: ReplayedStep) -> bool:
        """Whether the request's KV had been freed when a step was decided, and none of it computed again."""
        freed_s = max(at_s for at_s in self._freed if at_s <= step.end_s)
        return not any(
            chunk.request == self._record.id
            for other in self._steps[bisect_left(self._starts, freed_s) :]
            if other.decided_s < step.decided_s
            for chunk in other.chunks
        )

    def _rule(self, step: ReplayedStep) -> str:
        """Return why the prefills of a step were before the request."""
        if not step.chunks:
            return ""
        if self._record.id in step.rules:
            return step.rules[self._record.id]
        return RULES.get(self._around.policy, self._around.policy)


# The same requests under another policy or setting, in the simulator: what a request would have seen.

_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float}


@dataclass(frozen=True)
class CounterfactualOutcome:
    """What a request sees in one simulation."""

    setting: str
    """As it was asked for; "as it ran": the run's own settings."""
    ttft_s: float | None
    worst_gap_s: float | None
    extrapolated: tuple[str, ...] = ()
    """Sizes of iterations in the request's life beyond all that the profile and the run itself measured, in words."""


def outcomes(run: ReplayedRun, request_id: str, settings: Sequence[str]) -> list[CounterfactualOutcome]:
    """Simulate the run's requests as it ran, then under each setting. Raises ConfigError for one that is impossible.

    Iteration times are the run's profile as all of its iterations correct it. Requests that ended before their output
    did are left out, except the one that is asked for."""
    configs = [("as it ran", run.config), *((text, with_setting(run.config, text)) for text in settings)]
    records = sorted((r for r in run.records if r.ok or r.id == request_id), key=lambda record: record.arrival_s)
    place = next(i for i, record in enumerate(records) if record.id == request_id)
    return [
        _outcome(text, run, simulate_again(run, records, config, corrected=True), place) for text, config in configs
    ]


def extrapolated(run: ReplayedRun, result: SimResult, place: int) -> tuple[str, ...]:
    """Return which chunks and histories of the simulated iterations in a request's life, the result's `place`-th, are
    beyond what the run's profile measured and what the run itself had."""
    source, record = run.table.source, result.records[place]
    ran = [chunk for step in run.steps for chunk in step.chunks]
    chunk_top = max([source.chunks[-1][0], *(chunk.tokens for chunk in ran)])
    past_top = max([source.validated_past, *(chunk.start for chunk in ran)])
    until_s = max(record.token_s, default=math.inf)
    chunks = [
        (tokens, start)
        for one in result.iterations
        if one.done_s > record.arrival_s and one.stages[0][0] < until_s
        for _, start, tokens in one.chunks
    ]
    chunk, past = (max(sizes, default=0) for sizes in zip(*chunks, strict=True)) if chunks else (0, 0)
    words = [
        f"{name} of {size:,} tokens, {top:,} measured"
        for name, size, top in (("chunks", chunk, chunk_top), ("histories", past, past_top))
        if size > top
    ]
    return tuple(words)


def with_setting(config: SchedulerConfig, text: str) -> SchedulerConfig:
    """Return the settings with a change such as `fcfs`, `t_target_ms=100` or `edf,rho_max=0`.

    Raises ConfigError for an unknown name or an impossible value."""
    changes: dict[str, Any] = {}
    # Annotations are text, such as "float | None".
    kinds = {
        field.name: _KINDS.get(str(field.type).partition(" ")[0], str)
        for field in fields(config)
        if field.name != "medha"
    }
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals:
            changes["policy"] = name
            continue
        scale = 1.0
        if name.endswith("_ms"):
            name, scale = f"{name.removesuffix('_ms')}_s", 1e-3
        if name not in kinds:
            raise ConfigError(f"--under {text!r}: no such setting {name!r}; there are {', '.join(sorted(kinds))}")
        changes[name] = _value(text, value, kinds[name], scale)
    try:
        return replace(config, **changes)
    except ConfigError as error:
        known = ", ".join(POLICIES)
        raise ConfigError(f"--under {text!r}: {error} (policies: {known}; a setting: t_target_ms=100)") from None


def _value(text: str, value: str, kind: type, scale: float) -> Any:
    try:
        if kind is bool:
            return {"true": True, "false": False}[value.lower()]
        if kind is int:
            return int(value)
        return float(value) * scale if kind is float else value
    except (KeyError, ValueError):
        raise ConfigError(
            f"--under {text!r}: {value!r} is not {'true or false' if kind is bool else 'a number'}"
        ) from None


def _outcome(text: str, run: ReplayedRun, result: SimResult, place: int) -> CounterfactualOutcome:
    record = result.records[place]
    gap_s = max(tbt_s(record), default=None)
    return CounterfactualOutcome(text, ttft_s(record), gap_s, extrapolated(run, result, place))
