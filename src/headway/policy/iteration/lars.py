"""Length-aware relative slack (Medha §4.1): rho = (a + d - t - w(t)) / w_total, the smallest first.

Kept literal, with its sign: requests that are late are ordered by how late they are for their size. On the paper's
own example it misses both short deadlines (6.20 s and 6.21 s against 6.0); EDF and LRS meet them. What makes it
serve chats at once beside a document is space sharing in `chunk_allocation`, not the order alone.
"""

from __future__ import annotations

from headway.policy.iteration.ordering import PrefillFacts, UrgencyLine


class LarsPolicy:
    """The least slack per unit of work first."""

    name = "lars"
    parallel = False

    def line(self, facts: PrefillFacts) -> UrgencyLine:
        # rho = (deadline - remaining) / total - now / total. A fully cached prompt has no work: avoid division by 0.
        total = max(facts.total_s, 1e-9)
        return UrgencyLine((facts.deadline_s - facts.remaining_s) / total, 1.0 / total)
