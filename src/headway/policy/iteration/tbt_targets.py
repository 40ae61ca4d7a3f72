"""TBT targets of decoding requests: an iteration keeps to the shortest."""

from __future__ import annotations

from headway.policy.iteration.prefill import PrefillState


class TbtTargets:
    """Multiset of the TBT targets of decoding requests, in seconds of one pipeline stage."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        # Number of requests by target. Few distinct targets exist, so the minimum is cheap.
        self.held: dict[float, int] = {}

    def begin(self, state: PrefillState) -> None:
        """Add the target of a request that begins to decode."""
        state.decoding = True
        tbt_s = state.request.slo.tbt_s
        if tbt_s is not None:
            # A token passes all stages, one iteration each: every stage gets an equal part of its TBT.
            per_stage = tbt_s / self._stages
            self.held[per_stage] = self.held.get(per_stage, 0) + 1

    def end(self, state: PrefillState) -> None:
        """Remove the target of a request that no longer decodes, if it did: its KV was evicted."""
        if state.decoding:
            self.leave(state)
            state.decoding = False

    def leave(self, state: PrefillState) -> None:
        """Remove the target of a decoding request that leaves this group. It stays marked as decoding."""
        tbt_s = state.request.slo.tbt_s
        if tbt_s is not None:
            per_stage = tbt_s / self._stages
            left = self.held.get(per_stage, 0) - 1
            if left > 0:
                self.held[per_stage] = left
            else:
                self.held.pop(per_stage, None)

    def least(self, t_target_s: float) -> float:
        """Return the shortest target, at most `t_target_s`."""
        return min(t_target_s, min(self.held)) if self.held else t_target_s
