"""First come, first served: the default of most engines, and the convoy that Medha §2.5 describes."""

from __future__ import annotations

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine


class FcfsPolicy:
    """Order of arrival. Without chunks a long prompt holds up everything behind it."""

    name = "fcfs"
    parallel = True

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        return UrgencyLine(facts.arrival_s, 0.0)
