"""Numbers as people write them: 128k, 1M, 4G, 512MiB."""

from __future__ import annotations

import re
from fractions import Fraction

from headway.core.errors import ConfigError

_TOKENS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_MOST = 2**62
_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?[bB]?)\s*$")


def tokens(text: str | int) -> int:
    """A token count: `131072`, `128k` (131,072), `1M` (1,048,576)."""
    return _parse(text, _TOKENS, "a number of tokens such as 8192, 128k or 1M")


def size(text: str | int) -> int:
    """A size in bytes: `4G`, `512MiB`, `1073741824`. Units are powers of 1024."""
    return _parse(text, _BYTES, "a size such as 512M or 4G")


def _parse(text: str | int, units: dict[str, int], what: str) -> int:
    match = _NUMBER.match(str(text))
    if match is None or match[2].lower() not in units:
        raise ConfigError(f"{text!r} is not {what}")
    # Exact: 0.1G must not become a whole number by rounding.
    value = Fraction(match[1]) * units[match[2].lower()]
    if value.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number")
    if value > _MOST:
        raise ConfigError(f"{str(text)[:40]!r} is more than any machine has")
    return int(value)
