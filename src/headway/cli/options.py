"""Flags of a command, generated from its settings model, and the other sources of settings."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from headway.core.errors import ConfigError
from headway.core.file_sections import distinct_seeds
from headway.core.settings import SettingsModel, flag_of


def add_options(
    parser: argparse.ArgumentParser,
    model: type[SettingsModel],
    leave_out: Collection[str] = (),
    group_of: Callable[[str], str] = lambda name: "settings",
) -> None:
    """Add one flag per setting of `model`. Values stay text until `core.settings.resolve`.

    group_of: title under which `--help` shows a setting, by its name.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        about = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        title = group_of(name)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        extra: dict[str, Any] = {"metavar": about.get("metavar", name.rsplit("_", 1)[-1].upper())}
        if _is_boolean(field.annotation):
            # A boolean flag may stand alone, or have a value: --flag, --flag false.
            extra |= {"nargs": "?", "const": "true"}
        elif "nargs" in about:
            extra["nargs"] = about["nargs"]
        # SUPPRESS leaves absent flags out of the namespace: `given_flags` tells them from defaults.
        extra |= {"dest": name, "default": argparse.SUPPRESS, "help": _help_text(field)}
        groups[title].add_argument(flag_of(name), **extra)
        if _is_boolean(field.annotation):
            no = flag_of(f"no_{name}")
            parser.add_argument(
                no, action="store_const", const="false", dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS
            )


def _help_text(field: FieldInfo) -> str:
    """Return a setting's help: its description, and its default where the description does not say it."""
    text, default = str(field.description), field.default
    if default not in (None, ()) and "default" not in text.lower():
        text += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    # argparse expands % in help texts.
    return text.replace("%", "%%")


def given_flags(model: type[SettingsModel], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings given on the command line, by name."""
    given = {name: getattr(arguments, name) for name in model.model_fields if hasattr(arguments, name)}
    return {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}


def seeds_of(text: str) -> tuple[int, ...]:
    """Read the value of `--seeds`, such as 0,1,2. Raises ConfigError for what is no seed and for repeated ones."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--seeds {text!r}: write whole numbers from 0, such as 0,1,2")
    try:
        return distinct_seeds(tuple(int(word) for word in words))
    except ValueError as error:
        raise ConfigError(f"--seeds {text!r}: {error}") from None


def processes_of(jobs: int) -> int:
    """Return the number of processes that `--jobs` asks for; 0: one a core. Raises ConfigError below 0."""
    if jobs < 0:
        raise ConfigError(f"--jobs must be 0 (one process a core) or more, not {jobs}")
    return jobs or os.cpu_count() or 1


def environment() -> Mapping[str, str]:
    """Return the process's environment variables; replaced in tests."""
    return os.environ


def _is_boolean(annotation: Any) -> bool:
    return annotation is bool or any(_is_boolean(each) for each in get_args(annotation))
