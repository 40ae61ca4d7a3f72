"""Request ids: the client's, sanitised, for answers and logs; a unique one for the engine."""

from __future__ import annotations

import itertools
import re
import uuid

# Everything else could break a header or a log line.
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")
_LONGEST = 128
_counter = itertools.count()


def request_id(given: str | None) -> str:
    """Return the client's X-Request-Id reduced to letters, digits and `._:-`, or a new random id."""
    cleaned = _UNSAFE.sub("", given)[:_LONGEST] if given else ""
    return cleaned or uuid.uuid4().hex


def engine_id(request: str) -> str:
    """Return an id that is unique in this server process, even when clients repeat theirs."""
    return f"{request}#{next(_counter)}"
