"""Reading the fields of a request body, one at a time, with errors that name the field and its limit.

A body is first decoded one level deep only (`dict[str, Raw]`): fields that no endpoint reads are never built, and a
prompt of a million token ids is decoded once, straight into integers. `null` counts as absent, as in the OpenAI API.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import msgspec

from headway.core.errors import RequestError

_ENVELOPE = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY = msgspec.json.Decoder()
_FIELD_NAME = re.compile(rb'"([A-Za-z_][A-Za-z0-9_]{0,63})"\s*:')
_LOOK_BACK = 256 << 10
"""Bytes before an error in which the field's name is sought: the search holds the interpreter's lock."""
_POSITION = re.compile(r"\(byte (\d+)\)")
# A high surrogate that no low one follows; JSON escapes may hold one, UTF-8 text cannot.
_LONE_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


class JsonObject:
    """The top-level fields of one JSON object."""

    def __init__(self, raw: dict[str, msgspec.Raw]) -> None:
        self._raw = raw

    @classmethod
    def parse(cls, body: bytes | bytearray) -> JsonObject:
        """Decode one level of a body. Raises RequestError when it is not one JSON object."""
        try:
            return cls(_ENVELOPE.decode(body))
        except msgspec.ValidationError:
            raise RequestError("the request body must be a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(bytes(body), error, None) from None

    def raw(self, name: str) -> msgspec.Raw | None:
        """Return the undecoded bytes of a field; None when it is absent or null."""
        value = self._raw.get(name)
        # Raw JSON values have no leading white space, and only null starts with "null".
        return None if value is None or bytes(memoryview(value)[:4]) == b"null" else value

    def get(self, name: str) -> Any:
        """Return the decoded value of any type; None when absent or null. Raises RequestError for invalid JSON."""
        raw = self.raw(name)
        if raw is None:
            return None
        try:
            return _ANY.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _malformed(bytes(raw), error, name) from None

    def text(self, name: str) -> str | None:
        """Return a string field; None when absent or null. Raises RequestError for another type."""
        value = self.get(name)
        if value is None or isinstance(value, str):
            return value
        raise RequestError(f"'{name}' must be a string, not {kind(value)}", name)

    def refuse(self, name: str, allowed: Collection[object], why: str) -> None:
        """Raise RequestError for a field of an unsupported feature, unless its value is in `allowed` (no effect)."""
        value = self.get(name)
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


def _malformed(data: bytes, error: Exception, name: str | None) -> RequestError:
    """Describe invalid JSON and the field near it, without quoting the prompt.

    data: the body, or the value of the field `name`; error: what the decoder raised.
    """
    if isinstance(error, RecursionError):
        return RequestError("the request body is nested too deeply" + (f" in '{name}'" if name else ""), name)
    # The decoder reports a lone surrogate at the end of a string as truncated input.
    truncated = "truncated" in str(error)
    surrogate = _LONE_SURROGATE.search(data) if truncated else None
    place = _POSITION.search(str(error))
    position = surrogate.start() if surrogate else int(place[1]) if place else len(data) if truncated else 0
    if name is None:
        name = _field_before(data, position)
    where = f" in or after '{name}'" if name else ""
    if isinstance(error, UnicodeDecodeError):
        return RequestError(f"the text{where} is not valid UTF-8", name)
    if surrogate:
        return RequestError(f"the text{where} holds half of a surrogate pair, which is not a character", name)
    if "out of range" in str(error):
        return RequestError(f"the number{where} is out of range", name)
    detail = ": it ends too early" if truncated else f" at byte {place[1]}" if place is not None else ""
    return RequestError(f"the request body is not valid JSON{where}{detail}", name)


def _field_before(data: bytes, position: int) -> str | None:
    """Return the last `"name":` up to `position`; None when it is far before.

    Quotes inside strings are escaped, so text cannot match.
    """
    names = _FIELD_NAME.findall(data, max(0, position - _LOOK_BACK), position + 1)
    return names[-1].decode() if names else None
