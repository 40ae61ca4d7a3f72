"""YAML files in which no mapping names a key twice: of two the last would win unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headway.core.errors import ConfigError


class _StrictYamlLoader(yaml.SafeLoader):
    """Only `load` uses it."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """As it is written: what is merged into a mapping is put beside its own keys later."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            # `<<` may appear several times.
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, str(key.value)) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} stands there twice in one mapping", key.start_mark
                )
            seen.add((key.tag, str(key.value)))
        return node


def load(text: str) -> Any:
    """As `yaml.safe_load`; a key that a mapping has twice is a YAMLError that names it and where it is."""
    return yaml.load(text, Loader=_StrictYamlLoader)


def read_yaml(path: str, such_as: str = "port: 8000") -> dict[str, Any]:
    """Read a YAML file that is a mapping of settings. such_as: an example of a setting, for errors.

    Raises ConfigError where the file cannot be read, or is anything else.
    """
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
