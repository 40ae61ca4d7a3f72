"""Least remaining slack (Medha §4.1): s = a + d - t - w(t), in seconds, whatever the length of the request."""

from __future__ import annotations

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine


class LrsPolicy:
    """The least absolute slack first. All waiting requests lose slack at the same rate; the running one keeps its."""

    name = "lrs"
    parallel = True

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        return UrgencyLine(facts.deadline_s - facts.remaining_s, 1.0)
