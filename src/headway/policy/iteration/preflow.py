"""Aged weighted shortest remaining prefill first, as PREFLOW (vllm-ascend pull request 16360): a baseline.

Its priority is 2^(age / D) / (P · R), with P the work of the whole prefill and R what is left. The logarithm of its
inverse is a line in time, the same slope for all. Departures: work is predicted seconds here, attention's n(n + 1) / 2
there; the default of D there is not known to us.
"""

from __future__ import annotations

from math import log2

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine

DOUBLING_S = 5.0
"""D: waiting so many seconds doubles a request's priority."""


class PreflowPolicy:
    """The least product of whole and remaining work first; a request gains by its age."""

    name = "preflow"
    parallel = True

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        # Work of nothing (all cached) would have no logarithm.
        work = max(facts.total_s, 1e-9) * max(facts.remaining_s, 1e-9)
        return UrgencyLine(log2(work) + facts.arrival_s / DOUBLING_S, 1.0 / DOUBLING_S)
