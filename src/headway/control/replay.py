"""Replay of a decision log: the same policy is shown what the recorded one was shown, and its decisions are compared.

A policy whose decisions depend on nothing but events, snapshots and its own state decides the same. Where it does not,
`replay` returns the first decision that differs; later ones have no meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, get_args

import msgspec

from headway.control.decision_log import plain, read_log
from headway.core.errors import ConfigError
from headway.policy.placement.base import Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterLinks, ClusterSnapshot, ClusterState

_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


class ReplayDifference(NamedTuple):
    """The first decision that differs."""

    at_s: float
    """Time in the log, in seconds."""
    recorded: object
    """[event, actions] or a wake-up time."""
    replayed: object
    """Likewise."""


def replay(lines: Iterable[bytes | str], make: Callable[[Any], PlacementPolicy]) -> tuple[int, ReplayDifference | None]:
    """Show a policy a log up to its end, or to the first difference. Return the number of decisions that were as
    recorded, and that difference.

    make: makes the policy as the driver made it, from the header's `about`. A torn last line is left out. Raises
    ConfigError, with the line's number, for anything that is no log, or a damaged one.
    """
    header, found = read_log(lines)
    number, decisions = 1, 0
    # a log is input: whatever a damaged line leads to, the header too, is an error of its line
    try:
        policy, state = make(header["about"]), ClusterState([], msgspec.convert(header["links"], ClusterLinks))
        for number, line in found:  # noqa: B007  (the error names it)
            recorded, replayed = _show(policy, state, line)
            # as the log has it: tuples become lists, and numbers take JSON's form
            if recorded != (replayed := msgspec.json.decode(msgspec.json.encode(replayed))):
                return decisions, ReplayDifference(line["t"], recorded, replayed)
            decisions += "event" in line or "wake" in line
    except Exception as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ConfigError(f"line {number} of the log cannot be replayed: {what}") from error
    return decisions, None


def _show(policy: PlacementPolicy, state: ClusterState, line: dict[str, Any]) -> tuple[object, object]:
    """Change the state, or let the policy decide; return the recorded and the new decision (None: there is none)."""
    kind, value = next(iter(line.items()))
    if kind == "instance":
        instance = msgspec.convert(value, ClusterInstance)
        if instance.id < len(state.instances):
            state.remove(instance.id)
        state.add(instance)
        if not line["there"]:
            state.remove(instance.id)
    elif kind == "arrived":
        state.arrived(value)
    elif kind == "event":
        # actions name it
        state.version = line["version"]
        event = msgspec.convert(value[1], _EVENTS[value[0]])
        actions = policy.on_event(event, ClusterSnapshot(state, line["t"]))
        return [value, line["actions"]], [value, [plain(action) for action in actions]]
    elif kind == "wake":
        return value, policy.next_wakeup(line["t"])
    return None, None
