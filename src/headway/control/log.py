"""Decision log of a controller: everything that its policy was shown and decided, and the replay that must decide the
same.

Beside that, what the instances did.

Events as `core.logs` writes them; after `start`, with the schema, there are these:

- `instance`: one as policies read it from now on, and whether it is `there`; `arrived`: a request has come.
- `decided`: the event that the policy was told `of`, its `actions` and the snapshot's version; `wake`: when the policy
  wants to be woken.
- `span`: a span that has ended, paused or been stopped on its group; `sent`: a KV slice that has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, get_args

import msgspec

from headway.control.backend import InstanceBackend
from headway.control.controller import ClusterController
from headway.control.entries import ControlledRequest, KvSlice, SpanEntry
from headway.core.errors import ConfigError, reading
from headway.core.logs import EventSink, numbered_lines
from headway.core.request import Request
from headway.policy.placement.contract import (
    Action,
    ClusterInstance,
    ClusterLinks,
    ClusterSnapshot,
    ClusterState,
    Event,
    PlacementPolicy,
)

SCHEMA = "headway.cluster.log/6"
_KINDS = ("instance", "arrived", "decided", "wake", "span", "sent")


class RecordingController(ClusterController):
    """A `ClusterController` that logs what its policy is shown and decides, and what the instances do."""

    def __init__(
        self,
        cluster: ClusterState,
        backend: InstanceBackend,
        policy: PlacementPolicy,
        *,
        sink: EventSink,
        about: object = None,
        **options: Any,
    ) -> None:
        """sink: receives the log. about: data of the driver for the log's header, such as how to make the policy again.
        options: see `ClusterController`."""
        self._write = sink
        sink("start", {"schema": SCHEMA, "links": cluster.links, "about": about})
        super().__init__(cluster, backend, RecordingPolicy(policy, sink), **options)

    def arrive(
        self, request: Request, now: float, backend_state: Any = None, cached: tuple[int, ...] = ()
    ) -> ControlledRequest:
        self._write("arrived", {"at_s": now})
        return super().arrive(request, now, backend_state, cached)

    def span_left(self, entry: SpanEntry) -> None:
        for member in (entry, *entry.batched_with):
            span = member.span
            line = {"request": member.owner, "group": member.group, "start": span.start, "end": span.end}
            times = {"began_s": entry.began_s, "at_s": self.state.now}
            self._write("span", {**line, **times, "last": member.last, "share": entry.share})

    def sent(self, kv_slice: KvSlice, now: float) -> None:
        ends = {"source": kv_slice.source, "target": kv_slice.target}
        self._write("sent", {"request": kv_slice.request, **ends, "began_s": kv_slice.began_s, "at_s": now})
        super().sent(kv_slice, now)


class RecordingPolicy:
    """A policy that logs what it is shown and decides."""

    def __init__(self, policy: PlacementPolicy, sink: EventSink) -> None:
        self._policy, self._write = policy, sink
        self._shown: list[tuple[Any, bool]] = []

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        there = {i for ids in view.by_node.values() for i in ids}
        before, self._shown = self._shown, [(each, each.id in there) for each in view.instances]
        for new, old in zip_longest(self._shown, before):
            if new != old:
                self._write("instance", {"instance": new[0], "there": new[1]})
        actions = self._policy.on_event(event, view)
        decided = {"of": plain(event), "actions": [plain(action) for action in actions]}
        self._write("decided", {**decided, "at_s": view.now_s, "version": view.version})
        return actions

    def next_wakeup(self, now: float) -> float | None:
        at = self._policy.next_wakeup(now)
        self._write("wake", {"wake_s": at, "at_s": now})
        return at


def plain(item: Event | Action) -> list[Any]:
    """Return an event or an action as JSON data: [name of its type, fields]. Requests in spans are named by id."""
    fields = msgspec.to_builtins(item)
    for key in ("spans", "batched_with"):
        for span in fields.get(key, ()):
            span["request"] = span["request"]["id"]
    if fields.get("prefix", 0) is None:
        del fields["prefix"]
    return [type(item).__name__, fields]


def read_log(lines: Iterable[bytes | str]) -> tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]:
    """Return a log's header and its lines, with their numbers; a torn last line is left out. Raises ConfigError, with
    the line's number, for anything that is no log of a cluster, or a damaged one."""
    found: list[tuple[int, dict[str, Any]]] = []
    for number, line in numbered_lines(lines):
        if line.get("event") == "missing":
            raise ConfigError(
                f"line {number} of the log says that the disk did not take {line.get('lines')} lines: what is behind "
                "a gap cannot be decided again"
            )
        if found and line.get("event") not in _KINDS:
            raise ConfigError(f"line {number} of the log is not of a cluster's log")
        found.append((number, line))
    if not found or found[0][1].get("schema") != SCHEMA:
        raise ConfigError(f"this is no log of a cluster: its first line should name the schema {SCHEMA}")
    return found[0][1], found[1:]


# Replay of a decision log: the same policy is shown what the recorded one was shown, and its decisions are compared.
#
# A policy whose decisions depend on nothing but events, snapshots and its own state decides the same. Where it does
# not, `replay` returns the first decision that differs; later ones have no meaning.

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
    decisions = 0
    # a log is input: whatever a damaged line leads to, the header too, is an error of its line
    with reading("line 1 of the log cannot be replayed"):
        policy, state = make(header["about"]), ClusterState([], msgspec.convert(header["links"], ClusterLinks))
    for number, line in found:
        with reading(f"line {number} of the log cannot be replayed"):
            recorded, replayed = _show(policy, state, line)
            # as the log has it: tuples become lists, and numbers take JSON's form
            if recorded != (replayed := msgspec.json.decode(msgspec.json.encode(replayed))):
                return decisions, ReplayDifference(line["at_s"], recorded, replayed)
            decisions += line["event"] in ("decided", "wake")
    return decisions, None


def _show(policy: PlacementPolicy, state: ClusterState, line: dict[str, Any]) -> tuple[object, object]:
    """Change the state, or let the policy decide; return the recorded and the new decision (None: there is none)."""
    kind = line["event"]
    if kind == "instance":
        instance = msgspec.convert(line["instance"], ClusterInstance)
        if instance.id < len(state.instances):
            state.remove(instance.id)
        state.add(instance)
        if not line["there"]:
            state.remove(instance.id)
    elif kind == "arrived":
        state.arrived(line["at_s"])
    elif kind == "decided":
        # actions name it
        state.version = line["version"]
        name, fields = told = line["of"]
        actions = policy.on_event(msgspec.convert(fields, _EVENTS[name]), ClusterSnapshot(state, line["at_s"]))
        return [told, line["actions"]], [told, [plain(action) for action in actions]]
    elif kind == "wake":
        return line["wake_s"], policy.next_wakeup(line["at_s"])
    return None, None
