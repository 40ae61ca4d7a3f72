"""Generated workloads: arrivals, length distributions, classes, presets, and their notation on a command line.

Poisson, gamma (burstier or smoother than Poisson), constant interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import ConfigError
from headway.core.parse import number
from headway.sim.workload.traces import TraceRequest, read_trace

Times = NDArray[np.float64]


class ArrivalProcess(Protocol):
    """An arrival process. Called once per workload, with the caller's generator."""

    def times(self, rng: np.random.Generator, count: int) -> Times:
        """Return `count` arrival times in seconds from the workload's start, ascending; the first is at 0."""


def _from_gaps(gaps: Times) -> Times:
    times = np.cumsum(gaps)
    return times - times[0] if times.size else times


@dataclass(frozen=True)
class PoissonArrivals:
    """Independent arrivals at a mean rate (requests per second)."""

    rate_rps: float

    def times(self, rng: np.random.Generator, count: int) -> Times:
        return _from_gaps(rng.exponential(1 / self.rate_rps, count))


@dataclass(frozen=True)
class GammaArrivals:
    """Gamma-distributed gaps with a coefficient of variation: 1 is Poisson, above it arrivals come in bursts."""

    rate_rps: float
    cv: float

    def times(self, rng: np.random.Generator, count: int) -> Times:
        # a gamma law of shape k has the coefficient of variation 1/√k and the mean k · scale
        shape = 1 / self.cv**2
        return _from_gaps(rng.gamma(shape, 1 / (self.rate_rps * shape), count))


@dataclass(frozen=True)
class ConstantArrivals:
    """One arrival every 1 / rate seconds."""

    rate_rps: float

    def times(self, rng: np.random.Generator, count: int) -> Times:
        return np.arange(count, dtype=np.float64) / self.rate_rps


def arrivals(kind: str, rate_rps: float, cv: float = 1.0) -> ArrivalProcess:
    """Return an arrival process by name: poisson, gamma, constant. Raises ConfigError on bad arguments."""
    if not 0 < rate_rps < float("inf"):
        raise ConfigError(f"the arrival rate is {rate_rps}; it must be above 0 requests per second")
    if not 0 < cv < float("inf"):
        raise ConfigError(f"the arrivals' coefficient of variation is {cv}; it must be above 0")
    if kind == "poisson":
        return PoissonArrivals(rate_rps)
    if kind == "gamma":
        return GammaArrivals(rate_rps, cv)
    if kind == "constant":
        return ConstantArrivals(rate_rps)
    raise ConfigError(f"unknown arrivals {kind!r}; known are poisson, gamma, constant")


# Length distributions over token counts. Every sample is a whole number of at least one token.

Counts = NDArray[np.int64]
_NORMAL = NormalDist()
Z90 = _NORMAL.inv_cdf(0.9)
MOST = 1e12
"""Upper bound of any length, tokens."""


class LengthDistribution(Protocol):
    """A distribution of lengths. Each sample takes a fixed number of draws, so that seeds stay comparable."""

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """Return `count` independent lengths in tokens, each at least 1."""


def _whole(values: NDArray[np.float64]) -> Counts:
    return np.maximum(1, np.rint(values)).astype(np.int64)


@dataclass(frozen=True)
class FixedLengths:
    """A constant length."""

    tokens: int

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        return np.full(count, self.tokens, dtype=np.int64)


@dataclass(frozen=True)
class UniformLengths:
    """Every length from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        return rng.integers(self.low, self.high + 1, count)


@dataclass(frozen=True)
class LogNormalLengths:
    """ln X ~ Normal(mu, sigma), given that low ≤ X ≤ high (truncated, not clipped: no heap at the ends)."""

    mu: float
    sigma: float
    low: float = 1.0
    high: float = MOST

    @classmethod
    def of(cls, median: float, p90: float, low: float = 1.0, high: float = MOST) -> LogNormalLengths:
        """Return the law with this median and 90th percentile *before* truncation."""
        return cls(math.log(median), math.log(p90 / median) / Z90, low, high)

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        """One uniform a sample, through the inverse of the truncated law."""
        bottom, top = self._cdf(self.low), self._cdf(self.high)
        shares = bottom + (top - bottom) * rng.random(count)
        # the inverse is infinite at 0 and 1
        tiny = 1e-12
        z = np.array([_NORMAL.inv_cdf(min(max(share, tiny), 1 - tiny)) for share in shares.tolist()])
        return _whole(np.clip(np.exp(self.mu + self.sigma * z), self.low, self.high))

    def mass(self) -> float:
        """Return the share of the untruncated law that lies between low and high."""
        # all mass lies at exp(mu)
        if self.sigma == 0:
            return float(self.low <= math.exp(self.mu) <= self.high)
        return self._cdf(self.high) - self._cdf(self.low)

    def _cdf(self, value: float) -> float:
        if value <= 0:
            return 0.0
        if self.sigma == 0:
            return float(math.log(value) >= self.mu)
        return _NORMAL.cdf((math.log(value) - self.mu) / self.sigma)


@dataclass(frozen=True)
class QuantileLengths:
    """A law given by its quantiles, log-linear between them: the compact form of a measured distribution."""

    points: tuple[tuple[float, float], ...]
    """(share in 0 … 1, tokens), ascending, from share 0 to share 1."""

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        shares, tokens = zip(*self.points, strict=True)
        return _whole(np.exp(np.interp(rng.random(count), shares, np.log(tokens))))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Measured lengths, drawn with replacement."""

    tokens: tuple[int, ...]

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        drawn: Counts = np.maximum(1, rng.choice(np.asarray(self.tokens, dtype=np.int64), count))
        return drawn


@dataclass(frozen=True)
class MixtureLengths:
    """Each sample from one of several laws, chosen by weight (weights need not sum to one)."""

    parts: tuple[tuple[float, LengthDistribution], ...]

    def sample(self, rng: np.random.Generator, count: int) -> Counts:
        weights = np.array([weight for weight, _ in self.parts])
        which = rng.choice(len(self.parts), count, p=weights / weights.sum())
        # every law draws `count` samples, used or not: the number of draws does not depend on the choice
        drawn = np.stack([law.sample(rng, count) for _, law in self.parts])
        chosen: Counts = drawn[which, np.arange(count)]
        return chosen


# Named mixes of requests, with the source of their numbers; none contains a trace.
#
# Input and output lengths are drawn independently: within one service of the public traces they correlate below 0.11.

_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)


def _quantiles(*tokens: float) -> QuantileLengths:
    """Return a law from the minimum, P1, P5, P10, P25, P50, P75, P90, P95, P99 and the maximum."""
    return QuantileLengths(tuple(zip(_SHARES, tokens, strict=True)))


SHAREGPT_IN = _quantiles(1, 12, 29, 74, 580, 1730, 3734, 5696, 6563, 7433, 8141)
SHAREGPT_OUT = _quantiles(2, 6, 44, 84, 228, 415, 628, 834, 920, 998, 1024)
AZURE_CONV_IN = _quantiles(2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050)
AZURE_CONV_OUT = _quantiles(7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000)
# Below P40 the figure shows outputs of "a few tokens": 1 here.
AZURE_CODE_2024_IN = _quantiles(1, 9, 124, 315, 922, 1916, 3326, 6120, 7663, 7681, 7690)
AZURE_CODE_2024_OUT = _quantiles(1, 1, 1, 1, 1, 6, 17, 39, 72, 261, 5000)
MOONCAKE_IN = _quantiles(891, 894, 901, 974, 2414, 7284, 15694, 27991, 40369, 89868, 124847)
MOONCAKE_OUT = _quantiles(1, 3, 10, 24, 155, 356, 476, 606, 712, 1168, 2000)
SWE_IN = LogNormalLengths(14.108, 1.9897, 100_000, 1_000_000)
SWE_2M_IN = LogNormalLengths(14.801, 1.9897, 200_000, 2_000_000)
SWE_128K_IN = LogNormalLengths(14.4443, 3.0, 128_000, 1_000_000)
SWE_OUT = LogNormalLengths(6.25, 0.3469)
# Azure's two services of 2024 together, up to their 95th percentile: coding up to its P90, conversations up to P98.
_CODE_2024_P90 = QuantileLengths(tuple((s / 0.9, t) for s, t in AZURE_CODE_2024_IN.points[:8]))
_CONV_2024_P98 = QuantileLengths(
    tuple(
        (share / 0.98, tokens)
        for share, tokens in ((0.0, 20), (0.01, 80), (0.05, 204), (0.1, 293), (0.25, 541), (0.5, 914), (0.75, 2341),
                              (0.9, 3761), (0.95, 4860), (0.98, 5889))
    )
)  # fmt: skip
AZURE_CONV_2024_OUT = _quantiles(1, 1, 1, 1, 11, 33, 100, 333, 388, 682, 1500)


@dataclass(frozen=True)
class MixPart:
    """One kind of request in a mix."""

    share: float
    """Weight among the kinds; weights need not sum to one."""
    klass: str
    prompt: LengthDistribution
    output: LengthDistribution
    cached: float = 0.0
    """Share of a prompt whose KV is cached."""


@dataclass(frozen=True)
class WorkloadPreset:
    """A mix of kinds of requests."""

    about: str
    """The workload that it stands for."""
    fitted: str
    """Source of its numbers."""
    parts: tuple[MixPart, ...]

    def draw(self, rng: np.random.Generator, arrivals: ArrivalProcess, count: int) -> list[TraceRequest]:
        """Draw `count` requests: times, then kinds, then lengths, all from `rng`."""
        times = arrivals.times(rng, count)
        shares = np.array([part.share for part in self.parts])
        kinds = rng.choice(len(self.parts), count, p=shares / shares.sum())
        # lengths of every kind for every request, so that the draws of one kind do not depend on the others' shares
        prompts = np.stack([part.prompt.sample(rng, count) for part in self.parts])
        outputs = np.stack([part.output.sample(rng, count) for part in self.parts])
        return [
            TraceRequest(
                float(time), tokens, int(outputs[kind, i]), klass=part.klass, cached_tokens=int(part.cached * tokens)
            )
            for i, (time, kind) in enumerate(zip(times, kinds.tolist(), strict=True))
            for part, tokens in ((self.parts[kind], int(prompts[kind, i])),)
        ]


def simple(prompt: LengthDistribution, output: LengthDistribution) -> WorkloadPreset:
    """Return a mix of one kind, from two distributions."""
    return WorkloadPreset("one kind of request", "given", (MixPart(1.0, "", prompt, output),))


_SHAREGPT = "quantiles of 30,731 ShareGPT conversations cut at 8K (the set of Sarathi-Serve and Medha)"
_SWE = "prompts: truncated log-normal, exact in the published P50 393K and P90 839K; outputs: P50 518, P90 808"
_TETRIS = "truncated log-normal with the published minimum, maximum and mean; the cut leaves out 1% of the law"

PRESETS: dict[str, WorkloadPreset] = {
    "sharegpt-like": WorkloadPreset(
        "chats of up to 8K tokens", _SHAREGPT, (MixPart(1.0, "short", SHAREGPT_IN, SHAREGPT_OUT),)
    ),
    "agent-sessions": WorkloadPreset(
        "turns of coding agents: sessions of 43, of whose prompts (142K tokens in the mean) 96.5% are cached",
        "means of vllm#57103; prompts grow evenly from the first turn to the last; best with `concurrency`",
        (MixPart(1.0, "agent", UniformLengths(20_000, 264_000), LogNormalLengths(5.776, 0.8, 16, 8192), 0.965),),
    ),
    "azure-conv-like": WorkloadPreset(
        "Azure's conversation service, 2023",
        "quantiles of 19,366 requests of one hour",
        (MixPart(1.0, "short", AZURE_CONV_IN, AZURE_CONV_OUT),),
    ),
    "azure-code-2024-documents": WorkloadPreset(
        "Azure's coding service, 2024, and 1% documents of 200K tokens",
        "quantiles read off the published figures of 16.8 million requests of May 2024; documents: given",
        (
            MixPart(0.99, "short", AZURE_CODE_2024_IN, AZURE_CODE_2024_OUT),
            MixPart(0.01, "long", FixedLengths(200_000), FixedLengths(500)),
        ),
    ),
    "mooncake-like": WorkloadPreset(
        "Kimi's conversations: prompts up to 125K",
        "quantiles of 7,851 requests of 40 minutes",
        (MixPart(1.0, "", MOONCAKE_IN, MOONCAKE_OUT),),
    ),
    "medha-swe": WorkloadPreset("Medha's long requests, 100K to 1M", _SWE, (MixPart(1.0, "long", SWE_IN, SWE_OUT),)),
    "medha-swe-128k": WorkloadPreset(
        "Medha's long requests in its capacity evaluation, 128K to 1M",
        "prompts: truncated log-normal, P50 393K and P90 836K (published: 393K, 839K); outputs as medha-swe",
        (MixPart(1.0, "long", SWE_128K_IN, SWE_OUT),),
    ),
    "medha-swe-2m": WorkloadPreset(
        "Medha's long requests scaled to 2M tokens (its 3D experiments)",
        f"{_SWE}; prompts twice as long, 200K to 2M",
        (MixPart(1.0, "long", SWE_2M_IN, SWE_OUT),),
    ),
    "medha-mix": WorkloadPreset(
        "Medha's evaluation: chats and 5% long requests",
        f"chats: {_SHAREGPT}; long: {_SWE}",
        (MixPart(0.95, "short", SHAREGPT_IN, SHAREGPT_OUT), MixPart(0.05, "long", SWE_IN, SWE_OUT)),
    ),
    "pecsched-mix": WorkloadPreset(
        "PecSched's rewriting: Azure's conversations, those above P95 replaced by 100K to 500K",
        "quantiles up to P95 as in azure-conv-like; 5% uniform 100K to 500K, the paper's rule; outputs unchanged",
        (
            MixPart(
                0.95,
                "short",
                QuantileLengths(tuple((s / 0.95, t) for s, t in AZURE_CONV_IN.points[:9])),
                AZURE_CONV_OUT,
            ),
            MixPart(0.05, "long", UniformLengths(100_000, 500_000), AZURE_CONV_OUT),
        ),
    ),
    "pecsched-short": WorkloadPreset(
        "the short requests of pecsched-mix",
        "quantiles up to P95 as in azure-conv-like",
        (
            MixPart(
                1.0, "short", QuantileLengths(tuple((s / 0.95, t) for s, t in AZURE_CONV_IN.points[:9])), AZURE_CONV_OUT
            ),
        ),
    ),
    "pecsched-short-2024": WorkloadPreset(
        "PecSched's short requests from Azure's trace of 2024, coding and conversations together",
        "quantiles read off the published figures up to P95; services by their request counts, 16.8 and 27.3 million",
        (
            MixPart(0.343, "short", _CODE_2024_P90, AZURE_CODE_2024_OUT),
            MixPart(0.607, "short", _CONV_2024_P98, AZURE_CONV_2024_OUT),
        ),
    ),
    "pecsched-long": WorkloadPreset(
        "the long requests of pecsched-mix",
        "uniform 100K to 500K, the paper's rule; outputs as in azure-conv-like",
        (MixPart(1.0, "long", UniformLengths(100_000, 500_000), AZURE_CONV_OUT),),
    ),
    **{
        f"tetris-{name}": WorkloadPreset(
            f"Tetris's {name} trace",
            f"{_TETRIS}; outputs are not published: Mooncake's stand in",
            (MixPart(1.0, "", LogNormalLengths(mu, sigma, low, high), MOONCAKE_OUT),),
        )
        for name, mu, sigma, low, high in (
            ("short", 9.8665, 0.6845, 4_000, 95_000),
            ("medium", 10.1108, 0.7453, 8_000, 142_000),
            ("long", 10.5494, 0.6786, 16_000, 190_000),
        )
    },
}


def preset(name: str) -> WorkloadPreset:
    """Return a preset by name. Raises ConfigError, which lists the names."""
    if name not in PRESETS:
        raise ConfigError(f"unknown workload preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


# Parser of length distributions as a command line writes them.
#
# fixed:200 · uniform:100-500 · lognormal:median=1000,p90=4000[,min=…,max=…] · lognormal:mu=6.9,sigma=1.1 ·
# empirical:FILE mix:0.95*lognormal:median=300,p90=1200+0.05*uniform:100k-500k · a bare number means fixed. Units as in
# `core.parse`.

Column = Literal["prompt", "output"]
_KNOWN = "fixed:N, uniform:LOW-HIGH, lognormal:median=M,p90=N[,min=,max=], empirical:FILE, mix:SHARE*SPEC+SHARE*SPEC"


def parse_tokens(text: str) -> int:
    """Parse `200`, `32k` or `1.5m` as tokens. Raises ConfigError otherwise."""
    value = number(text)
    if not value.is_integer() or not 1 <= value < 1e12:
        raise ConfigError(f"{text!r} is not a number of tokens of at least 1")
    return int(value)


def parse_lengths(text: str, column: Column = "prompt") -> LengthDistribution:
    """Parse a distribution. `column`: the lengths of an empirical file to use. Raises ConfigError."""
    kind, colon, rest = text.strip().partition(":")
    if not colon:
        return FixedLengths(parse_tokens(kind))
    if kind in ("fixed", "constant"):
        return FixedLengths(parse_tokens(rest))
    if kind == "uniform":
        low, high = (parse_tokens(part) for part in _pair(rest, "-", text))
        if low > high:
            raise ConfigError(f"{text!r}: {low} is above {high}")
        return UniformLengths(low, high)
    if kind == "lognormal":
        return _lognormal(rest, text)
    if kind == "empirical":
        requests = read_trace(rest).requests
        return EmpiricalLengths(tuple(r.prompt_tokens if column == "prompt" else r.output_tokens for r in requests))
    if kind == "mix":
        return MixtureLengths(tuple(_part(part, column, text) for part in rest.split("+")))
    raise ConfigError(f"unknown length distribution {kind!r}; known are {_KNOWN}")


def _part(text: str, column: Column, whole: str) -> tuple[float, LengthDistribution]:
    share, spec = _pair(text, "*", whole)
    weight = number(share)
    if not weight > 0:
        raise ConfigError(f"{whole!r}: the share {share!r} must be above 0")
    return weight, parse_lengths(spec, column)


def _lognormal(rest: str, text: str) -> LogNormalLengths:
    given = {name.strip(): number(value) for name, value in (_pair(item, "=", text) for item in rest.split(","))}
    low, high = given.pop("min", 1.0), given.pop("max", MOST)
    if not 1 <= low <= high:
        raise ConfigError(f"{text!r}: needs 1 ≤ min ≤ max")
    if given.keys() == {"median", "p90"} and 0 < given["median"] <= given["p90"]:
        law = LogNormalLengths.of(given["median"], given["p90"], low, high)
    elif given.keys() == {"mu", "sigma"} and given["sigma"] >= 0:
        law = LogNormalLengths(given["mu"], given["sigma"], low, high)
    else:
        raise ConfigError(f"{text!r}: a lognormal needs median= and p90= (not below it), or mu= and sigma=")
    # the inverse of the law has no resolution left in so small an interval
    if law.mass() < 1e-9:
        raise ConfigError(f"{text!r}: practically nothing of this law lies between min and max")
    return law


def _pair(text: str, separator: str, whole: str) -> tuple[str, str]:
    left, found, right = text.partition(separator)
    if not found:
        raise ConfigError(f"{whole!r}: expected {separator!r} in {text!r}; known are {_KNOWN}")
    return left.strip(), right.strip()


def final_classes(names: Iterable[str]) -> set[str]:
    """Return what `transforms.classify` makes of classes: requests without a name become `short` or `long`."""
    given = set(names)
    return (given - {""}) | ({"short", "long"} if "" in given else set())


def check_classes(
    setting: str,
    names: Iterable[str],
    requests: Iterable[TraceRequest],
    declared: Callable[[], set[str]],
    also: str = "",
) -> list[str]:
    """Return the classes that no request has. Raises ConfigError for one that the workload cannot have.

    setting: what errors say before the class. declared: returns the workload's classes; asked only where no request has
    the class, as it may read a trace. also: what errors say after the classes that there are."""
    drawn = {request.klass for request in requests}
    missing = [name for name in names if name not in drawn]
    known = drawn | declared() if missing else drawn
    for name in missing:
        if name not in known:
            raise ConfigError(
                f"{setting}{name}: the workload has no such class; it has {', '.join(sorted(known))}{also}"
            )
    return missing
