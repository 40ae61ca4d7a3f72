"""JSON objects in files that come with a model: read whole, their fields by type and within limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from headway.core.errors import CheckpointError
from headway.core.files import read_input

MOST_COUNTED = 1 << 31
"""Layers, heads, tokens, entries of a vocabulary: no model has more of any."""
_MOST = 1e12


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError where there is none."""
    try:
        data = json.loads(read_input(path).decode())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed reader of a JSON object. A field that is null counts as absent."""

    data: Mapping[str, Any]
    origin: str
    """Name of the object in errors, usually its file."""

    def number(self, name: str, default: float | None = None, least: float = -_MOST, most: float = _MOST) -> float:
        """Return a number within limits. Raises CheckpointError when it is absent without a default, or no such."""
        value = self._value(name, default)
        if not _is_number(value, least, most):
            raise self.wrong(name, f"a number from {least:g} to {most:g}")
        return float(value)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer from `least` to `MOST_COUNTED`. Raises CheckpointError as `number`."""
        value = self._value(name, default)
        if not isinstance(value, int) or not _is_number(value, least, MOST_COUNTED):
            raise self.wrong(name, f"an integer from {least} to {MOST_COUNTED}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Raises CheckpointError as `number`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str, least: float = -_MOST) -> tuple[float, ...]:
        """Return a list of numbers of at least `least`. Raises CheckpointError as `number`."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(_is_number(item, least, _MOST) for item in value):
            raise self.wrong(name, f"a list of numbers from {least:g} to {_MOST:g}")
        return tuple(float(item) for item in value)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.data.get(name) is not None

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """Return the error that names the field, what was expected and what was found."""
        return CheckpointError(f"{self.origin}: '{name}' must be {wanted}, not {shortened(self.data.get(name))}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.origin}: '{name}' is missing")
        return default


def _is_number(value: Any, least: float, most: float) -> bool:
    # Not a number (NaN) is within no limits.
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
