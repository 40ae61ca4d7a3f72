"""`headway why` on a log in a process of its own, for a server: of vLLM with the plug-in, or Headway's own.

A replay takes the interpreter for seconds, which a server's other requests must not feel.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PATIENCE_S = 60.0


class LogExplainer:
    """Explains requests of a log, one at a time: each replay reads the whole log."""

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def explain(self, log: Path, request_id: str, under: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
        """Return (HTTP status, body): the JSON of `headway why`, or an error in OpenAI's form."""
        settings = [f"--under={each}" for each in under]
        words = ["why", f"--log={log}", *settings, "--json=-", "--", request_id]
        async with self._turn:
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "headway.cli.main", *words, stdout=pipe, stderr=pipe
            )
            try:
                out, err = await asyncio.wait_for(process.communicate(), _PATIENCE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                return error(
                    503, f"the log takes longer than {_PATIENCE_S:.0f} s to replay: run `headway why` beside it"
                )
            except asyncio.CancelledError:
                process.kill()
                raise
        if process.returncode:
            return error(404, err.decode(errors="replace").strip().removeprefix("headway: error: "))
        return 200, json.loads(out)


def error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    """Return (HTTP status, body) of an error in OpenAI's form."""
    kind = "NotFoundError" if status == 404 else "ServiceUnavailableError"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}
