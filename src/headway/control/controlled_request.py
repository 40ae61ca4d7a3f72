"""The controller's state of one request: its spans, where it is enqueued, and where its KV is."""

from __future__ import annotations

from typing import Any

from headway.control.queue_entries import SchedulerEntry, SpanEntry
from headway.core.request import Request
from headway.core.span import Phase
from headway.policy.placement.base import CachedPrefix


class ControlledRequest:
    """A request from arrival to end."""

    __slots__ = ("backend_state", "ended", "entries", "group", "kv_at", "output_tokens", "phase", "prefix", "rejected",
                 "request", "resident", "scheduler_entry", "transfer_targets")  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.entries: list[SpanEntry] = []  # committed spans, in order
        self.scheduler_entry: SchedulerEntry | None = None  # its queue entry for a scheduler, while it waits there
        self.resident = False  # it is resident in the scheduler of `group`, for `phase`
        self.group: tuple[int, ...] = ()  # after it has left the scheduler: where its KV is
        self.phase: Phase = "all"
        self.output_tokens = 0  # as of when it last left a scheduler
        self.transfer_targets: dict[int, int] = {}  # target instance of spans that have not begun, by index
        self.kv_at: set[int] = set()  # instances to which all announced KV has been sent
        self.prefix: CachedPrefix | None = None  # cached KV that its last action copies to its group
        self.ended = False
        self.rejected = False  # the policy, or a scheduler, refused it: set when it ends
        self.backend_state: Any = None  # the backend's own state of it

    def places(self) -> set[int]:
        """Return the instances that the request depends on: where its KV is or will be. Slices under way come on top
        (`TransferQueue.ends`)."""
        found = set(self.group) | self.kv_at | set(self.transfer_targets.values())
        if self.scheduler_entry is not None:
            found.update(self.scheduler_entry.group)
        for entry in self.entries:
            # a completed span matters only until the request has been resident: from then on `group` has its KV
            if entry.state != "done" or not self.group:
                found.update(entry.group)
        return found
