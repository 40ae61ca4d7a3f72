"""Where a setting comes from: flag > environment > `--config file.yaml` > default. One table makes all of them.

An option's name is its key in the YAML file; the flag is the name with dashes and the environment variable is
HEADWAY_ and the name in capitals.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.core.errors import ConfigError


@dataclass(frozen=True)
class SettingOption:
    """One setting. `parse` takes the text of a flag, or the value of a YAML key, and may raise ConfigError."""

    name: str
    parse: Callable[[Any], Any]
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"HEADWAY_{self.name.upper()}"


def boolean(value: Any) -> bool:
    """true/false, yes/no, on/off, 1/0."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{value!r} is neither true nor false")


def add_options(parser: argparse.ArgumentParser, options: Sequence[SettingOption]) -> None:
    """One flag an option. Values stay text until `resolve`."""
    for option in options:
        default = "none" if option.default in (None, ()) else option.default
        text = f"{option.help} (default: {default})".replace("%", "%%")
        extra: dict[str, Any] = {"metavar": option.metavar or option.name.rsplit("_", 1)[-1].upper()}
        if option.parse is boolean:
            extra |= {"nargs": "?", "const": "true"}
        extra |= {"dest": option.name, "default": argparse.SUPPRESS, "help": text}
        parser.add_argument(option.flag, *option.aliases, **extra)


def resolve(
    options: Sequence[SettingOption], arguments: argparse.Namespace, environment: Mapping[str, str], config: str | None
) -> tuple[dict[str, Any], set[str]]:
    """Every option's value, and the names of those that somebody gave.

    Raises ConfigError that names the option, where its value came from, and what is wrong.
    """
    return combine(options, arguments, environment, read_yaml(config) if config else {}, str(config))


def combine(
    options: Sequence[SettingOption],
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    file: Mapping[str, Any],
    config: str,
) -> tuple[dict[str, Any], set[str]]:
    """The same with the settings of a file, or of a part of one, that has been read; `config` is what to call it."""
    known = {option.name for option in options}
    for key in file:
        if key.replace("-", "_") not in known:
            close = ", ".join(sorted(name for name in known if name[:3] == key[:3])) or ", ".join(sorted(known))
            raise ConfigError(f"{config}: unknown setting {key!r}; did you mean one of: {close}?")
    spelled: dict[str, str] = {}
    for key in file:
        other = spelled.setdefault(key.replace("-", "_"), key)
        if other != key:
            raise ConfigError(f"{config}: {other!r} and {key!r} are one setting: say it once")
    file = {key.replace("-", "_"): value for key, value in file.items()}
    values: dict[str, Any] = {}
    given: set[str] = set()
    for option in options:
        source, value = "default", option.default
        if hasattr(arguments, option.name):
            source, value = option.flag, getattr(arguments, option.name)
        elif option.variable in environment:
            source, value = option.variable, environment[option.variable]
        elif file.get(option.name) is not None:
            source, value = f"{config}: {option.name}", file[option.name]
        if source != "default":
            given.add(option.name)
            try:
                value = _parse(option, value)
            except (ConfigError, ValueError, TypeError) as error:
                raise ConfigError(f"{source}: {error}") from error
        values[option.name] = value
    return values, given


def _parse(option: SettingOption, value: Any) -> Any:
    """`option.parse`, but true is no number, 16.5 is not rounded to 16, and infinity and NaN are not settings."""
    number = option.parse in (int, float)
    if number and (isinstance(value, bool) or (option.parse is int and isinstance(value, float) and value % 1)):
        raise ConfigError(f"{value!r} is not a {'whole ' if option.parse is int else ''}number")
    try:
        parsed = option.parse(value)
    except (ValueError, TypeError, OverflowError):
        if not number:
            raise
        raise ConfigError(f"{value!r} is not a {'whole ' if option.parse is int else ''}number") from None
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise ConfigError(f"{value!r} is not a finite number")
    return parsed


def read_yaml(path: str, such_as: str = "port: 8000") -> dict[str, Any]:
    """A mapping of settings; raises ConfigError otherwise. such_as: an example of one."""
    import yaml

    from headway.core.strict_yaml import load

    try:
        data = load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping of settings, such as '{such_as}'")
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: {key!r} is not the name of a setting: these are words, such as '{such_as}'")
    return data


def print_config(values: Mapping[str, Any]) -> str:
    """Settings as a YAML file that `--config` takes. Keys are never printed in clear."""
    import yaml

    shown = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}
    for secret in ("api_key", "rdzv_token"):
        if shown.get(secret):
            shown[secret] = "***"
    return str(yaml.safe_dump(shown, sort_keys=True))


def environment() -> Mapping[str, str]:
    """The process's environment."""
    return os.environ
