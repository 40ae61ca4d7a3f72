"""Medha's Algorithms 1 and 2 as they are printed (App. A): the reference for the scheduler in mode "paper".

Where the paper is silent: relative slack breaks ties by arrival; a request that gets no tokens is not looked at again
in the same batch (`Requeue` would put it behind the others, against a batch that has only grown); `BinarySearchChunk`
takes a chunk's time as if it ran alone; only long requests share ("Long requests yield time for urgency", Line 6).

The scheduler departs in two things, `ruled`: it also completes a short prompt where the batch with all of it takes no
longer than the target, although the rest alone would; and it looks at no further request once `MAX_UNSCHEDULABLE` have
found no time in all that is left, which bounds a decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from headway.perf.latency.base import BatchLoad, LatencyModel, load_s
from headway.policy.iteration.fill import MAX_UNSCHEDULABLE


class LiteralPrefill(NamedTuple):
    """What the algorithms know of a prefill request."""

    id: str
    kv_size: int
    """Tokens that are computed."""
    remaining: int
    deadline_s: float
    work_s: float
    """Seconds of the rest of its prefill alone: w(t)."""
    total_s: float
    """Seconds of its whole prefill alone."""
    is_long: bool

    def relative_slack(self, now_s: float) -> float:
        """Return s(t) / w_total."""
        return (self.deadline_s - now_s - self.work_s) / self.total_s


class LiteralBatcher:
    """Algorithm 1 over one queue, with Algorithm 2 for its chunks."""

    def __init__(self, latency: LatencyModel, t_target_s: float, ruled: bool = False, rho_max: float = 0.4) -> None:
        self._latency, self._t_target_s, self._ruled, self._rho_max = latency, t_target_s, ruled, rho_max

    def form_next_batch(
        self, prefills: Iterable[LiteralPrefill], decodes: BatchLoad, now_s: float
    ) -> list[tuple[str, int]]:
        """Return (request, tokens) of the prefills of the next batch. prefills: in order of arrival."""
        batch: list[tuple[str, int]] = []
        has_long, refused = False, 0
        load, t_pred_s = decodes, self._predict_s(decodes)
        for request in sorted(prefills, key=lambda r: r.relative_slack(now_s)):
            if t_pred_s >= self._t_target_s or (self._ruled and refused >= MAX_UNSCHEDULABLE):
                break
            tokens = 0 if request.is_long and has_long else self._chunk_size(request, t_pred_s, now_s)
            if self._ruled and not request.is_long:
                whole_s = self._predict_s(self._with(load, request, request.remaining))
                tokens = request.remaining if whole_s <= self._t_target_s else tokens
            if tokens > 0:
                batch.append((request.id, tokens))
                has_long |= request.is_long
                load = self._with(load, request, tokens)
                t_pred_s = self._predict_s(load)
            elif not (request.is_long and (has_long or self._yields(request, now_s))):
                refused += 1
        return batch

    def _with(self, load: BatchLoad, request: LiteralPrefill, tokens: int) -> BatchLoad:
        seconds = self._latency.attention_s(request.kv_size, tokens)
        return load.with_chunk(tokens, seconds, request.kv_size)

    def _chunk_size(self, request: LiteralPrefill, t_current_s: float, now_s: float) -> int:
        """Algorithm 2, from Line 6 on."""
        budget_s = self._t_target_s * (1 - self._yields(request, now_s)) - t_current_s
        # BinarySearchChunk: the largest chunk within the budget
        low, high = 0, request.remaining
        while low < high:
            middle = (low + high + 1) // 2
            alone_s = self._latency.rows_s(middle) + self._latency.attention_s(request.kv_size, middle)
            low, high = (middle, high) if alone_s <= budget_s else (low, middle - 1)
        return low

    def _yields(self, request: LiteralPrefill, now_s: float) -> float:
        """Return the share of an iteration that a long request leaves to others."""
        return min(self._rho_max, max(0.0, request.relative_slack(now_s))) if request.is_long else 0.0

    def _predict_s(self, load: BatchLoad) -> float:
        """PredictTime; an empty batch takes no time (Line 3)."""
        return load_s(self._latency, load) if load.tokens else 0.0
