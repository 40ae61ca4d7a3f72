"""A server that the cluster starts itself: its command, and its process, which ends with the cluster's.

As a program, `python -m headway.runtime.cluster.server_command PARENT WORDS…` becomes a command that ends with its
parent: the kernel sends SIGTERM when that has ended, however it did, so that no server is left behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
import sys
from contextlib import suppress
from pathlib import Path

from headway.core.errors import ConfigError

VLLM_COMMAND = (
    "vllm serve {model} --host 127.0.0.1 --port {port} --scheduler-cls headway.vllm.Scheduler "
    "--middleware headway.vllm.SloMiddleware --kv-events-config {kv_events}"
)
"""How a server is started where the pool has no `command`."""
_GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
_QUOTED_BYTES = 1500
_PR_SET_PDEATHSIG = 1


def server_words(command: str | None, model: str, index: int, port: int, kv_events: str) -> list[str]:
    """Return the words of a server's command.

    command: of the pool, in which `{model}`, `{port}`, `{index}` (the instance's number) and `{kv_events}` (the value
    of vLLM's `--kv-events-config`) are filled in; None: vLLM with Headway's scheduler. Raises ConfigError.
    """
    command = command or VLLM_COMMAND
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} cannot be read: {error}") from None
    filled = {"{model}": model, "{port}": str(port), "{index}": str(index), "{kv_events}": kv_events}
    # Not `str.format`: JSON in an argument has braces of its own.
    for mark, value in filled.items():
        words = [word.replace(mark, value) for word in words]
    return words


class ServerCommand:
    """The process of one server, in a process group of its own. Its output goes to a file, whose end errors quote."""

    def __init__(self, words: list[str], port: int, log: Path) -> None:
        self.words, self.url, self._log = words, f"http://127.0.0.1:{port}", log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return 0 if self._process is None else self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it was started and does not run any more."""
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> None:
        """Start the process."""
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "headway.runtime.cluster.server_command",
                str(os.getpid()),
                *self.words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )

    def last_words(self) -> str:
        """Return the end of its output, as part of a sentence."""
        try:
            text = self._log.read_bytes()[-_QUOTED_BYTES:].decode("utf-8", "replace").strip()
        except OSError:
            text = ""
        return f"it wrote:\n{text}" if text else "it wrote nothing"

    async def stop(self) -> None:
        """End the process and its children. Harmless when repeated."""
        process = self._process
        if process is None:
            return
        for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
            self.kill(number)
            try:
                async with asyncio.timeout(patience_s):
                    await process.wait()
            except TimeoutError:
                continue
            # The leader has ended; its children may not have: SIGKILL follows.

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the whole process group, if there is one."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def become(parent: int, words: list[str]) -> None:
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
    become(int(sys.argv[1]), sys.argv[2:])
