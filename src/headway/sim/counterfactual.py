"""The same requests under another policy or setting, in the simulator: what a request would have seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from headway.core.errors import ConfigError
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import POLICIES
from headway.sim.calibration import simulate_again
from headway.sim.metrics import tbt_s, ttft_s
from headway.sim.replay import ReplayedRun
from headway.sim.result import SimResult

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
