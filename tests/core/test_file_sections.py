"""Faults of files made of sections: each names its field, what must hold, and what is allowed there."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from headway.core.errors import ConfigError
from headway.core.file_sections import FileSection, validated


class Leaf(FileSection):
    size: Annotated[int, Field(ge=1)] = 1
    tint: Literal["red", "blue"] = "red"


class Tree(FileSection):
    leaves: tuple[Leaf, ...]
    named: dict[str, Leaf] = {}
    root: str | Leaf = "deep"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "f: leaves is missing"),
        ([], "f: the file must be a mapping of fields, not []"),
        ({"leaves": [], "rot": 1}, "f: rot is not a field; allowed here: leaves, named, root (did you mean root?)"),
        ({"leaves": [{}, {"x": 1}]}, "f: leaves[1].x is not a field; allowed here: size, tint"),
        ({"leaves": [], "named": {"a": {"sise": 1}}}, "f: named.a.sise is not a field; allowed here: size, tint (did"),
        ({"leaves": [], "root": {"size": 0}}, "; root.size must be at least 1, not 0"),
        ({"leaves": [{"tint": "green"}]}, "f: leaves[0].tint must be 'red' or 'blue', not 'green'"),
        ({"leaves": 3}, "f: leaves must be a list, not 3"),
        ({"leaves": [{"size": "x"}]}, "f: leaves[0].size: Input should be a valid integer"),
        ({"leaves": [{"size": 0, "tint": 1}]}, "not 0; leaves[0].tint must"),
    ],
)
def test_fault_names_its_field_and_what_is_allowed(data: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        validated(Tree, data, "f")
    assert words in str(error.value)


def test_valid_data_is_frozen() -> None:
    tree = validated(Tree, {"leaves": [{"size": 2}]}, "f")
    assert tree.leaves == (Leaf(size=2),)
    with pytest.raises(ValueError, match="frozen"):
        tree.root = "x"
