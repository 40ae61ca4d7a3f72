"""Decision log of a controller, at its policy's boundary: all that the policy was shown, and what it decided, enough to
let the same policy decide again without driver and backend (`replay`). Beside that, what the instances did.

JSON lines. A header, then lines of these kinds, each named by its first key:

- `put`, `add`, `remove`, `arrived`: a change of the `ClusterState` that policies read.
- `may`: whether a request may be given to an instance that takes no new ones (`ClusterController.may_use`).
- `note`: an act of the driver on the policy.
- `event`: an event, with the policy's `actions` and the time `t`; `wake`: when the policy wants to be woken, asked at
  `t`.
- `span`: a span that has ended, paused or been stopped on its group; `sent`: a KV slice that has arrived. Times are
  `began_s` and `t`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from headway.control.backend import InstanceBackend
from headway.control.controller import ClusterController
from headway.control.queue_entries import SpanEntry
from headway.control.transfer_queue import KvSlice
from headway.core.errors import ConfigError
from headway.policy.placement.base import Action, Event, PlacementPolicy
from headway.policy.placement.view import ClusterInstance, ClusterSnapshot, ClusterState

SCHEMA = "headway.cluster.log/4"
CHANGING = ("free_at_s", "queued", "used", "running", "holder")
"""Fields of an instance that `put` changes."""
_KINDS = ("put", "add", "remove", "arrived", "may", "note", "event", "wake", "span", "sent")
Sink = Callable[[bytes], object]
"""Receives one line, with its line end: a file's `write`."""


class RecordingController(ClusterController):
    """A `ClusterController` that logs what its policy is shown and decides, and what the instances do."""

    def __init__(
        self,
        cluster: ClusterState,
        backend: InstanceBackend,
        policy: PlacementPolicy,
        *,
        sink: Sink,
        about: object = None,
        **options: Any,
    ) -> None:
        """sink: receives the log. about: data of the driver for the log's header, such as how to make the policy again.
        options: see `ClusterController`."""
        self._sink = sink
        # removed instances keep their entry and id, but have no node
        lost = sorted(set(range(len(cluster.instances))).difference(*cluster.by_node.values()))
        header = {"schema": SCHEMA, "instances": cluster.instances, "lost": lost, "links": cluster.links}
        self._write({**header, "about": about})
        cluster.on_change = self._state_changed
        super().__init__(cluster, backend, RecordingPolicy(policy, self._write), **options)

    def _write(self, line: dict[str, Any]) -> None:
        self._sink(msgspec.json.encode(line) + b"\n")

    def _state_changed(self, change: str, what: ClusterInstance | int | float) -> None:
        if change == "put" and isinstance(what, ClusterInstance):
            self._write({"put": what.id, "to": [getattr(what, field) for field in CHANGING]})
        else:
            self._write({change: what})

    def may_use(self, name: str, instance: int) -> bool:
        may = super().may_use(name, instance)
        # of others a replay knows the answer
        if instance in self.state.gone or instance in self.state.closed:
            self._write({"may": may})
        return may

    def note(self, text: str) -> None:
        self._write({"note": text})

    def span_left(self, entry: SpanEntry) -> None:
        for member in (entry, *entry.batched_with):
            span = member.span
            line = {"span": member.owner, "group": member.group, "start": span.start, "end": span.end}
            times = {"began_s": entry.began_s, "t": self.state.now}
            self._write({**line, **times, "last": member.last, "share": entry.share})

    def sent(self, kv_slice: KvSlice, now: float) -> None:
        ends = {"source": kv_slice.source, "target": kv_slice.target}
        self._write({"sent": kv_slice.request, **ends, "began_s": kv_slice.began_s, "t": now})
        super().sent(kv_slice, now)


class RecordingPolicy:
    """A policy that logs its decisions: events with their actions, and wake-up times."""

    def __init__(self, policy: PlacementPolicy, write: Callable[[dict[str, Any]], None]) -> None:
        self._policy, self._write = policy, write

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions = self._policy.on_event(event, view)
        self._write({"event": plain(event), "actions": [plain(action) for action in actions], "t": view.now_s})
        return actions

    def next_wakeup(self, now: float) -> float | None:
        at = self._policy.next_wakeup(now)
        self._write({"wake": at, "t": now})
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
    read = iter(lines)
    try:
        header = msgspec.json.decode(next(read))
        if header["schema"] != SCHEMA:
            raise KeyError(header["schema"])
    except (StopIteration, KeyError, TypeError, UnicodeDecodeError, msgspec.DecodeError):
        raise ConfigError(f"this is no log of a cluster: its first line should name the schema {SCHEMA}") from None
    found: list[tuple[int, dict[str, Any]]] = []
    # number of a line that cannot be read: no error if it is the last one, cut off as it was written
    torn = 0
    for number, text in enumerate(read, start=2):
        if torn:
            raise ConfigError(f"line {torn} of the log cannot be read, and others follow: it is damaged")
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
        except (UnicodeDecodeError, msgspec.MsgspecError):
            torn = number
            continue
        if next(iter(line), None) not in _KINDS:
            raise ConfigError(f"line {number} of the log is not of a cluster's log")
        found.append((number, line))
    return header, found
