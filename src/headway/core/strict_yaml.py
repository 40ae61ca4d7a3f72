"""YAML that names no key twice: of two the last would win, and nobody would know of the other."""

from __future__ import annotations

from typing import Any

import yaml


class _StrictYamlLoader(yaml.SafeLoader):
    """Only `load` uses it."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """As it is written: what is merged into a mapping is put beside its own keys later."""
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
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
