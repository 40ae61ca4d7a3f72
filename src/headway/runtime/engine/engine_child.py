"""One incarnation of the engine process as the server sees it: the process, and the channel to it."""

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
_END_S = 2.0


class EngineChild:
    """Started at construction, in `folder`, where its socket is. `serial` tells incarnations of one folder apart."""

    ahead_s = 0.0
    """Added to its times to have times of our clock."""
    abandoned = False
    """Whether it is gone with its host, which did not come back in time."""

    def __init__(self, config: EngineConfig, module: str, folder: Path, serial: int) -> None:
        endpoint = f"ipc://{folder}/e{serial}"

        def bind(messages: zmq.Socket[Any], beats: zmq.Socket[Any]) -> None:
            messages.bind(endpoint)
            beats.bind(endpoint + HEARTBEAT_SUFFIX)

        self._channel = EngineChannel(config.worker_timeout_s, bind)
        self.fatal_error: FatalError | None = None
        """Its own report of why it ended, if it sent one."""
        self.served = False
        """Whether it has ever been ready."""
        self._reaper: threading.Thread | None = None
        try:
            self.process = spawn(endpoint, config, module)
        except BaseException:
            self._channel.close()
            raise

    def send(self, frames: Sequence[Any]) -> None:
        """See `EngineLine.send`."""
        self._channel.send(frames)

    async def receive(self) -> EngineInfo | IterationOutputs | FatalError | FromInstance:
        """The next message."""
        return await self._channel.receive()

    def ready(self) -> None:
        """Note that it has started: from now on the shorter time-out for silence applies."""
        self.served = True
        self._channel.ready()

    async def wait_until_exited(self) -> str:
        """Return when the process has ended or hangs: how, as a phrase that follows 'the engine process'."""
        while self.process.poll() is None:
            await asyncio.sleep(_LOOK_S)
            if self._channel.is_silent(time.monotonic()):
                return f"was not heard of for {self._channel.limit_s:g} s: it hangs"
        await asyncio.sleep(2 * _LOOK_S)  # its last messages may still be on their way
        code = self.process.returncode
        with suppress(OSError):  # its workers end with it; one that is stopped might not
            os.killpg(self.process.pid, signal.SIGKILL)
        return f"has ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def end(self, at_once: bool = False) -> None:
        """End it, whatever it is doing. at_once: returns at once; else it has a moment to end in order. One that the
        system does not let go of (it frees much memory, or waits for a disk) is left behind. Harmless when repeated."""
        self._channel.close()
        if self.process.poll() is None and self._reaper is None:
            if not at_once:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_END_S)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self._reaper = threading.Thread(target=self.process.wait, name="reaper", daemon=True)
                self._reaper.start()
        if self._reaper is not None and not at_once:
            self._reaper.join(_END_S)
