"""The TBT promises of those who decode: an iteration keeps to the shortest."""

from __future__ import annotations

from headway.policy.iteration.prefill import PrefillState


class TbtTargets:
    """Seconds of one stage, with how many requests each was promised to."""

    def __init__(self, stages: int) -> None:
        self._stages = stages
        self.held: dict[float, int] = {}

    def begin(self, state: PrefillState) -> None:
        """The request decodes from now on."""
        state.decoding = True
        tbt_s = state.request.slo.tbt_s
        if tbt_s is not None:
            per_stage = tbt_s / self._stages
            self.held[per_stage] = self.held.get(per_stage, 0) + 1

    def end(self, state: PrefillState) -> None:
        """It does not, or has ended."""
        if state.decoding:
            self.leave(state)
            state.decoding = False

    def leave(self, state: PrefillState) -> None:
        """It decodes elsewhere."""
        tbt_s = state.request.slo.tbt_s
        if tbt_s is not None:
            per_stage = tbt_s / self._stages
            left = self.held.get(per_stage, 0) - 1
            if left > 0:
                self.held[per_stage] = left
            else:
                self.held.pop(per_stage, None)

    def least(self, t_target_s: float) -> float:
        """The shortest of these and the aim."""
        return min(t_target_s, min(self.held)) if self.held else t_target_s
