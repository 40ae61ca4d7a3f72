"""Request ids: the client's, sanitised, is a label in answers and logs; the server's own is the key.

A gateway may give several requests the same id, and a client that tries again its earlier one.
"""

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


def own_id() -> str:
    """Return an id that no other request of any server has: its key in the journal."""
    return f"hw-{uuid.uuid4().hex}"


def engine_id(request: str) -> str:
    """Return an id that is unique in this server process, even when clients repeat theirs."""
    return f"{request}#{next(_counter)}"
