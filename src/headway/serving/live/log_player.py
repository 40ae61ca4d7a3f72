"""The live page of a recording: a run of an engine or of a cluster, shown as of any of its times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from headway.core.errors import ConfigError
from headway.serving.live.feed import FollowedRequest, LiveFeed

Happening = tuple[float, Callable[[LiveFeed], None]]
"""A time, and what then happens to a feed."""


class RecordedRun(Protocol):
    """A run that has ended."""

    def new_feed(self) -> LiveFeed:
        """Return a feed as at the run's start."""

    def happenings(self) -> Iterable[Happening]:
        """Return all that happened, in any order."""

    def assess(self, request: FollowedRequest) -> None:
        """Set what the scheduler thought of a request without a first token: when it is due, and the work left."""

    def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """Return the JSON of `headway why`. Raises ConfigError."""


class LogPlayer:
    """The `LivePage` of a recording. title: shown in the page's head."""

    def __init__(self, recording: RecordedRun, title: str) -> None:
        """Raises ConfigError for a run in which nothing happened."""
        self._recording, self._title = recording, title
        self._happenings = sorted(recording.happenings(), key=lambda one: one[0])
        if not self._happenings:
            raise ConfigError(f"{title} says of no request and no iteration: there is nothing to show")
        self.span = (self._happenings[0][0], self._happenings[-1][0])
        self._rewinds, self._at_s = 0, self.span[0]
        self._rewind()

    def page(self, after: int, bucket: int, at_s: float | None) -> dict[str, Any]:
        """See `LivePage`. An earlier time than the last one begins anew; `epoch` then differs."""
        at_s = self.span[0] if at_s is None else min(max(at_s, self.span[0]), self.span[1])
        if at_s < self._at_s:
            self._rewinds += 1
            self._rewind()
        while self._place < len(self._happenings) and self._happenings[self._place][0] <= at_s:
            self._happenings[self._place][1](self._feed)
            self._place += 1
        self._at_s = at_s
        self._feed.assess(self._recording.assess)
        body = self._feed.page(at_s, after, bucket)
        return {**body, "title": self._title, "state": "log", "span": self.span, "epoch": self._rewinds}

    async def why(self, request_id: str, under: Sequence[str]) -> dict[str, Any]:
        """See `LivePage`."""
        return self._recording.why(request_id, under)

    def _rewind(self) -> None:
        self._feed = self._recording.new_feed()
        self._place, self._at_s = 0, self.span[0]
