"""Settings of a command: one pydantic model gives flags, environment names, YAML keys and help.

A field's name is its key in the YAML file; the flag is the name with dashes (`flag_of`) and the environment variable is
HEADWAY_ and the name in capitals (`variable_of`). Precedence: flag > environment > file > default. Which settings were
given, and did not come from a default, is pydantic's `model_fields_set`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from headway.core.errors import ConfigError
from headway.core.file_sections import FileSection, distinct_seeds, limit_words, parsed_by, shown
from headway.core.parse import duration, milliseconds, number, size, tokens

_OTHER_VARIABLES = ("HEADWAY_INSTANCE_API_KEY", "HEADWAY_ISA", "HEADWAY_NATIVE")
"""Variables that are no settings."""
_LINK, _LINKS = "tcp://", re.compile(r"HEADWAY_(\w*_)?(SERVICE_|PORT_\d)\w*")
"""Kubernetes gives containers the addresses of a service `headway`: HEADWAY_PORT=tcp://…, HEADWAY_SERVICE_HOST."""
_SECRETS = ("api_key", "admin_key")
"""Settings whose value is never printed."""


class SettingsError(ConfigError):
    """Values that no setting may have. `faults`: by setting ('' where several do not go together), what is wrong."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {fault}" if name else fault for name, fault in faults.items()))
        self.faults = faults


class SettingsModel(FileSection):
    """Base of all settings. A field's description is its help; making one of wrong values raises SettingsError."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise SettingsError(_faults(error)) from None


Settings = TypeVar("Settings", bound=SettingsModel)


def flag_of(name: str) -> str:
    """The command line's spelling of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment's spelling of a setting."""
    return f"HEADWAY_{name.upper()}"


def resolve(
    model: type[Settings],
    *,
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
    origin: str = "file",
) -> Settings:
    """Make the settings of a command. flags: by setting, of those given; file: the content of a YAML file, or a part of
    one, that `origin` names.

    Raises ConfigError that names the setting as its source spells it, and what is wrong.
    """
    flags, environment = flags or {}, environment or {}
    known = model.model_fields
    content = _known_keys(file or {}, known, origin)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name in known:
        if name in flags:
            sources[name], values[name] = flag_of(name), flags[name]
        elif variable_of(name) in environment and not environment[variable_of(name)].startswith(_LINK):
            sources[name], values[name] = variable_of(name), environment[variable_of(name)]
        # A key without a value in the file means: the default.
        elif content.get(name) is not None:
            sources[name], values[name] = f"{origin}: {name}", content[name]
    try:
        return model(**values)
    except SettingsError as error:
        raise SettingsError({sources.get(name, name): fault for name, fault in error.faults.items()}) from None


def unknown_variables(model: type[SettingsModel], environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each HEADWAY_ variable that no setting of `model` has."""
    known = (*map(variable_of, model.model_fields), *_OTHER_VARIABLES)
    found = []
    for name in sorted(environment):
        if name.startswith("HEADWAY_") and name not in known and not _LINKS.fullmatch(name):
            close = get_close_matches(name, known, 1, 0.6)
            found.append(f"{name} is set and no setting has that name" + "".join(f": did you mean {n}?" for n in close))
    return found


def overlay(base: Settings, over: Settings) -> Settings:
    """Return `base` with the settings that were given in `over`."""
    return base.model_copy(update={name: getattr(over, name) for name in over.model_fields_set})


def print_config(values: Mapping[str, Any]) -> str:
    """Write settings as a YAML file that `--config` takes, without those that are None. Keys are never printed."""
    import yaml

    shown = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v is not None}
    for secret in _SECRETS:
        if shown.get(secret):
            shown[secret] = "***"
    return str(yaml.safe_dump(shown, sort_keys=True))


def _known_keys(file: Mapping[str, Any], known: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The file's settings by name. Raises ConfigError for a key that no setting has, and for one that is there twice
    because both `a-b` and `a_b` name it."""
    spelled: dict[str, str] = {}
    for key in file:
        name = key.replace("-", "_")
        if name not in known:
            close = get_close_matches(name, known, 1, 0.6) or [each for each in known if each.startswith(name[:3])][:1]
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(known))}"
            raise ConfigError(f"{origin}: unknown setting {key!r}; {hint}")
        other = spelled.setdefault(name, key)
        if other != key:
            raise ConfigError(f"{origin}: {other!r} and {key!r} are one setting: say it once")
    return {name: file[key] for name, key in spelled.items()}


def _faults(error: ValidationError) -> dict[str, str]:
    faults: dict[str, str] = {}
    for item in error.errors():
        faults.setdefault(str(item["loc"][0]) if item["loc"] else "", _words(item["type"], item))
    return faults


def _words(kind: str, item: Any) -> str:
    """One fault without pydantic's phrasing: the limit, and the value at fault."""
    context = item.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "extra_forbidden":
        return "there is no such setting"
    words = limit_words(kind, item)
    if words is not None:
        return words
    return f"{item['msg']} (got {shown(item['input'])})"


# Types of settings as people write them: `port: WholeNumber`, `max_model_len: TokenCount | None`.
#
# A value comes as the text of a flag or of an environment variable, or as what YAML made of it. Each type turns it into
# the Python value, or says in one clause why it cannot: `'x' is not a whole number`.


def boolean(value: Any) -> bool:
    """Read true/false, yes/no, on/off or 1/0."""
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigError(f"{value!r} is neither true nor false")


def whole_number(value: Any) -> int:
    """Read an integer, or 8k; true is none, and 16.5 is not rounded to 16."""
    if isinstance(value, bool) or (isinstance(value, float) and value % 1):
        raise ConfigError(f"{value!r} is not a whole number")
    with suppress(ValueError, TypeError, OverflowError):
        return int(value)
    with suppress(ConfigError):
        return tokens(value)
    raise ConfigError(f"{value!r} is not a whole number")


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
Seconds = Annotated[float, parsed_by(duration)]
"""30, 30s, 500ms, 5min."""
Milliseconds = Annotated[float, parsed_by(milliseconds)]
"""55, 55ms, 0.055s."""
Text = Annotated[str, BeforeValidator(str)]
TextList = Annotated[tuple[str, ...], parsed_by(text_list)]
TokenCount = Annotated[int, parsed_by(tokens)]
"""8192, 128k (128,000), 128K (131,072)."""
ByteSize = Annotated[int, parsed_by(size)]
"""1073741824, 512MiB, 4G."""


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
