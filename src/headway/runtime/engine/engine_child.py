"""The server's handle of one incarnation of the engine process: the process, and the channel to it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import zmq

from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.engine_channel import EngineChannel
from headway.runtime.engine.instance_protocol import FromInstance
from headway.runtime.engine.iteration_deadline import IterationDeadline
from headway.runtime.engine.protocol import HEARTBEAT_SUFFIX, EngineInfo, FatalError, IterationOutputs
from headway.runtime.launcher.engine_spawn import spawn
from headway.runtime.launcher.engine_template import EngineTemplate, ForkedEngine

ENDED_IN_ORDER = "has ended with exit code 0"
"""What `EngineChild.wait_until_exited` returns after a drain."""
_LOOK_S = 0.1
"""Interval between two checks of the engine's heartbeats; the end of its process is noticed at once."""
_LAST_MESSAGES_S = 0.2
"""How long messages of an engine that has ended may still be on their way."""
_END_S = 2.0
"""How long an engine may take to end in order before it is killed."""


class EngineChild:
    """One engine process, started at construction. folder: holds its socket; serial: distinguishes incarnations."""

    ahead_s = 0.0
    """Seconds added to the engine's times to convert them to the server's clock."""
    abandoned = False
    """Whether the engine was lost with its host, which did not return in time."""

    def __init__(
        self,
        config: EngineConfig,
        module: str,
        folder: Path,
        serial: int,
        end_s: float = _END_S,
        template: EngineTemplate | None = None,
    ) -> None:
        """end_s: seconds within which `end` lets the process end in order. template: what the process is forked from;
        None: it is started anew."""
        endpoint = f"ipc://{folder}/e{serial}"

        def bind(messages: zmq.Socket[Any], beats: zmq.Socket[Any]) -> None:
            messages.bind(endpoint)
            beats.bind(endpoint + HEARTBEAT_SUFFIX)

        deadline = IterationDeadline(config.worker_timeout_s, config.hang_factor)
        self._channel = EngineChannel(config.engine_timeout_s, bind, deadline)
        self.fatal_error: FatalError | None = None
        """The engine's own report of why it ended, if it sent one."""
        self.served = False
        """Whether the engine has ever been ready."""
        self._end_s, self._template = end_s, template
        self._reaper: threading.Thread | None = None
        try:
            self.process: subprocess.Popen[bytes] | ForkedEngine
            self.process = spawn(endpoint, config, module) if template is None else template.fork(endpoint, config)
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
        with process_events(self.process) as event:
            while self.process.poll() is None:
                if (why := self._channel.hang(time.monotonic())) is not None:
                    return why
                if self._template is not None:
                    self._template.keep()
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), _LOOK_S)
                event.clear()
        until = time.monotonic() + _LAST_MESSAGES_S
        while time.monotonic() < until and not self._channel.drained:
            await asyncio.sleep(0.002)
        code = self.process.returncode
        assert code is not None
        self._kill_group()  # its workers end with it; one that is stopped might not
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
                self._kill_group()
                # wait() collects the exit status, without which the process remains as a zombie.
                self._reaper = threading.Thread(target=self.process.wait, name="reaper", daemon=True)
                self._reaper.start()
        if self._reaper is not None and not at_once:
            self._reaper.join(self._end_s)

    def _kill_group(self) -> None:
        """Kill the process and all that it has started."""
        if isinstance(self.process, ForkedEngine):
            self.process.kill_group()
            return
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def process_events(process: subprocess.Popen[bytes] | ForkedEngine) -> Iterator[asyncio.Event]:
    """Set the event, on the running loop, when there may be news of the process: it has ended, in the first place."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    own: int | None = None
    if isinstance(process, ForkedEngine):
        file = process.reports
    else:
        try:
            file = own = os.pidfd_open(process.pid)
        except (AttributeError, OSError):  # not Linux, or it has ended: the caller's interval serves
            yield event
            return
    loop.add_reader(file, event.set)
    try:
        yield event
    finally:
        loop.remove_reader(file)
        if own is not None:
            os.close(own)
