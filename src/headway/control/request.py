"""The controller's state of one request: its spans, where it is enqueued, and where its KV is."""

from __future__ import annotations

from typing import Any

from headway.control.queue_entries import SchedulerEntry, SpanEntry
from headway.core.request import Request
from headway.core.span import Phase


class ControlledRequest:
    """A request from arrival to end."""

    __slots__ = ("door", "driver", "ended", "entries", "group", "kv_at", "phase", "rejected", "request", "sends",
                 "staying", "tokens")  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.entries: list[SpanEntry] = []  # committed spans, in order
        self.door: SchedulerEntry | None = None  # its queue entry for a scheduler, while it waits there
        self.staying = False  # it is resident in the scheduler of `group`, for `phase`
        self.group: tuple[int, ...] = ()  # after it has left the scheduler: where its KV is
        self.phase: Phase = "all"
        self.tokens = 0  # of its output, as of when it last left a scheduler
        self.sends: dict[int, int] = {}  # target instance of spans that have not begun, by index
        self.kv_at: set[int] = set()  # instances to which all announced KV has been sent
        self.ended = False
        self.rejected = False  # the policy, or a scheduler, refused it: set when it ends
        self.driver: Any = None  # the backend's own state of it

    def places(self) -> set[int]:
        """Return the instances that the request depends on: where its KV is or will be. Slices under way come on top
        (`TransferQueue.ends`)."""
        found = set(self.group) | self.kv_at | set(self.sends.values())
        if self.door is not None:
            found.update(self.door.group)
        for entry in self.entries:
            # a completed span matters only until the request has been resident: from then on `group` has its KV
            if entry.state != "done" or not self.group:
                found.update(entry.group)
        return found
