"""Starting an engine's process, or a rank's on another host."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import msgspec

from headway.runtime.engine.numerics import NUMERICS

ENGINE = "headway.runtime.build.engine_process"


def spawn(endpoint: str, config: msgspec.Struct, module: str = ENGINE, *more: str) -> subprocess.Popen[bytes]:
    """A process that speaks to its server at `endpoint`, ends with this one, and leads a group of its own.

    config: its settings, as its `module` reads them; more: arguments that follow. Raises OSError.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, endpoint, str(os.getpid()), *more],
        stdin=subprocess.PIPE,
        env={**NUMERICS, **os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which is noticed
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
    return process
