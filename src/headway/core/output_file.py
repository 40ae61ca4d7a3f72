"""Files that a command writes where the user asked: missing folders are made, and a refusal is one sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headway.core.errors import ConfigError


def check_outputs(*files: Path | None) -> None:
    """Make the folders of files that will be written, before the work whose results they are to hold.

    None and `-` (stdout) are passed over. Raises ConfigError where a file cannot be written.
    """
    for file in files:
        if file is None or str(file) == "-":
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from error
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder; name a file in it")
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f"cannot write {file}: permission denied")


def write_output(file: Path, body: bytes) -> None:
    """Write a file whole, under another name first: an interrupted run leaves no half of one. `-` is stdout.

    Raises ConfigError."""
    if str(file) == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(body)
        return
    check_outputs(file)
    # A link is kept, and what it names is written.
    file = file.resolve()
    scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        # What is no regular file (a pipe, /dev/stdout) is written as it is.
        if file.exists() and not file.is_file():
            file.write_bytes(body)
        else:
            scratch.write_bytes(body)
            scratch.replace(file)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
