"""Parser of length distributions as a command line writes them.

fixed:200 · uniform:100-500 · lognormal:median=1000,p90=4000[,min=…,max=…] · lognormal:mu=6.9,sigma=1.1 · empirical:FILE
mix:0.95*lognormal:median=300,p90=1200+0.05*uniform:100K-500K · a bare number means fixed. K and M mean 10^3 and 10^6.
"""

from __future__ import annotations

import math
from typing import Literal

from headway.core.errors import ConfigError
from headway.sim.workload.lengths import (
    MOST,
    EmpiricalLengths,
    FixedLengths,
    LengthDistribution,
    LogNormalLengths,
    MixtureLengths,
    UniformLengths,
)
from headway.sim.workload.readers import read_trace

Column = Literal["prompt", "output"]
_UNITS = {"k": 1e3, "m": 1e6}
_KNOWN = "fixed:N, uniform:LOW-HIGH, lognormal:median=M,p90=N[,min=,max=], empirical:FILE, mix:SHARE*SPEC+SHARE*SPEC"


def parse_tokens(text: str) -> int:
    """Parse `200`, `32K` or `1.5M` as tokens. Raises ConfigError otherwise."""
    value = _number(text)
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
    weight = _number(share)
    if not weight > 0:
        raise ConfigError(f"{whole!r}: the share {share!r} must be above 0")
    return weight, parse_lengths(spec, column)


def _lognormal(rest: str, text: str) -> LogNormalLengths:
    given = {name.strip(): _number(value) for name, value in (_pair(item, "=", text) for item in rest.split(","))}
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


def _number(text: str) -> float:
    body = text.strip().lower()
    unit = _UNITS.get(body[-1:], 1.0)
    try:
        value = float(body[:-1] if unit != 1.0 else body) * unit
    except ValueError:
        raise ConfigError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ConfigError(f"{text!r} is not a finite number")
    return value
