"""Targets of decoding requests: the longest gap each allows, and when its next token is due."""

from __future__ import annotations

import heapq

from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.requests import PrefillState


class TbtTargets:
    """Gap targets and due times of the decoding requests of one group, in seconds of one pipeline stage.

    Every decode gains a token in every iteration, so due times of requests with the same target move together: a heap
    by the due time less the target's seconds of all iterations so far never needs an update."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._gap_stages = config.gap_stages
        # With several stages a decode takes part in some iterations only, so its tokens cannot be counted by them.
        self._lends = config.stages == 1
        # Requests by gap target. Few distinct targets exist, so the minimum is cheap.
        self._gaps: dict[float, int] = {}
        # A configured target bounds every gap, whatever is due.
        self._has_due_times = config.t_target_s is None
        # Heaps of (due time of the next token as of iteration 0, request) by seconds a token.
        self._due: dict[float, list[tuple[float, str]]] = {}
        # Decoding requests: seconds a token (negative: a gap target) and heap key. Entries of other keys are stale.
        self.members: dict[str, tuple[float, float]] = {}

    def begin(self, state: PrefillState, aim_s: float, iteration: int) -> None:
        """Add a request that decodes after `iteration`. `aim_s`: seconds a token if it has no target of its own."""
        state.decoding = True
        slo, name = state.request.slo, state.request.id
        if slo.tbt_s is not None:
            # A token passes all stages, and may wait for the first: every stage time gets an equal part of its TBT.
            gap_s = slo.tbt_s / self._gap_stages
            self._gaps[gap_s] = self._gaps.get(gap_s, 0) + 1
            self.members[name] = (-gap_s, 0.0)
            return
        if not self._has_due_times:
            self.members[name] = (0.0, 0.0)
            return
        # Token j is due at deadline + j·aim: the next one, j = generated, as of now.
        key = state.deadline_s + aim_s * (state.generated - iteration)
        self.members[name] = (aim_s, key)
        heap = self._due.setdefault(aim_s, [])
        # Entries of ended requests leave the heap at its top only: drop them all before they outnumber the others.
        if len(heap) > 2 * len(self.members) + 16:
            heap[:] = [entry for entry in heap if self.members.get(entry[1]) == (aim_s, entry[0])]
            heapq.heapify(heap)
        heapq.heappush(heap, (key, name))

    def end(self, state: PrefillState) -> None:
        """Remove a request that no longer decodes, if it did: its KV was evicted."""
        if state.decoding:
            self.leave(state)
            state.decoding = False

    def leave(self, state: PrefillState) -> None:
        """Remove a decoding request that leaves this group. It stays marked as decoding."""
        aim_s, _ = self.members.pop(state.request.id, (0.0, 0.0))
        if aim_s < 0:
            left = self._gaps[-aim_s] - 1
            if left:
                self._gaps[-aim_s] = left
            else:
                del self._gaps[-aim_s]

    @property
    def asked(self) -> bool:
        """Whether a request that decodes has asked for a longest gap."""
        return bool(self._gaps)

    def least(self, t_target_s: float) -> float:
        """Return the shortest gap target, at most `t_target_s`."""
        return min(t_target_s, min(self._gaps)) if self._gaps else t_target_s

    def allowed(self, now: float, iteration: int, aim_s: float, longest_s: float) -> float:
        """Return the longest iteration, seconds, at most `longest_s`, that breaks no gap target and lets no token of
        the others become overdue.

        `aim_s` is allowed by requests without a gap target in any case: a late one gains no time by shorter chunks."""
        allowed_s = self.least(longest_s) if self._gaps else longest_s
        for each_s, heap in list(self._due.items()):
            while heap and self.members.get(heap[0][1]) != (each_s, heap[0][0]):
                heapq.heappop(heap)
            if not heap:
                del self._due[each_s]
                continue
            spare_s = heap[0][0] + each_s * iteration - now if self._lends else 0.0
            allowed_s = min(allowed_s, max(aim_s, spare_s))
        return allowed_s
