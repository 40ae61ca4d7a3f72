"""Errors of files list the values or fields that are allowed at their place."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest

from headway.core.decode_errors import allowed


class Leaf(msgspec.Struct, forbid_unknown_fields=True):
    size: int = 0
    tint: Literal["red", "blue"] | float | None = None


class Tree(msgspec.Struct, forbid_unknown_fields=True):
    leaves: tuple[Leaf, ...]
    named: dict[str, Leaf] = {}
    kind: Literal["oak", "elm"] = "oak"
    root: Leaf | None = None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "fields: leaves, named, kind, root"),
        ({"leaves": [], "x": 1}, "fields: leaves, named, kind, root"),
        ({"leaves": [{}, {"sise": 1}]}, "fields: size, tint"),
        ({"leaves": [], "root": {"sise": 1}}, "fields: size, tint"),
        ({"leaves": [], "named": {"a": {"sise": 1}}}, "fields: size, tint"),
        ({"leaves": [], "kind": "ash"}, "allowed: oak, elm"),
        ({"leaves": [{"tint": "green"}]}, "allowed: red, blue"),
        ({"leaves": [], "named": {"a": {"tint": "green"}}}, "allowed: red, blue"),
        ({"leaves": [{"size": "x"}]}, ""),
        ([], ""),
    ],
)
def test_error_lists_allowed_values_at_the_wrong_place(data: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(data, Tree)
    assert allowed(Tree, caught.value) == words
