"""Policies by name. A new one is a file, and a line here.

A policy's class takes (surroundings, options); `Options`, a msgspec struct in the same module, names its settings with
their defaults, and a scenario's `cluster.options` are checked against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from headway.core.decode_errors import allowed
from headway.core.errors import ConfigError
from headway.perf.hardware.shapes import ModelShape
from headway.perf.latency.groups import GroupLatency, GroupShape
from headway.perf.latency.pause_points import edges_of
from headway.policy.placement.base import Placement

POLICIES: dict[str, tuple[str, str]] = {
    "fifo": ("fifo:Fifo", "order of arrival: short requests to the instance that is free first, long ones to a group"),
    "fixed-sp": ("fixed_sp:FixedSp", "groups of one size; a prompt goes whole to the one that is free first"),
    "context-parallel": ("context_parallel:context_parallel", "every prompt over all instances, one after another"),
    "jsq": ("jsq:JoinShortestQueue", "replicas with schedulers of their own; a request joins the shortest queue"),
    "tetris": ("tetris:Tetris", "chunks on growing groups that fill the gaps between queues (CDSP)"),
    "weave": (
        "weave:Weave",
        "Tetris's groups for long prompts; short ones in instances' own iterations, which rings yield to",
    ),
    "reservation": ("reservation:Reservation", "some instances for long requests only, the others for short ones only"),
    "priority": ("priority:Priority", "short requests first; a long one when no short one waits on enough instances"),
    "loongserve": (
        "loongserve.policy:loongserve",
        "elastic groups for batches of prompts by dynamic programming, scaled down to decode",
    ),
    "pecsched": (
        "pecsched.policy:PecSched",
        "short prefills where nobody is, beside long decodes, or in place of long prefills",
    ),
}


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy may know besides the view: predicted prefill times, the model's shape (for KV bytes), and how many
    rows of a span an instance computes at once (0: all), which says where it can be paused."""

    latency: GroupLatency
    shape: ModelShape
    rows: int = 0

    def edge_s(self, start: int, end: int, group: GroupShape, seconds: float) -> float:
        """How long a span of tokens [start, end), which takes so many seconds, computes between two places where it can
        be paused, at most."""
        return seconds * edges_of(self.latency, start, end, group, self.rows, self.shape.layers).widest


class PolicyOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all `Options`. mode: `paper` takes the paper literally; `default` has our rulings."""

    mode: str = "default"

    def __post_init__(self) -> None:
        if self.mode not in ("default", "paper"):
            raise ValueError(f"`mode` must be default or paper, not {self.mode!r}")


def names() -> list[str]:
    """All policies."""
    return list(POLICIES)


def make_placement(name: str, surroundings: Surroundings, options: Mapping[str, Any] | None = None) -> Placement:
    """A new policy; ConfigError names what is allowed."""
    kind, chosen = _load(name), _options(name, options or {})
    made: Placement = kind(surroundings, chosen)
    return made


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless these are options of that policy."""
    _options(name, options)


def options_of(name: str) -> type[PolicyOptions]:
    """The policy's settings, with their defaults."""
    kind: type[PolicyOptions] = import_module(_load(name).__module__).Options
    return kind


def _load(name: str) -> Any:
    if name not in POLICIES:
        raise ConfigError(f"unknown placement {name!r}; known are {', '.join(POLICIES)}")
    module, _, attribute = POLICIES[name][0].partition(":")
    return getattr(import_module(f"headway.policy.placement.{module}"), attribute)


def _options(name: str, options: Mapping[str, Any]) -> Any:
    kind = options_of(name)
    try:
        return msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        hint = allowed(kind, error)
        if not hint.startswith("allowed"):
            hint = f"its options: {', '.join(kind.__struct_fields__)}"
        raise ConfigError(f"options of {name}: {error} ({hint})") from None
