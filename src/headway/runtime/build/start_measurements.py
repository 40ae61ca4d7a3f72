"""What an engine measures when it starts, kept in files for the processes that take its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def remembered(file: str | None, kind: type[T], measure: Callable[[], T]) -> T:
    """Return what an earlier process has written to `file`; without that, `measure()`, which is then written there.

    file: None, measure each time. A file that cannot be read or written changes nothing but the time.
    """
    if file is None:
        return measure()
    path = Path(file)
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=kind)
    made = measure()
    with suppress(OSError):
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(made))
        scratch.replace(path)
    return made
