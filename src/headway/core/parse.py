"""Values written as text: numbers with units (128k, 4G) and a user's own class by its dotted path."""

from __future__ import annotations

import os
import re
import sys
from fractions import Fraction
from importlib import import_module
from typing import Any

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
    except (AttributeError, ValueError):
        raise ConfigError(f"{what} {path!r}: the module {module!r} has no {name!r}") from None
