"""Settings of a command: one pydantic model from which flags, environment names, YAML keys and help come.

A field's name is its key in the YAML file; the flag is the name with dashes (`flag_of`) and the environment variable is
HEADWAY_ and the name in capitals (`variable_of`). Precedence: flag > environment > file > default. Which settings were
given, and did not come from a default, is pydantic's `model_fields_set`.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from headway.core.errors import ConfigError
from headway.core.file_sections import limit_words

_SECRETS = ("api_key", "admin_key")
"""Settings whose value is never printed."""


class SettingsError(ConfigError):
    """Values that no setting may have. `faults`: by setting ('' where several do not go together), what is wrong."""

    def __init__(self, faults: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {fault}" if name else fault for name, fault in faults.items()))
        self.faults = faults


class SettingsModel(BaseModel):
    """Base of all settings. A field's description is its help; making one of wrong values raises SettingsError."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
        elif variable_of(name) in environment:
            sources[name], values[name] = variable_of(name), environment[variable_of(name)]
        # A key without a value in the file means: the default.
        elif content.get(name) is not None:
            sources[name], values[name] = f"{origin}: {name}", content[name]
    try:
        return model(**values)
    except SettingsError as error:
        raise SettingsError({sources.get(name, name): fault for name, fault in error.faults.items()}) from None


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
    return f"{item['msg']} (got {item['input']!r})"
