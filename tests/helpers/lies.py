"""Files that lie: seeded mutations of JSON and bytes, and a bound on the work and memory that reading them takes."""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 3, 10**9, 10**12, 2**63, -(2**63), 10**400, 0.0, -0.5, 1.5, 1e300, 1e-300,
    float("nan"), float("inf"), float("-inf"), "", "4", "1e12", "../x", "\0", "\ud800", "x" * 20_000, [], {}, [[]],
    [1, "a", None], {"a": {"b": []}}, list(range(1000)),
]  # fmt: skip
"""Values that replace a value of a file."""
RUBBISH: list[bytes] = [
    b"", b"\0" * 5000, bytes(range(256)) * 20, b"[" * 200_000, b'{"a":' * 200_000, b"{}", b"[]", b"null", b"7",
    b'"text"', b"\xef\xbb\xbf{}", b'{"a": ' + b"9" * 5000 + b"}", b'{"a": NaN}', b"{'a': 1}", b'{"a": "\\ud800"}',
    b"\xff\xfe{\0}\0",
]  # fmt: skip
"""Contents that replace a whole file."""
_MOST_STEPS = 5_000_000
_MOST_BYTES = 1 << 30


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value in a tree of JSON."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (*path, key)
        yield from places(below, (*path, key))


def changed(value: Any, rng: random.Random) -> tuple[Any, str]:
    """Return a copy of a tree with one value replaced, left out or put under another name, and what was done."""
    value = json.loads(json.dumps(value))
    path = rng.choice(list(places(value)))
    at = value
    for key in path[:-1]:
        at = at[key]
    draw = rng.random()
    if draw < 0.08:
        del at[path[-1]]
        return value, f"without {path}"
    if draw < 0.14 and isinstance(at, dict):
        at[f"{path[-1]}_"] = at.pop(path[-1])
        return value, f"{path} renamed"
    at[path[-1]] = rng.choice(VALUES)
    return value, f"{path} = {str(at[path[-1]])[:60]!r}"


def damaged(data: bytes, rng: random.Random) -> tuple[bytes, str]:
    """Return other bytes, and what was done: cut off, some changed, repeated, or something else in their place."""
    draw = rng.random()
    if draw < 0.4 or not data:
        data = rng.choice(RUBBISH)
        return data, f"rubbish {data[:20]!r}"
    at = rng.randrange(len(data))
    if draw < 0.65:
        return data[:at], f"cut off at {at}"
    if draw < 0.9:
        some = rng.randbytes(rng.randint(1, 8))
        return data[:at] + some + data[at + len(some) :], f"{some!r} at {at}"
    return data[:at] + data, f"the first {at} bytes again"


NO_FILES = ("a pipe", "a folder", "a device", "a loop", "a hole of a terabyte", "nothing")


def replace_file(path: Path, kind: str) -> None:
    """Put one of `NO_FILES` in a file's place."""
    path.unlink(missing_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(path)
        case "a folder":
            path.mkdir()
        case "a device":
            path.symlink_to("/dev/zero")
        case "a loop":
            path.symlink_to(path.name)
        case "a hole of a terabyte":
            path.touch()
            os.truncate(path, 1 << 40)


class TooMuchWorkError(BaseException):
    """Not an Exception, so that no reader takes it for a fault of its file."""


@contextmanager
def bounded() -> Iterator[None]:
    """Within it, memory and steps of Python are limited: more raises."""
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal steps
        steps += 1
        if steps > _MOST_STEPS:
            raise TooMuchWorkError(f"more than {_MOST_STEPS} steps, the last in {frame.f_code.co_qualname}")
        return count

    before, limits = sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _MOST_BYTES, limits[1]))
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def check_sentence(words: str) -> None:
    """One line that a person reads to its end."""
    assert words
    assert "\n" not in words.strip(), words
    assert len(words) < 1000, words
