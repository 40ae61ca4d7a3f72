"""Tetris Eq. (1): T_s(C, L) = a_s + b_s·L + c_s·C·L + d_s·L², seconds of L tokens over C cached ones on a ring of s.

Fitted by least squares with weights 1/T (unweighted, errors reach 20% on the paper's Table 1; weighted, 6.3%), with
coefficients of at least 0. Where no measurement has history, c is not identifiable: in causal attention a pair of
history costs exactly twice d's share of the triangle, so c = 2d, and then T(0, C) + T(C, L) = T(0, C + L) + a: each
further chunk costs a.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import ConfigError
from headway.core.files import read_input
from headway.core.request import Strategy
from headway.perf.latency.groups import GroupLatency, GroupShape, largest

SCHEMA = "headway.eq1/1"
Values = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
_STRIPED = Strategy(attn="striped")


class Eq1Coefficients(msgspec.Struct, frozen=True):
    """Coefficients of one SP size."""

    a: float
    """Seconds per chunk."""
    b: float
    """Seconds per token."""
    c: float
    """Seconds per pair of a token and a cached token."""
    d: float
    """Seconds per squared token."""

    def prefill_s(self, past: int, tokens: int) -> float:
        """Return the seconds of a chunk of `tokens` over `past` cached tokens."""
        return self.a + tokens * (self.b + self.c * past + self.d * tokens)

    def solve(self, past: int, budget_s: float) -> float:
        """Return the (real-valued) chunk that takes `budget_s`; 0 when none does."""
        # Positive root of d·L² + (b + c·C)·L - rest = 0, as 2·rest / (linear + root): no cancellation for small d.
        rest = budget_s - self.a
        linear = self.b + self.c * past
        root = linear + math.sqrt(linear * linear + 4.0 * self.d * rest) if rest > 0 else 0.0
        return 2.0 * rest / root if root > 0 else 0.0


class PrefillSample(msgspec.Struct, frozen=True):
    """One measured prefill: `tokens` over `past` cached tokens on a ring of `sp` instances."""

    sp: int
    past: int
    tokens: int
    seconds: float


class Eq1File(msgspec.Struct, frozen=True, kw_only=True):
    """File that `headway profile fit-eq1` writes."""

    schema: str = SCHEMA
    source: str
    sizes: dict[int, Eq1Coefficients]
    """Coefficients by SP size."""
    errors: dict[int, tuple[float, float]] = {}
    """(worst, mean) relative error by SP size."""


class Eq1Latency:
    """`GroupLatency` of fitted sizes; sizes between two fitted ones are interpolated (log time over log size)."""

    def __init__(self, sizes: Mapping[int, Eq1Coefficients], source: str = "Eq. (1)") -> None:
        if not sizes:
            raise ConfigError("Eq. (1) needs the coefficients of at least one SP size")
        self.sizes = dict(sorted(sizes.items()))
        self.source = source
        self._known = list(self.sizes)

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        found = self.sizes.get(group.sp)
        if found is not None:
            return found.prefill_s(past, tokens)
        low, high, share = self._between(group.sp)
        # Geometric interpolation: times scale like a power of the SP size between two fitted sizes.
        one, other = self.sizes[low].prefill_s(past, tokens), self.sizes[high].prefill_s(past, tokens)
        return math.exp((1 - share) * math.log(one) + share * math.log(other))

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        found = self.sizes.get(group.sp)
        if found is not None:
            return max(0, int(found.solve(past, budget_s)))
        # Interpolated sizes have no closed form.
        return largest(lambda tokens: self.prefill_s(past, tokens, group), budget_s)

    def _between(self, sp: int) -> tuple[int, int, float]:
        known = self._known
        if sp > known[-1]:
            raise ConfigError(f"Eq. (1) was fitted for SP sizes up to {known[-1]}, not {sp}")
        at = bisect_right(known, sp)
        low, high = known[max(0, at - 1)], known[at]
        return low, high, math.log(sp / low) / math.log(high / low)


def fit(samples: Iterable[PrefillSample]) -> Eq1Latency:
    """Fit the coefficients of each SP size. Raises ConfigError where a size has too few different lengths."""
    by_size: dict[int, list[PrefillSample]] = {}
    for sample in samples:
        if not (sample.sp >= 1 and sample.tokens >= 1 and sample.past >= 0 and 0 < sample.seconds < math.inf):
            raise ConfigError(f"not a measurement: {sample}")
        by_size.setdefault(sample.sp, []).append(sample)
    if not by_size:
        raise ConfigError("there are no measurements to fit")
    return Eq1Latency({sp: _fit_size(sp, mine) for sp, mine in by_size.items()}, "Eq. (1), fitted")


def fit_unweighted(samples: Sequence[PrefillSample]) -> Eq1Coefficients:
    """Fit one size by unweighted least squares, the literal reading of the paper, for comparison with `fit`."""
    seconds = np.array([s.seconds for s in samples])
    return _fit_size(samples[0].sp, list(samples), np.ones_like(seconds))


def fit_to(latency: GroupLatency, sizes: Sequence[int], node: int = 8) -> Eq1Latency:
    """Fit Eq. (1) to another model of groups, from samples of 1K to 256K tokens without history.

    Without history c = 2d holds, so that an unmeasured model cannot make chunks look cheaper than they are. Groups of
    more than `node` instances are taken to span nodes."""
    samples = [
        PrefillSample(sp, 0, tokens, latency.prefill_s(0, tokens, GroupShape(sp, -(-sp // node), _STRIPED)))
        for sp in sizes
        for tokens in (_K << k for k in range(9))
    ]
    found = fit(samples)
    return Eq1Latency(found.sizes, f"Eq. (1) fitted to: {latency.source}")


def completed(found: Eq1Latency, derived: GroupLatency, most: int) -> Eq1Latency:
    """Return a fit with all sizes up to `most`: those outside its own are fitted to the model `derived`."""
    own = list(found.sizes)
    missing = [sp for sp in range(1, most + 1) if not own[0] <= sp <= own[-1]]
    if not missing:
        return found
    more = fit_to(derived, missing)
    return Eq1Latency(found.sizes | more.sizes, f"{found.source}; SP sizes {missing}: {more.source}")


def _fit_size(sp: int, samples: list[PrefillSample], spread: Values | None = None) -> Eq1Coefficients:
    """Fit the samples of one SP size. spread: unit of each residual; None: the measured time (relative errors)."""
    tokens = np.array([s.tokens for s in samples], dtype=np.float64)
    past = np.array([s.past for s in samples], dtype=np.float64)
    seconds = np.array([s.seconds for s in samples])
    with_past = bool(np.any(past > 0))
    if len(set(zip(past.tolist(), tokens.tolist(), strict=True))) < (4 if with_past else 3):
        raise ConfigError(f"SP size {sp} has too few different lengths: Eq. (1) needs 3, and 4 where there is history")
    columns = [np.ones_like(tokens), tokens, past * tokens, tokens**2]
    # Without history fit one coefficient for both (c = 2d).
    if not with_past:
        columns = [columns[0], columns[1], 2 * columns[2] + columns[3]]
    unit = seconds if spread is None else spread
    x = _non_negative(np.stack(columns, axis=1) / unit[:, None], seconds / unit)
    if with_past:
        return Eq1Coefficients(*(float(v) for v in x))
    return Eq1Coefficients(float(x[0]), float(x[1]), 2 * float(x[2]), float(x[2]))


def _non_negative(matrix: Values, wanted: Values) -> list[float]:
    """Return argmin |M x - y| over x >= 0, by trying every set of active columns (at most 15)."""
    count = matrix.shape[1]
    # Columns differ by many orders of magnitude (1 against squared tokens): normalise before lstsq.
    scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
    best, least = [0.0] * count, math.inf
    for mask in range(1, 1 << count):
        chosen = [i for i in range(count) if mask >> i & 1]
        found = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], wanted, rcond=None)[0] / scale[chosen]
        if np.any(found < 0):
            continue
        error = float(np.sum((matrix[:, chosen] @ found - wanted) ** 2))
        if error < least:
            least, best = error, [0.0] * count
            for i, value in zip(chosen, found, strict=True):
                best[i] = float(value)
    return best


def errors(model: Eq1Latency, samples: Iterable[PrefillSample]) -> dict[int, tuple[float, float]]:
    """Return the (worst, mean) relative error by SP size."""
    found: dict[int, list[float]] = {}
    for s in samples:
        off = abs(model.prefill_s(s.past, s.tokens, GroupShape(s.sp)) / s.seconds - 1.0)
        found.setdefault(s.sp, []).append(off)
    return {sp: (max(all_of), sum(all_of) / len(all_of)) for sp, all_of in sorted(found.items())}


_K = 1024
_LENGTHS = (4, 8, 16, 32, 64, 128, 256)
_TABLE1: dict[int, tuple[float, ...]] = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}


def table1_samples() -> list[PrefillSample]:
    """Return Tetris Table 1: Llama-3 8B, A100, tp 1, seconds. 4k is 4,096 tokens.

    256k on one instance ran out of memory, so that row is one entry shorter."""
    return [
        PrefillSample(sp, 0, length * _K, seconds)
        for sp, row in _TABLE1.items()
        for length, seconds in zip(_LENGTHS, row, strict=False)
    ]


def tetris_table1() -> Eq1Latency:
    """Return Eq. (1) fitted to Tetris Table 1."""
    model = fit(table1_samples())
    return Eq1Latency(model.sizes, "Eq. (1) fitted to Tetris's Table 1 (Llama-3 8B, A100, SP 1 to 16; c = 2d)")


def extended(model: Eq1Latency, largest_sp: int) -> Eq1Latency:
    """Return `model` with extrapolated sizes up to `largest_sp`.

    Each doubling multiplies a, b, c and d by the factor of the last fitted doubling (Tetris Table 2 plans for up to 128
    instances, whose latencies are unpublished)."""
    sizes = dict(model.sizes)
    one, other = list(sizes)[-2:]
    # A coefficient that was 0 has no ratio: take 0.5, as for work that is shared by twice as many instances.
    ratio = [y / x if x > 0 else 0.5 for x, y in zip(_values(sizes[one]), _values(sizes[other]), strict=True)]
    while other < largest_sp:
        before = sizes[other]
        other *= 2
        sizes[other] = Eq1Coefficients(*(v * min(r, 2.5) for v, r in zip(_values(before), ratio, strict=True)))
    return Eq1Latency(sizes, f"{model.source}; beyond {list(model.sizes)[-1]} extrapolated")


def _values(c: Eq1Coefficients) -> tuple[float, float, float, float]:
    return c.a, c.b, c.c, c.d


def load(path: Path) -> Eq1Latency:
    """Read a file of `headway profile fit-eq1`. Raises ConfigError when it cannot be read as one."""
    try:
        found = msgspec.json.decode(read_input(path), type=Eq1File)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is not a fit of Eq. (1) ({error}): make one with `headway profile fit-eq1`"
        ) from error
    if found.schema != SCHEMA:
        raise ConfigError(f"{path} has schema {found.schema!r}, not {SCHEMA}: make it with `headway profile fit-eq1`")
    return Eq1Latency(found.sizes, found.source)
