"""The server's handle of one incarnation of the engine process: the process, and the channel to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

from headway.runtime.cluster.messages import FromInstance
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.engine_channel import EngineChannel
from headway.runtime.engine.protocol import HEARTBEAT_SUFFIX, EngineInfo, FatalError, IterationOutputs
from headway.runtime.launcher.engine_spawn import spawn

_LOOK_S = 0.1
"""Interval between two checks of the process and its heartbeats."""
_END_S = 2.0
"""How long an engine may take to end in order before it is killed."""


class EngineChild:
    """One engine process, started at construction. folder: holds its socket; serial: distinguishes incarnations."""

    ahead_s = 0.0
    """Seconds added to the engine's times to convert them to the server's clock."""
    abandoned = False
    """Whether the engine was lost with its host, which did not return in time."""

    def __init__(self, config: EngineConfig, module: str, folder: Path, serial: int, end_s: float = _END_S) -> None:
        """end_s: seconds within which `end` lets the process end in order."""
        endpoint = f"ipc://{folder}/e{serial}"

        def bind(messages: zmq.Socket[Any], beats: zmq.Socket[Any]) -> None:
            messages.bind(endpoint)
            beats.bind(endpoint + HEARTBEAT_SUFFIX)

        self._channel = EngineChannel(config.worker_timeout_s, bind)
        self.fatal_error: FatalError | None = None
        """The engine's own report of why it ended, if it sent one."""
        self.served = False
        """Whether the engine has ever been ready."""
        self._end_s = end_s
        self._reaper: threading.Thread | None = None
        try:
            self.process = spawn(endpoint, config, module)
        except BaseException:
            self._channel.close()
            raise

    def send(self, frames: Sequence[Any]) -> None:
        """See `EngineChannel.send`."""
        self._channel.send(frames)

    async def receive(self) -> EngineInfo | IterationOutputs | FatalError | FromInstance:
        """Return the next message."""
        return await self._channel.receive()

    def ready(self) -> None:
        """Record that the engine has started: from now on the shorter time-out for silence applies."""
        self.served = True
        self._channel.ready()

    async def wait_until_exited(self) -> str:
        """Wait until the process has ended or hangs. Returns how, as a phrase that follows 'the engine process'."""
        while self.process.poll() is None:
            await asyncio.sleep(_LOOK_S)
            if self._channel.is_silent(time.monotonic()):
                return f"sent no heartbeat for {self._channel.limit_s:g} s: it hangs"
        await asyncio.sleep(2 * _LOOK_S)  # its last messages may still be on their way
        code = self.process.returncode
        with suppress(OSError):  # its workers end with it; one that is stopped might not
            os.killpg(self.process.pid, signal.SIGKILL)
        return f"has ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def end(self, at_once: bool = False) -> None:
        """End the process. May be called repeatedly.

        at_once: kill it and return immediately; otherwise it may end in order within `end_s`. A process that the
        kernel does not release in time (it frees much memory, or waits for a disk) is left to a background thread.
        """
        self._channel.close()
        if self.process.poll() is None and self._reaper is None:
            if not at_once:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(self._end_s)
            if self.process.poll() is None:
                # The whole process group: the engine's workers are in it.
                os.killpg(self.process.pid, signal.SIGKILL)
                # wait() collects the exit status, without which the process remains as a zombie.
                self._reaper = threading.Thread(target=self.process.wait, name="reaper", daemon=True)
                self._reaper.start()
        if self._reaper is not None and not at_once:
            self._reaper.join(self._end_s)
