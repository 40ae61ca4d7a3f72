"""Types of settings as people write them: `port: WholeNumber`, `max_model_len: TokenCount | None`.

A value comes as the text of a flag or of an environment variable, or as what YAML made of it. Each type turns it into
the Python value, or says in one clause why it cannot: `'x' is not a whole number`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BeforeValidator

from headway.core.errors import ConfigError
from headway.core.units import size, tokens


def parsed_by(parse: Callable[[Any], Any]) -> BeforeValidator:
    """Parse with a function that raises ConfigError; pydantic collects ValueErrors only."""

    def validate(value: Any) -> Any:
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(validate)


def boolean(value: Any) -> bool:
    """Read true/false, yes/no, on/off or 1/0."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{value!r} is neither true nor false")


def whole_number(value: Any) -> int:
    """Read an integer; true is none, and 16.5 is not rounded to 16."""
    if isinstance(value, bool) or (isinstance(value, float) and value % 1):
        raise ConfigError(f"{value!r} is not a whole number")
    try:
        return int(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{value!r} is not a whole number") from None


def number(value: Any) -> float:
    """Read a finite number; true is none."""
    if isinstance(value, bool):
        raise ConfigError(f"{value!r} is not a number")
    try:
        read = float(value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{value!r} is not a number") from None
    if not math.isfinite(read):
        raise ConfigError(f"{value!r} is not a finite number")
    return read


def text_list(value: Any) -> tuple[str, ...]:
    """Read `a,b`, `["a", "b"]` or a list of texts."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise ConfigError(f"{value!r} is not a JSON list") from None
    return tuple(map(str, value)) if isinstance(value, list | tuple) else tuple(str(value).split(","))


Flag = Annotated[bool, parsed_by(boolean)]
WholeNumber = Annotated[int, parsed_by(whole_number)]
Number = Annotated[float, parsed_by(number)]
Text = Annotated[str, BeforeValidator(str)]
TextList = Annotated[tuple[str, ...], parsed_by(text_list)]
TokenCount = Annotated[int, parsed_by(tokens)]
"""8192, 128k, 1M."""
ByteSize = Annotated[int, parsed_by(size)]
"""1073741824, 512MiB, 4G."""
