"""Placement policies by name. A new one is a file, and a line here. Those that papers only compare with stand in the
studies (`headway_research`), and are found by name like its commands.

A policy's class or factory takes (context, options). Its options are a `FileSection` in the same module that names its
settings with their defaults and limits; a scenario's `cluster.options` are checked against it. A policy of a user's own
is a class named by its dotted path, with its options' type as its attribute `Options`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Literal

import msgspec
from pydantic import ConfigDict

from headway.core.errors import ConfigError
from headway.core.file_sections import FileSection, validated
from headway.core.parse import is_dotted, load_dotted
from headway.perf.hardware import ModelShape
from headway.perf.latency.groups import GroupLatency, GroupShape, pause_points_of
from headway.policy.placement.contract import PlacementPolicy

DEFAULT = "ladder"
"""The placement of clusters that name none."""
POLICIES: dict[str, tuple[str, str]] = {
    # name: ("module:policy:options", what it does); a module with a dot before it is of this package
    "ladder": (
        ".ladder:LadderPlacement:LadderOptions",
        "one queue, fewest late, shortest first; instances and groups take from it as they run out of work",
    ),
    "fifo": (
        ".baselines:FifoPlacement:FifoOptions",
        "order of arrival: short requests to the instance that is free first, long ones to a group",
    ),
    "fixed-sp": (
        ".baselines:FixedSp:FixedSpOptions",
        "groups of one size; a prompt goes whole to the one that is free first",
    ),
    "context-parallel": (
        ".baselines:context_parallel:ContextParallelOptions",
        "every prompt over all instances, one after another",
    ),
    "jsq": (
        ".baselines:JoinShortestQueue:JsqOptions",
        "replicas with schedulers of their own; a request joins the shortest queue",
    ),
    "tetris": (
        ".tetris:TetrisPlacement:TetrisOptions",
        "chunks on growing groups that fill the gaps between queues (CDSP)",
    ),
    "reservation": (
        "headway_research.pecsched.rivals:ReservationPlacement:ReservationOptions",
        "some instances for long requests only, the others for short ones only",
    ),
    "priority": (
        "headway_research.pecsched.rivals:PriorityPlacement:PriorityOptions",
        "short requests first; a long one when no short one waits on enough instances",
    ),
    "loongserve": (
        "headway_research.loongserve.policy:loongserve:LoongServeOptions",
        "elastic groups for batches of prompts by dynamic programming, scaled down to decode",
    ),
    "pecsched": (
        ".pecsched:PecSched:PecSchedOptions",
        "short prefills on idle replicas, together with long decodes, or in place of long prefills",
    ),
}


class PolicyContext(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a policy besides cluster snapshots: the same for its whole life."""

    latency: GroupLatency
    """Predicted prefill times on groups of instances."""
    shape: ModelShape
    """The model, for the bytes of its KV."""
    rows: int = 0
    """Rows of a span that an instance computes at once (0: all): they decide where a span can be paused."""
    pads_heads: bool = True
    """Whether Ulysses attention works on any group, by padding heads. A live cluster computes a ring in its place where
    heads do not divide evenly, and between tensor-parallel instances: it is no choice there."""
    copies_prefixes: bool = True
    """Whether cached KV can be copied from one instance to another. Live instances use their own only."""
    whole_prompts: bool = False
    """Whether each prompt is computed and decoded in the scheduler of one instance: servers behind HTTP, and live
    instances of role mixed."""

    relative_s: Callable[[int, int], float] | None = None
    """Time of a prompt on an instance, by (instance, tokens), over the mean of all; None: they are equal."""

    def exchanges_heads(self, tp: int, members: int) -> bool:
        """Return whether instances of `tp` ranks, `members` of them in a node, can compute Ulysses attention."""
        return self.pads_heads or (tp == 1 and self.shape.heads_divide(members))

    def pause_interval_s(self, start: int, end: int, group: GroupShape, seconds: float) -> float:
        """Return the longest time between two points where a span of tokens [start, end), which takes `seconds`, can be
        paused."""
        points = pause_points_of(self.latency, start, end, group, self.rows, self.shape.layers)
        return seconds * points.widest_gap


class PolicyOptions(FileSection):
    """Base of all policies' options. What documents a field stands under it."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    mode: Literal["default", "paper"] = "default"
    """`paper` takes the paper literally; `default` has our rulings."""


def names() -> list[str]:
    """Return the names of all policies."""
    return list(POLICIES)


def make_placement(name: str, context: PolicyContext, options: Mapping[str, Any] | None = None) -> PlacementPolicy:
    """Make a policy. Raises ConfigError, which names what is allowed."""
    # modules are imported by name, when asked for: a policy's imports cost nothing to users of another one
    factory, checked = _load(name, 1), _options(name, options or {})
    policy: PlacementPolicy = factory(context, checked)
    return policy


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError unless these are options of the named policy."""
    _options(name, options)


def options_of(name: str) -> type[PolicyOptions]:
    """Return the type of a policy's options, with their defaults."""
    kind: type[PolicyOptions] = _load(name, 2)
    return kind


def _load(name: str, part: int) -> Any:
    """Return the policy's class or factory (part 1), or its options' type (part 2)."""
    if is_dotted(name):
        kind = load_dotted(name, "placement")
        if not (isinstance(kind, type) and callable(getattr(kind, "on_event", None))):
            raise ConfigError(
                f"placement {name!r} must be a class with `on_event(event, view)` and `next_wakeup(now)` "
                "(headway.policy.placement.contract.PlacementPolicy)"
            )
        return kind if part == 1 else getattr(kind, "Options", PolicyOptions)
    if name not in POLICIES:
        raise ConfigError(
            f"unknown placement {name!r}; known are {', '.join(POLICIES)}, and classes by path, package.module.Class"
        )
    parts = POLICIES[name][0].split(":")
    return getattr(import_module(parts[0], __package__), parts[part])


def _options(name: str, options: Mapping[str, Any]) -> Any:
    return validated(options_of(name), dict(options), f"options of {name}")
