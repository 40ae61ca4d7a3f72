"""What tests give to a process that reads large bodies."""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headway.core.errors import RequestError


def size(tokenizer: Any, body: bytes) -> tuple[int, int]:
    """The process's number, and how many bytes it was given."""
    return os.getpid(), len(body)


def slow(tokenizer: Any, body: bytes, seconds: float) -> int:
    """Work for a while."""
    time.sleep(seconds)
    return len(body)


def hang(tokenizer: Any, body: bytes, seen: str) -> None:
    """Compute for ever; each process that begins adds a line to a file."""
    with open(seen, "a") as file:
        print(os.getpid(), file=file)
    while True:
        pass


def once(tokenizer: Any, body: bytes, seen: str, way: int) -> str:
    """Be killed or stopped the first time, then answer."""
    if not Path(seen).exists():
        Path(seen).write_text(str(os.getpid()))
        os.kill(os.getpid(), way)
        time.sleep(60.0)
    return "answered"


def die(tokenizer: Any, body: bytes) -> None:
    """End the process."""
    os.kill(os.getpid(), signal.SIGKILL)


def take(tokenizer: Any, body: bytes, count: int) -> int:
    """Take memory, and keep it."""
    kept = mmap.mmap(-1, count)
    for _ in range(count >> 20):
        kept.write(bytes(1 << 20))
    sys.modules["kept"] = kept  # type: ignore[assignment]
    return os.getpid()


def take_too_much(tokenizer: Any, body: bytes) -> None:
    """Ask for more memory than is allowed."""
    bytearray(1 << 40)


def refuse(tokenizer: Any, body: bytes) -> None:
    """Refuse the body."""
    raise RequestError("it is refused", "prompt")


def modules(tokenizer: Any, body: bytes) -> list[str]:
    """The modules that the process has imported."""
    return sorted(sys.modules)
