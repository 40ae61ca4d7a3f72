"""Decoding a request body: one JSON object, bounded in structure, with errors that name the field.

`null` counts as absent, as in the OpenAI API.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from headway.core.errors import RequestError

STRUCTURE_BYTES = 1 << 20
"""Most bytes of a body that are neither long text nor token ids: objects of a megabyte of JSON take 100 MB at most."""

_TEXTS = frozenset(("prompt", "messages", "input"))
"""Fields that may hold long texts."""
_IDS = frozenset(("prompt", "tokens"))
"""Fields that may hold many token ids."""
_SHORT_TEXT = 64
"""Bytes that a long text counts for: what its object takes besides the text itself."""
# Matches to the end of a text that is not closed, so that no byte is looked at twice.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_FIELD_NAME = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]{0,63})"\s*:')
_LOOK_BACK = 256 << 10
"""Bytes before an error in which the field's name is sought."""
_POSITION = re.compile(r"\(byte (\d+)\)")
_decoder = msgspec.json.Decoder()


def decode(body: bytes | bytearray) -> dict[str, Any]:
    """Decode a body, without fields that are null. Raises RequestError when it is not one JSON object."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _malformed(bytes(body), error) from None
    if not isinstance(fields, dict):
        raise RequestError("the request body must be a JSON object")
    return {name: value for name, value in fields.items() if value is not None}


def check_structure(body: bytes, most_ids: int) -> None:
    """Refuse a body whose decoded form is many times its size, before it is decoded. Raises RequestError.

    most_ids: most token ids of all prompts together.
    """
    size = ids = depth = begin = 0
    field = ""
    for found in _STRING.finditer(body):
        between = body[begin : found.start()]
        begin, text = found.end(), found.end() - found.start()
        depth += _opened(between)
        field_size, field_ids = _weight(between, field)
        size, ids = size + field_size, ids + field_ids
        size += min(text, _SHORT_TEXT) if field in _TEXTS else text
        # A name of the body's own object; its values come until the next one.
        if depth == 1 and text <= _SHORT_TEXT and body[begin : begin + 64].lstrip()[:1] == b":":
            field = body[found.start() + 1 : begin - 1].decode("utf-8", "replace")
        _check(size, ids, most_ids, field)
    field_size, field_ids = _weight(body[begin:], field)
    _check(size + field_size, ids + field_ids, most_ids, field)


def _opened(between: bytes) -> int:
    return between.count(b"{") + between.count(b"[") - between.count(b"}") - between.count(b"]")


def _weight(between: bytes, field: str) -> tuple[int, int]:
    """Return the bytes that a part between two texts counts for, and the token ids in it."""
    if field not in _IDS:
        return len(between), 0
    # Lists and objects take 64 bytes each, whatever is in them.
    return 32 * (between.count(b"[") + between.count(b"{")), between.count(b",")


def _check(size: int, ids: int, most_ids: int, field: str) -> None:
    if ids > most_ids:
        raise RequestError(f"'{field}' holds more than {most_ids} token ids, which is more than can be served", field)
    if size > STRUCTURE_BYTES:
        # At the field that passed the limit.
        name = field if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", field) else None
        where = f" at '{name}'" if name else ""
        raise RequestError(
            f"the request body has more than {STRUCTURE_BYTES >> 10} KiB besides long texts and token ids{where}; "
            "send fewer fields, keys or messages",
            name,
        )


def text_field(fields: Mapping[str, Any], name: str) -> str | None:
    """Return a field that is text; None when it is absent. Raises RequestError for another type."""
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise RequestError(f"'{name}' must be a string, not {kind(value)}", name)


def refuse(fields: Mapping[str, Any], name: str, allowed: Collection[object], why: str) -> None:
    """Raise RequestError for a field of an unsupported feature, unless its value is in `allowed` (no effect)."""
    value = fields.get(name)
    # The type is compared too: in Python True == 1 and 1 == 1.0.
    if value is not None and not any(value == item and type(value) is type(item) for item in allowed):
        raise RequestError(f"'{name}' is not supported: {why}", name)


def check_integer(value: object, name: str, low: int, high: int) -> int:
    """Return `value` as an integer in low..high. Raises RequestError that names the field `name`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"'{name}' must be an integer, not {kind(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"'{name}' must lie in {low}..{high} (got {short(value)})", name)
    return value


def kind(value: object) -> str:
    """Return the JSON type of a value, with its article, for error messages."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number",
        str: "a string",
        list: "an array",
        dict: "an object",
    }
    return names.get(type(value), "null")


def short(value: object) -> str:
    """Return a value for error messages, cut to 40 characters."""
    # str() of a huge integer is quadratic, and raises above 4,300 digits.
    text = str(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 40 else text[:37] + "..."


def _malformed(body: bytes, error: Exception) -> RequestError:
    """Describe invalid JSON and the field near it, without quoting the prompt. error: what the decoder raised."""
    if isinstance(error, RecursionError):
        return RequestError("the request body is nested too deeply")
    if "truncated" in str(error) or "surrogate" in str(error):
        # The decoder reports half a surrogate pair at the end of a text as truncated input.
        try:
            path = _half_pair(json.loads(body), "")
        except (ValueError, RecursionError):
            path = None
        if path is not None:
            field = re.split(r"[.\[]", path)[0]
            return RequestError(f"'{path}' holds half of a surrogate pair, which is not a character", field)
    truncated = "truncated" in str(error)
    place = _POSITION.search(str(error))
    name = _broken_field(body) or _field_before(body, int(place[1]) if place else len(body) if truncated else 0)
    where = f" in or after '{name}'" if name else ""
    if isinstance(error, UnicodeDecodeError):
        return RequestError(f"the text{where} is not valid UTF-8", name)
    if "out of range" in str(error):
        return RequestError(f"the number{where} is out of range", name)
    detail = ": it ends too early" if truncated else f" at byte {place[1]}" if place is not None else ""
    return RequestError(f"the request body is not valid JSON{where}{detail}", name)


def _half_pair(value: Any, path: str) -> str | None:
    """Return the path of the first text that has half of a surrogate pair; None where all are characters."""
    if isinstance(value, str):
        return None if value.isascii() or not re.search("[\ud800-\udfff]", value) else path
    if isinstance(value, list):
        inner = ((f"{path}[{index}]", each) for index, each in enumerate(value))
    elif isinstance(value, dict):
        names = [ascii(name)[1:-1] for name in value]
        if any(_half_pair(name, "name") for name in value):
            return path or next(shown for name, shown in zip(value, names, strict=True) if _half_pair(name, "name"))
        inner = ((f"{path}.{name}" if path else name, each) for name, each in zip(names, value.values(), strict=True))
    else:
        return None
    return next((found for name, each in inner if (found := _half_pair(each, name)) is not None), None)


def _broken_field(body: bytes) -> str | None:
    """Return the first field whose value cannot be read; None where the body is no object of values."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    for name, value in fields.items():
        try:
            msgspec.json.decode(value)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return name
    return None


def _field_before(data: bytes, position: int) -> str | None:
    """Return the last `"name":` up to `position`; None when it is far before.

    Quotes inside strings are escaped, so text cannot match.
    """
    names = _FIELD_NAME.findall(data, max(0, position - _LOOK_BACK), position + 1)
    return names[-1].decode() if names else None
