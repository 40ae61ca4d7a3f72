"""Share of the time that prefills get while requests decode, by measured time: a baseline beside budgets of time.

Weighted virtual runtime of two classes (local-inference-lab/vllm, pull requests 612, 627 and 641). An iteration is the
turn of the prefills, which have the first use of it and in which decodes ride along, or of the decodes alone. Its
measured time is charged to that class. Time counts only while both could run; neither is ahead by more than its last
turn.
"""

from __future__ import annotations

import math

START, LEAST, MOST = 0.4, 0.2, 0.8
"""The automatic share: at first, and its bounds."""
HALF_LIFE_S = 2.0
"""The automatic share covers half the way to its target in so many seconds."""
_SLEW_PER_S = 0.1 / HALF_LIFE_S
_DEADBAND = 0.1


class ComputeShare:
    """Turns of one group. Deterministic: times are arguments."""

    def __init__(self, share: float) -> None:
        """`share`: of the contended time, for prefills; 0: follows the pressure on both classes."""
        self.automatic = share == 0
        self.share = START if self.automatic else share
        # Charged seconds over share: how far prefills are ahead of decodes.
        self._lead_s = 0.0
        # Seconds of a turn of decodes as measured last, and when the last one ended.
        self._decode_turn_s = 0.0
        self._decoded_s: float | None = None
        self._adjusted_s: float | None = None

    def grants(self, decodes: int) -> bool:
        """Whether prefills have the next iteration, in which `decodes` could run. Ties favour decodes."""
        return decodes == 0 or self._lead_s < 0

    def charge(self, prefilled: bool, contended: bool, seconds: float, now: float) -> None:
        """Charge an iteration that ended at `now`. `prefilled`: it had chunks; `contended`: both classes could run."""
        if not contended:
            # Credit earned while nothing else could run is worth nothing later. Decodes go first: a tie.
            self._lead_s, self._decoded_s, self._adjusted_s = 0.0, now, None
            return
        share = self.share
        # A turn of outlying length gives the other class no more than one such turn.
        if prefilled:
            step_s = seconds / share
            self._lead_s = min(self._lead_s + step_s, step_s)
        else:
            step_s = seconds / (1.0 - share)
            self._lead_s = max(self._lead_s - step_s, -step_s)
            self._decode_turn_s, self._decoded_s = seconds, now

    def adjust(self, waited_s: float, work_s: float, now: float) -> None:
        """Move the automatic share. `waited_s`: age of the oldest prefill, `work_s`: what is left of it, seconds.

        Pressure on decodes is the time since their last turn in turns, on prefills the oldest one's age in its work."""
        before, self._adjusted_s = self._adjusted_s, now
        if before is None or self._decoded_s is None or self._decode_turn_s <= 0:
            return
        decode = (now - self._decoded_s) / self._decode_turn_s
        prefill = waited_s / max(work_s, 1e-6)
        if abs(prefill - decode) <= _DEADBAND * max(prefill, decode):
            return
        elapsed_s = max(0.0, now - before)
        way = ((MOST if prefill > decode else LEAST) - self.share) * (1.0 - math.exp2(-elapsed_s / HALF_LIFE_S))
        limit = _SLEW_PER_S * elapsed_s
        self.share = min(MOST, max(LEAST, self.share + min(limit, max(-limit, way))))
