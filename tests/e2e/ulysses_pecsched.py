"""PecSched whose groups compute Ulysses attention, whatever it costs: for tests of live clusters, by dotted path."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.policy.placement.contract import Action, ClusterSnapshot, CommitSpans, Event
from headway.policy.placement.pecsched import PecSched, PecSchedOptions


class UlyssesPecSched(PecSched):
    """See the module."""

    Options = PecSchedOptions

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        """See `PlacementPolicy`."""
        return [_with_ulysses(action) for action in super().on_event(event, view)]


def _with_ulysses(action: Action) -> Action:
    if not isinstance(action, CommitSpans):
        return action
    replace = msgspec.structs.replace
    spans = (
        replace(span, strategy=replace(span.strategy, attn="ulysses")) if len(span.group) > 1 else span
        for span in action.spans
    )
    return replace(action, spans=tuple(spans))
