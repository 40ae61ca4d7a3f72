"""Latency model that corrects itself from measured iteration times; its scales can be recorded, and fitted to a whole
run.

Four scales (fixed cost, rows, decode attention, chunk attention) multiply a base model's terms and follow measurements
by recursive least squares with forgetting. A server that starts on a guess sizes its chunks correctly after some dozens
of iterations, and follows a host that slows down. The fixed cost has its own scale because small iterations
after a pause are slow while large ones are not. Deterministic: the same observations in the same order give the same
scales, so a recorded run replays exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from typing_extensions import override

from headway.core.errors import ConfigError
from headway.perf.latency.base import BatchLoad, LatencyModel, Seconds
from headway.perf.latency.table import FurtherPrompts, TableLatency, TableSource

# Weight of an observation after each further one: a memory of about 200 iterations.
_FORGET = 0.995
# The same for a rough model: about 10, since it is to be right soon.
_FORGET_ROUGH = 0.9
# Bounds of every scale.
FLOOR, CEILING = 0.05, 20.0
_ROUGH = 50.0
"""Rough models may be off by so many times more: a processor's rates may have been measured while others used it."""
_ROUGH_FIXED, _ROUGH_SPEED, _ROUGH_SHARE = 3000.0, 10.0, 1.0
"""Prior variances of a rough model's scales. A surprise is first put down to the fixed cost: threads that wait for each
other cost every iteration the same, and then long chunks are chosen, which tell. Chunks that are small because a token
is thought dear all take equally long, and nothing would be learned. Then to the speed, which rows, decodes and chunks
have in common; last to what one of them has alone."""
_FAR = 3.0
"""Changes of a scale that has grown by so much count relative to it: one that is to become 80 is found in some ten
iterations, not in hundreds."""
_ENOUGH = 0.5
"""Sum of squared shares of remembered iterations from which on a term's own scale is used. A term of 2% of each
iteration would be learned from the others' noise, and then multiply iterations that consist of it."""
_JUDGED, _MEMORY = 20, 0.98
"""After so many iterations, scales are used only while they predict better than the base model alone; what each missed
by counts this much less with each further iteration."""
# Measurements are clipped to this multiple of the prediction.
OUTLIER = 3.0

LoadTerms = tuple[float, float, float, float]
"""Seconds of one iteration by a table: fixed, rows, attention of decodes, attention of chunks."""


def load_terms(base: LatencyModel, load: BatchLoad, chunk_scale: float = 1.0) -> LoadTerms:
    """Return a load's terms by `base`. chunk_scale: that `load.chunk_s` was predicted with."""
    # An iteration of one row is all fixed cost: token_s(0, 0) would leave out reading the weights.
    fixed_s = base.rows_s(1)
    decodes_s = base.decode_s(load.decodes, load.decode_kv) if load.decodes else 0.0
    return fixed_s, base.rows_s(load.tokens) - fixed_s, decodes_s, load.chunk_s / chunk_scale


class CorrectedLatency(LatencyModel):
    """`LatencyModel` = base terms × learned `scales` = (fixed, rows, decodes, chunks).

    Observations above `OUTLIER` times the prediction are clipped to that bound: one descheduled process does not
    shrink every later chunk, while a lasting change is followed over several iterations.
    """

    def __init__(self, base: LatencyModel, confidence: float = 1.0) -> None:
        """Start from scales of 1. confidence: weight of the base model at the start, in observations."""
        self.base = base
        self.confidence = confidence
        self.scales = np.ones(4)
        prior = 1.0 / max(confidence, 1e-6)
        # Covariance of the scales (RLS).
        self._p = np.eye(4) * prior
        if self.rough:
            self._p = np.diag([_ROUGH_FIXED, _ROUGH_SHARE, _ROUGH_SHARE, _ROUGH_SHARE])
            self._p[1:, 1:] += _ROUGH_SPEED
        self._most_trace = max(1.0, 4.0 * prior)
        reach = _ROUGH if self.rough else 1.0
        self._bounds = FLOOR / reach, CEILING * reach
        # What a change of each scale counts relative to.
        self._unit = np.ones(4)
        # An iteration of one row is all fixed cost: token_s(0, 0) would leave out reading the weights.
        self._fixed_s = base.rows_s(1)
        # Of remembered iterations: sum of squared shares of each term, and of shares; errors with the learned scales
        # and with the base model alone.
        self._seen, self._shares = np.zeros(4), np.zeros(4)
        self._missed, self._learned = np.zeros(2), np.ones(4)
        self._observed = 0
        # The scales in use as Python floats: scalar look-ups are on the scheduler's path.
        self._k_fixed = self._k_rows = self._k_decode = self._k_chunk = 1.0

    @property
    def chunk_scale(self) -> float:
        """Current factor of `chunk_s` over the base model's."""
        return self._k_chunk

    @property
    @override
    def rough(self) -> bool:
        """The base model counts for less than one observation."""
        return self.confidence < 1.0

    def token_s(self, first: int, last: int) -> Seconds:
        rows_s = self.base.token_s(first, last) * self._k_rows
        return np.asarray(np.maximum(rows_s + self._fixed_s * (self._k_fixed - self._k_rows), 0.0), dtype=np.float64)

    def rows_s(self, rows: int) -> float:
        return max(self.base.rows_s(rows) * self._k_rows + self._fixed_s * (self._k_fixed - self._k_rows), 0.0)

    def least_rows_s(self, rows: int) -> float:
        return max(self.base.least_rows_s(rows) * self._k_rows + self._fixed_s * (self._k_fixed - self._k_rows), 0.0)

    def chunk_s(self, past: int, first: int, last: int) -> Seconds:
        return self.base.chunk_s(past, first, last) * self._k_chunk

    def attention_s(self, past: int, tokens: int) -> float:
        return self.base.attention_s(past, tokens) * self._k_chunk

    def least_attention_s(self, past: int, tokens: int) -> float:
        return self.base.least_attention_s(past, tokens) * self._k_chunk

    def floor_s(self, rows: int, past: int) -> Callable[[int], float]:
        """The sum of both lower bounds, with what does not depend on the chunk looked up once."""
        table = self.base.floor_table(rows, past)
        if table is None:
            return super().floor_s(rows, past)
        least_rows, own, per_past = table
        k_rows, k_chunk = self._k_rows, self._k_chunk
        fixed_s = self._fixed_s * (self._k_fixed - k_rows)

        def floor_s(tokens: int) -> float:
            rows_s = least_rows[rows + tokens] * k_rows + fixed_s
            return max(rows_s, 0.0) + (own[tokens] + per_past[tokens] * past) * k_chunk

        return floor_s

    def further_prompts(self) -> LatencyModel:
        further = self.base.further_prompts()
        if not isinstance(further, FurtherPrompts):
            return self
        return FurtherPrompts(self, further.share, further.history, self._k_chunk)

    def decode_s(self, decodes: int, kv_sum: int) -> float:
        return self.base.decode_s(decodes, kv_sum) * self._k_decode

    def observe(self, load: BatchLoad, measured_s: float) -> None:
        """Update the scales by one step of recursive least squares.

        `load.chunk_s` is divided by the scale it was predicted with, where the load records it (`decode_load`)."""
        # Base-model seconds of the four terms; their scalar product with `scales` is the prediction.
        x = np.array(load_terms(self.base, load, load.chunk_scale or self._k_chunk))
        predicted = float(x @ self.scales)
        if not (predicted > 0.0 and measured_s > 0.0):  # a NaN would stay for ever
            return
        faster = OUTLIER * measured_s / predicted
        if self.rough and faster < 1.0:
            # No term can take longer than all took: the machine is faster, at everything.
            self._unit = self._unit * faster
            self.scales = self.scales * faster
            predicted *= faster
        terms, took_s = x, measured_s
        measured_s = min(measured_s, OUTLIER * predicted)
        # Relative residuals: a 1 ms decode step counts as much as a 50 ms chunk.
        x, error = x * self._unit / predicted, measured_s / predicted - 1.0
        if error < 0.0:
            # A scale that cannot fall further leaves the error to the others.
            x = np.where(self.scales > self._bounds[0], x, 0.0)
        px = self._p @ x
        # Above 0 also where no scale can fall.
        known = max(float(x @ px), 1e-12)
        gain = px / ((1.0 if self.rough else _FORGET) + known)
        self.scales = np.clip(self.scales + gain * error * self._unit, *self._bounds)
        if self.rough:
            self._unit = np.where(self.scales > _FAR * self._unit, self.scales, self._unit)
            # What a batch does not excite is not forgotten (Kulhavy 1987): the machine's speed stays as it was learned
            # while iterations of one kind follow each other.
            weight = _FORGET_ROUGH - (1.0 - _FORGET_ROUGH) / known
            self._p -= np.outer(px, px) * (weight / (1.0 + weight * known))
        else:
            # Standard RLS with forgetting factor: gain = P x / (lambda + x' P x), P = (P - gain x' P) / lambda. A
            # measured model starts near the truth, and follows a host that slows down faster if it forgets everywhere.
            self._p = (self._p - np.outer(gain, px)) / _FORGET
            # Bound the covariance: it grows where no batch excites it, and one sample would then override a scale.
            trace = float(np.trace(self._p))
            if trace > self._most_trace:
                self._p *= self._most_trace / trace
        self._k_fixed, self._k_rows, self._k_decode, self._k_chunk = (float(s) for s in self._used(terms, took_s))

    def _used(self, terms: npt.NDArray[np.float64], took_s: float) -> npt.NDArray[np.float64]:
        """Return the scales to use after an iteration of these base terms: what was hardly seen follows the whole, so
        that it keeps the base model's shape; 1 while the base model alone predicts better."""
        if self.rough:
            return self.scales
        base_s = float(terms.sum())
        off = np.array([float(terms @ self._learned), base_s]) / took_s - 1.0
        self._missed = self._missed * _MEMORY + np.minimum(np.abs(off), OUTLIER)
        share = terms / base_s
        self._seen, self._shares = self._seen * _FORGET + share * share, self._shares * _FORGET + share
        self._observed += 1
        common = float(self._shares @ self.scales) / float(self._shares.sum())
        self._learned = common + (self.scales - common) * np.minimum(self._seen / _ENOUGH, 1.0)
        better = self._observed <= _JUDGED or bool(self._missed[0] <= self._missed[1])
        return self._learned if better else np.ones(4)


def describe(model: LatencyModel) -> dict[str, Any] | None:
    """Return a table model, corrected or not, as plain data; None for other models.

    Call it before the first `observe`: learned scales are not recorded, a replay learns them again."""
    base = model.base if isinstance(model, CorrectedLatency) else model
    if not isinstance(base, TableLatency):
        return None
    confidence = model.confidence if isinstance(model, CorrectedLatency) else None
    return {"table": msgspec.to_builtins(base.source), "confidence": confidence}


def restore(data: Mapping[str, Any] | None) -> tuple[TableLatency, LatencyModel]:
    """Return (the table, the model as it was at the start). Raises ConfigError when the log does not contain one."""
    if data is None:
        raise ConfigError("the log does not say which latency model the engine used, so it cannot be replayed")
    try:
        table = TableLatency(msgspec.convert(data["table"], TableSource))
        confidence = data["confidence"]
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"the log's latency model cannot be read: {error}") from error
    # `confidence` is None where the run used the table without correction.
    return table, table if confidence is None else CorrectedLatency(table, confidence)


# Scales of a latency table's terms, fitted to all iterations of a run.
#
# `CorrectedLatency` follows the last couple of hundred iterations, so that what it knows at the end of a run is what
# the host did in its last second. What is to hold for another run, or for the whole of this one, is fitted to all of
# it.

_PRIOR = 1.0
"""Weight of scales of 1, in iterations: for terms that hardly occurred."""


def fit_scales(terms: Sequence[LoadTerms], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the scales (fixed, rows, decodes, chunks) by which the `terms` best sum up to what iterations took.

    Least squares of relative errors; times above `OUTLIER` times the prediction count as that. No scale leaves
    FLOOR..CEILING."""
    x, took = np.array(terms, dtype=np.float64), np.array(seconds, dtype=np.float64)
    scales = np.ones(4)
    for _ in range(20):
        predicted = np.maximum(x @ scales, 1e-9)
        rows, target = x / predicted[:, None], np.minimum(took / predicted, OUTLIER)
        gram, right = rows.T @ rows + _PRIOR * np.eye(4), rows.T @ target + _PRIOR
        # One scale after another, so that each stays within its bounds: terms that occur together are told apart badly.
        for i in list(range(4)) * 10:
            scales[i] = np.clip((right[i] - gram[i] @ scales) / gram[i, i] + scales[i], FLOOR, CEILING)
    return tuple(float(scale) for scale in scales)
