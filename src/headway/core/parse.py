"""Values written as text: numbers with units (128k, 4G, 55ms) and a user's own class by its dotted path.

One notation for flags, the environment, YAML files and traces. As in vLLM, `k` is 1,000 and `K` is 1,024.
"""

from __future__ import annotations

import math
import os
import re
import sys
from fractions import Fraction
from importlib import import_module
from typing import Any

from headway.core.errors import ConfigError

_COUNTS = {"": 1} | {
    unit: scale
    for power, letter in enumerate("kmgt", start=1)
    for unit, scale in ((letter, 1000**power), (letter.upper(), 1024**power))
}
_BYTES = {unit + end: scale for unit, scale in _COUNTS.items() for end in ("", "b", "B")}
_BYTES |= {f"{unit}i{end}": _COUNTS[unit.upper()] for unit in _COUNTS if unit for end in "bB"}
_SECONDS = {
    "us": Fraction(1, 10**6), "µs": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1), "m": Fraction(60),
    "min": Fraction(60), "h": Fraction(3600), "d": Fraction(86_400),
}  # fmt: skip
_MOST = 2**62
_LONGEST = 200
"""Characters of a number: with exponents of two digits all of them fit a float."""
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*([^\W\d_]*)\s*")


def tokens(text: str | int) -> int:
    """Return a count of tokens: `131072`, `128K` (131,072), `128k` (128,000), `1M`. Raises ConfigError."""
    return _whole(text, _COUNTS, "a number of tokens such as 8192, 128K (131,072) or 128k (128,000)")


def size(text: str | int) -> int:
    """Return a size in bytes: `4G` (4 GiB), `512MiB`, `1073741824`, `4g` (4·10⁹). Raises ConfigError."""
    return _whole(text, _BYTES, "a size such as 512M or 4G")


def number(value: Any) -> float:
    """Return a finite number: 0.5, `1e3`, `2k`; true is none. Raises ConfigError."""
    try:
        read = float(value)
    except (ValueError, TypeError, OverflowError):
        found = _parts(value, _COUNTS)
        if found is None:
            raise ConfigError(f"{value!r} is not a number") from None
        read = float(found[0] * _COUNTS[found[1]])
    if isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a number")
    if not math.isfinite(read):
        raise ConfigError(f"{value!r} is not a finite number")
    return read


def duration(value: Any, unit: str = "s") -> float:
    """Return a time in `unit` (s or ms): `55ms`, `0.055s`, `5min`; a number alone is in `unit`. Raises ConfigError."""
    found = _parts(value, _SECONDS) if isinstance(value, str) else None
    if found is not None and found[1]:
        return float(found[0] * _SECONDS[found[1]] / _SECONDS[unit])
    try:
        return number(found[0] if found is not None else value)
    except ConfigError as error:
        if isinstance(value, str) and "finite" not in str(error):
            raise ConfigError(f"{value!r} is not a time such as 55ms or 0.055s") from None
        raise


def milliseconds(value: Any) -> float:
    """As `duration`, in milliseconds."""
    return duration(value, "ms")


def _whole(text: str | int, units: dict[str, int], what: str) -> int:
    found = _parts(str(text), units)
    if found is None or found[0] < 0:
        raise ConfigError(f"{str(text)[:40]!r} is not {what}")
    # Exact: 0.1G must not become a whole number by rounding.
    value = found[0] * units[found[1]]
    if value.denominator != 1:
        raise ConfigError(f"{text!r} is not a whole number")
    if value > _MOST:
        raise ConfigError(f"{str(text)[:40]!r} is more than any machine has")
    return int(value)


def _parts(text: Any, units: Any) -> tuple[Fraction, str] | None:
    """Return the number and the unit of a text; None where it has another form or unit."""
    match = _NUMBER.fullmatch(text) if isinstance(text, str) and len(text) <= _LONGEST else None
    return None if match is None or (match[2] and match[2] not in units) else (Fraction(match[1]), match[2])


# Classes of a user's own, named by a dotted path: `package.module.Name`.


def is_dotted(name: str) -> bool:
    """Return whether a setting names a class by its path, and not one of Headway's own by its name."""
    return "." in name


def load_dotted(path: str, what: str) -> Any:
    """Import the object at `path`. Modules are found as by Python, and in the current folder.

    what: the kind of thing that it is, for errors. Raises ConfigError where the path leads nowhere; an error inside the
    module is raised as it is.
    """
    module, _, name = path.rpartition(".")
    # Console scripts do not have the current folder on their path, unlike `python -m`.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        # A module that the user's own module imports is missing: not the path's fault.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ConfigError(f"{what} {path!r}: there is no module {error.name!r} on Python's path or in {here}") from None
    except (AttributeError, ValueError, TypeError):
        raise ConfigError(f"{what} {path!r}: the module {module!r} has no {name!r}") from None
