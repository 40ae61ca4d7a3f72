"""What each client's script is given, and how it reports: imported by scripts that run in a client's environment.

A script calls `check` for each thing that it shows; the runner reads the lines that this prints. Any exception fails
the client's row. Standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

MARK = "check: "
"""Begins the lines that the runner reads."""
URL = os.environ.get("CLIENT_URL", "")
"""Of the server, without a path."""
LONGER_URL = os.environ.get("CLIENT_LONGER_URL", "")
"""Of a server of the same model with a longer context."""
MODEL = os.environ.get("CLIENT_MODEL", "")
"""Name that the model is served by."""
TOKENIZER = os.environ.get("CLIENT_TOKENIZER", "")
"""Folder with the model's tokenizer."""
SCRATCH = Path(os.environ.get("CLIENT_SCRATCH", "."))
"""An empty folder for files of the client's."""


def check(what: str, condition: object, result: object) -> None:
    """Report one thing that the client did. Raises AssertionError with the result when the condition does not hold."""
    assert condition, f"{what}: {result}"
    print(MARK + json.dumps([what, str(result)]), flush=True)


def run_tool(name: str, *arguments: str, timeout_s: float = 1100) -> str:
    """Run a command of this environment and return what it printed. Raises AssertionError when it fails."""
    command = [str(Path(sys.executable).parent / name), *arguments]
    done = subprocess.run(
        command, cwd=SCRATCH, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{name} ended with status {done.returncode}:\n{done.stdout[-3000:]}"
    return done.stdout


def free_port() -> int:
    """Return a TCP port that is free on loopback at present."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
