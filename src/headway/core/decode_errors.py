"""Allowed values at the place of a msgspec error, which names the place only."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union

import msgspec

_PLACE = re.compile(r" - at `\$([^`]*)`$")
_STEP = re.compile(r"\.(\w+)|\[[^\]]*\]")


def allowed(kind: type[msgspec.Struct], error: msgspec.ValidationError) -> str:
    """Return a clause for an error that arose while decoding `kind`; empty if the error needs none.

    For an unknown word: the words allowed there. For an unknown or missing field: the fields at its level."""
    text = str(error)
    found = _PLACE.search(text)
    kinds: list[Any] = [kind]
    # Follow the path of the error through the types; a union may leave several candidates.
    for step in _STEP.finditer(found[1] if found else ""):
        kinds = [each for one in kinds for each in _inner(one, step[1])]
    if text.startswith("Invalid enum value"):
        words = [word for each in kinds if typing.get_origin(each) is Literal for word in typing.get_args(each)]
        return f"allowed: {', '.join(map(str, words))}"
    if text.startswith("Object "):
        names = [name for each in kinds if _is_struct(each) for name in each.__struct_fields__]
        return f"fields: {', '.join(names)}"
    return ""


def _inner(kind: Any, field: str | None) -> list[Any]:
    """Return the types of a struct's field, or (`field` None) of an item of a list or mapping."""
    if _is_struct(kind):
        named = (each.type for each in msgspec.structs.fields(kind) if each.encode_name == field)
        return [part for each in named for part in _parts(each)]
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
        return _parts(inside[1 if issubclass(origin, Mapping) else 0])
    return []


def _parts(kind: Any) -> list[Any]:
    """Return the types of a union; any other type alone."""
    if typing.get_origin(kind) in (Union, UnionType):
        return [part for each in typing.get_args(kind) for part in _parts(each)]
    return [kind]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
