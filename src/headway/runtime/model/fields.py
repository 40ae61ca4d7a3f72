"""Reading a model's JSON files: typed access to fields, with errors that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class JsonFields:
    """Typed reader of a JSON object. A field that is null counts as absent."""

    data: Mapping[str, Any]
    origin: str
    """Name of the object in errors, usually its file."""

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number. Raises CheckpointError when it is absent without a default, or of another type."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        return float(value)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer of at least `least`. Raises CheckpointError as `number`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean. Raises CheckpointError as `number`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers. Raises CheckpointError as `number`."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.wrong(name, "a list of numbers")
        return tuple(float(item) for item in value)

    def has(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.data.get(name) is not None

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """Return the error that names the field, what was expected and what was found."""
        return CheckpointError(f"{self.origin}: '{name}' must be {wanted}, not {self.data.get(name)!r}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.origin}: '{name}' is missing")
        return default


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError when it is missing, not JSON, or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data
