"""What may stand in a file where msgspec has found fault: it names the place, and not what is allowed there."""

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
    """In words: of a word that is none of those that may stand there, these; of a field that nothing knows or that is
    missing, the fields at its level. Empty where the error says it all."""
    text = str(error)
    found = _PLACE.search(text)
    kinds: list[Any] = [kind]
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
    """What a field of a struct may be, or an item of a list or of a mapping (None)."""
    if _is_struct(kind):
        named = (each.type for each in msgspec.structs.fields(kind) if each.encode_name == field)
        return [part for each in named for part in _parts(each)]
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
        return _parts(inside[1 if issubclass(origin, Mapping) else 0])
    return []


def _parts(kind: Any) -> list[Any]:
    """The kinds of a union; of anything else, itself."""
    if typing.get_origin(kind) in (Union, UnionType):
        return [part for each in typing.get_args(kind) for part in _parts(each)]
    return [kind]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
