"""One request on its way through a cluster: which spans it has, where it is enqueued, and where its KV lies."""

from __future__ import annotations

from typing import Any

from headway.control.queue_entries import SchedulerEntry, SpanEntry
from headway.core.request import Request
from headway.core.span import Phase


class ControlledRequest:
    """entries: committed spans, in order. door: its turn at a scheduler, while it waits. staying: it is in the
    scheduler of `group`, for `phase`; `group` stays where its KV lies when it has left.

    tokens: of its output that are known, as of the end of its last stay. sends: instances that spans which have not
    begun will be sent to, by index. kv_at: instances to which all that was announced has been sent. `driver`: whatever
    the hands keep of it."""

    __slots__ = ("door", "driver", "ended", "entries", "group", "kv_at", "phase", "rejected", "request", "sends",
                 "staying", "tokens")  # fmt: skip

    def __init__(self, request: Request) -> None:
        self.request = request
        self.entries: list[SpanEntry] = []
        self.door: SchedulerEntry | None = None
        self.staying = False
        self.group: tuple[int, ...] = ()
        self.phase: Phase = "all"
        self.tokens = 0
        self.sends: dict[int, int] = {}
        self.kv_at: set[int] = set()
        self.ended = False
        self.rejected = False  # the policy, or a scheduler, refused it: set when it ends
        self.driver: Any = None

    def places(self) -> set[int]:
        """Instances without which it cannot go on as it is: where its KV lies or will be. (Pieces that are under way
        come on top: `Transfers.ends`.)"""
        found = set(self.group) | self.kv_at | set(self.sends.values())
        if self.door is not None:
            found.update(self.door.group)
        for entry in self.entries:
            if entry.state != "done" or not self.group:
                found.update(entry.group)
        return found
