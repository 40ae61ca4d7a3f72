"""Shortest remaining prefill time first. Not in the papers; ships because it often has the best medians (notes A3).

It can starve long requests under constant short load: that is what LARS is for.
"""

from __future__ import annotations

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine


class SrptPolicy:
    """The least remaining work first."""

    name = "srpt"
    parallel = True

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        return UrgencyLine(facts.remaining_s, 0.0)
