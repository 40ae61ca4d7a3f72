"""Replay of a decision log: the same policy is shown what the recorded one was shown, and its decisions are compared.

A policy whose decisions depend on nothing but events, snapshots and its own state decides the same. Where it does not,
`ReplayResult.run` returns the first decision that differs; later ones have no meaning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from headway.control.decision_log import CHANGING, plain, read_log
from headway.core.errors import ConfigError
from headway.policy.placement.base import Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterLinks, ClusterSnapshot, ClusterState

_EVENTS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class ReplayDifference:
    """The first decision that differs."""

    decision: int
    """Number of decisions before it."""
    at_s: float
    """Time in the log, in seconds."""
    recorded: object
    """[event, actions] or a wake-up time."""
    replayed: object
    """Likewise."""

    def __str__(self) -> str:
        return f"decision {self.decision} at {self.at_s:.6f} s: recorded {self.recorded}, replayed {self.replayed}"


class ReplayResult:
    """A replay: the policy and the log. One `run` for each object."""

    def __init__(
        self,
        lines: Iterable[bytes | str],
        make: Callable[[ReplayResult], PlacementPolicy],
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        """lines: the log; a torn last line is left out. make: makes the policy as the driver made it; called with this
        object, whose `may_use` and `about` are there. on_note: called with each note of the driver. Raises ConfigError,
        with the line's number, for anything that is no log, or a damaged one."""
        header, self._lines = read_log(lines)
        self.about: Any = header["about"]
        # decisions so far, all the same as recorded
        self.decisions = 0
        self._on_note = on_note
        self.state = ClusterState(
            msgspec.convert(header["instances"], list[ClusterInstance]), msgspec.convert(header["links"], ClusterLinks)
        )
        for instance in header["lost"]:
            self.state.remove(instance)
        self._may = deque[bool]()
        self._policy = make(self)

    def may_use(self, name: str, instance: int) -> bool:
        """See `ClusterController.may_use`."""
        there = instance >= len(self.state.instances) or any(instance in ids for ids in self.state.by_node.values())
        # another decision than the recorded one may ask for what was never asked
        return there or (bool(self._may) and self._may.popleft())

    def run(self) -> ReplayDifference | None:
        """Show the policy the log up to its end, and return the first difference; None: all decisions were the same.
        Raises ConfigError, with the line's number, for a line that cannot be replayed."""
        for number, line in self._lines:
            try:
                difference = self._line(line)
            # a log is input: whatever a damaged line leads to is an error of its line
            except Exception as error:
                what = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
                raise ConfigError(f"line {number} of the log cannot be replayed: {what}") from error
            if difference is not None:
                return difference
        return None

    def _line(self, line: dict[str, Any]) -> ReplayDifference | None:
        kind, value = next(iter(line.items()))
        if kind == "event":
            event = msgspec.convert(value[1], _EVENTS[value[0]])
            actions = self._policy.on_event(event, ClusterSnapshot(self.state, line["t"]))
            self._may.clear()
            decided = [value, [plain(action) for action in actions]]
            return self._compare(line["t"], [value, line["actions"]], decided)
        if kind == "wake":
            return self._compare(line["t"], value, self._policy.next_wakeup(line["t"]))
        if kind == "put":
            changed = dict(zip(CHANGING, line["to"], strict=True))
            self.state.put(msgspec.structs.replace(self.state.instances[value], **changed))
        elif kind == "add":
            self.state.add(msgspec.convert(value, ClusterInstance))
        elif kind == "remove":
            self.state.remove(value)
        elif kind == "arrived":
            self.state.arrived(value)
        elif kind == "may":
            self._may.append(value)
        elif kind == "note" and self._on_note is not None:
            self._on_note(value)
        return None

    def _compare(self, at_s: float, recorded: object, decided: object) -> ReplayDifference | None:
        # as the log has it: tuples become lists, and numbers take JSON's form
        decided = msgspec.json.decode(msgspec.json.encode(decided))
        if recorded != decided:
            return ReplayDifference(self.decisions, at_s, recorded, decided)
        self.decisions += 1
        return None
