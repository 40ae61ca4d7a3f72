"""Earliest deadline first (Medha §4.1, a straw man there): fine below saturation, a convoy once longs are late."""

from __future__ import annotations

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine


class EdfPolicy:
    """The nearest TTFT deadline first."""

    name = "edf"
    parallel = True

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        return UrgencyLine(facts.deadline_s, 0.0)
