"""YAML files whose size is bounded, and in which no mapping names a key twice: of two the last would win unnoticed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from headway.core.errors import ConfigError
from headway.core.files import open_input

_MOST_BYTES = 256 << 10
"""Files of settings have some kilobytes; this much takes a second or two to read."""
_DEEPEST = 40
_MOST_NODES = 50_000
"""Values with what aliases stand for written out: a few lines of aliases can stand for billions."""


class _StrictYamlLoader(yaml.SafeLoader):
    """Only `load` uses it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0
        # Values below each node that is complete.
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As yaml does, within the limits."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        alias, begin, before = isinstance(event, yaml.AliasEvent), event.start_mark, self._nodes
        self._depth += 1
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"nested more than {_DEEPEST} deep", begin)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if alias and id(node) not in self._sizes:
            raise yaml.composer.ComposerError(None, None, "an alias stands for what it is a part of", begin)
        self._nodes += self._sizes[id(node)] if alias else 1
        if self._nodes > _MOST_NODES:
            raise yaml.composer.ComposerError(None, None, f"more than {_MOST_NODES} values", begin)
        self._sizes[id(node)] = self._nodes - before
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - its name in the base class
        """As yaml does, within the limit: each bracket that is open costs time at every later token."""
        if self.flow_level > _DEEPEST:
            raise yaml.scanner.ScannerError(None, None, f"nested more than {_DEEPEST} deep", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

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
    """As `yaml.safe_load`; YAMLError also for a key that a mapping has twice, and for what is too large or deep."""
    if len(text) > _MOST_BYTES:
        raise yaml.YAMLError(f"more than {_MOST_BYTES >> 10} KiB: not a file of settings")
    try:
        return yaml.load(text, Loader=_StrictYamlLoader)
    except ValueError as error:  # a number of thousands of digits, a day that no month has
        raise yaml.YAMLError(str(error)) from None


def read(path: Path) -> Any:
    """Return what a YAML file holds. Raises ConfigError where it cannot be read or is not valid."""
    try:
        with open_input(path) as file:
            # One more than is allowed: the rest need not be read to know.
            data = file.read(_MOST_BYTES + 1)
        return load(data.decode("utf-8", "strict" if len(data) <= _MOST_BYTES else "replace"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error


_KINDS = {
    "cluster": {"pools"},
    "plan": {"accelerators", "demands"},
    "accel": {"machine", "assumptions", "stage"},
    "simulate": {"cluster", "layout", "workload"},
}
"""Fields by which a file is known as one for a command, the first that fits."""


def read_yaml(path: str, such_as: str = "port: 8000", *, commands: tuple[str, ...] = ()) -> dict[str, Any]:
    """Read a YAML file that is a mapping of settings. such_as: an example of a setting, for errors.

    Raises ConfigError where the file cannot be read, or is anything else, such as a file for none of `commands`.
    """
    data = read(Path(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping of settings, such as '{such_as}'")
    for key in data:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: {key!r} is not the name of a setting: these are words, such as '{such_as}'")
    kind = next((name for name, fields in _KINDS.items() if fields & data.keys()), None)
    if commands and kind is not None and kind not in commands:
        raise ConfigError(f"{path} is a file for `headway {kind}`, not for `headway {commands[0]}`")
    return data
