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
    """A JSON object and the name that errors give it. A field that is null counts as absent."""

    data: Mapping[str, Any]
    origin: str

    def number(self, name: str, default: float | None = None) -> float:
        """A number; raises CheckpointError when it is absent without a default, or something else."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        return float(value)

    def whole(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer of at least `least`."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers."""
        value = self._value(name, None)
        if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
            raise self.wrong(name, "a list of numbers")
        return tuple(float(item) for item in value)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(name) is not None

    def wrong(self, name: str, wanted: str) -> CheckpointError:
        """The error that says what a field should have been."""
        return CheckpointError(f"{self.origin}: '{name}' must be {wanted}, not {self.data.get(name)!r}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.data.get(name)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self.origin}: '{name}' is missing")
        return default


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises CheckpointError when it is missing, not JSON, or not an object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(data).__name__}")
    return data
