"""First come, first served: the default of most engines, and the convoy that Medha §2.5 describes."""

from __future__ import annotations

from headway.policy.iteration.ordering import Line, PrefillFacts


class Fcfs:
    """Order of arrival. Without chunks a long prompt holds up everything behind it."""

    name = "fcfs"
    parallel = True

    def line(self, facts: PrefillFacts) -> Line:
        return Line(facts.arrival_s, 0.0)
