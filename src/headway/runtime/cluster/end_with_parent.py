"""Run a command that ends with its parent: `python -m headway.runtime.cluster.end_with_parent PARENT WORDS…`.

The kernel sends SIGTERM when the parent has ended, however it did, so that no server is left behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def main(parent: int, words: list[str]) -> None:
    """Become the command. `parent`: the process id of the one that is to outlive it."""
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    # It may have ended before the request.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"{words[0]}: {error.strerror}: it is the pool's command")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
