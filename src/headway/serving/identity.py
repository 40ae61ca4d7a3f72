"""Request ids: the client's own, cleaned, in answers and logs; and one that is unique for the engine."""

from __future__ import annotations

import itertools
import re
import uuid

_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
_LONGEST = 128
_counter = itertools.count()


def request_id(given: str | None) -> str:
    """The client's X-Request-Id with everything but letters, digits and `._:-` taken out, or a new random id."""
    cleaned = _UNSAFE.sub("", given)[:_LONGEST] if given else ""
    return cleaned or uuid.uuid4().hex


def engine_id(request: str) -> str:
    """Unique in this server process, even when clients repeat their ids."""
    return f"{request}#{next(_counter)}"
