"""The file of an event log, of a router or of an engine: one writer, and nothing that was written is thrown away."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from headway.core.errors import ConfigError

_PATIENCE_S = 5.0
"""How long an engine whose server was killed may still write to it."""


def open_event_log(path: str, buffering: int = 0) -> IO[bytes]:
    """Open it to append, empty, and locked for as long as it is open. A log that is there, of an earlier run, is kept
    beside it: FILE becomes FILE.until-20260102T030405Z, the time of its last line. What is no file (a pipe, /dev/null)
    is written to as it is. Raises ConfigError where it cannot be opened, and where another process writes to it."""
    try:
        while True:
            file = open(path, "ab", buffering=buffering)  # noqa: SIM115 - open for the process's life
            try:
                about = os.fstat(file.fileno())
                if not stat.S_ISREG(about.st_mode):
                    return file
                _lock(file)
                if not _still_there(path, about):
                    file.close()
                    continue
                about = os.fstat(file.fileno())
                if not about.st_size:
                    return file
                _keep(os.path.realpath(path), about.st_mtime)
            except BaseException:
                file.close()
                raise
            file.close()
    except BlockingIOError:
        raise ConfigError(f"event-log: another process writes to {path}: give each its own file") from None
    except OSError as error:
        raise ConfigError(f"event-log: {path}: {error.strerror}") from error


def _lock(file: IO[bytes]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
                raise
            return  # a file system without locks


def _still_there(path: str, about: os.stat_result) -> bool:
    """Whether the path is still this file's, which another process may have put aside meanwhile."""
    try:
        return os.path.samestat(os.stat(path), about)
    except FileNotFoundError:
        return False


def _keep(path: str, written_s: float) -> None:
    name = f"{path}.until-{datetime.fromtimestamp(written_s, UTC):%Y%m%dT%H%M%SZ}"
    kept, count = Path(name), 1
    while kept.exists():
        count += 1
        kept = Path(f"{name}-{count}")
    os.rename(path, kept)
