"""One incarnation of the engine process as the server sees it: its process, its socket, and its signs of life."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from headway.engine.cluster_messages import FromInstance
from headway.engine.config import EngineConfig
from headway.engine.numerics import NUMERICS
from headway.engine.protocol import BEATS, EngineInfo, Fatal, Outputs
from headway.parallel.beats import Pulse

START_TIMEOUT_S = 120.0
"""An engine that has given no sign of life for so long while it starts is hung."""
_LOOK_S = 0.1
_END_S = 2.0

_decoder = msgspec.msgpack.Decoder(EngineInfo | Outputs | Fatal | FromInstance)


class EngineChild:
    """Started at construction, in `folder`, where its socket is. `serial` tells incarnations of one folder apart."""

    def __init__(self, config: EngineConfig, module: str, folder: Path, serial: int) -> None:
        endpoint = f"ipc://{folder}/e{serial}"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._plain = zmq.Context()
        self._beats = self._plain.socket(zmq.PULL)
        self._pulse: Pulse | None = None
        self._timeout_s = config.worker_timeout_s
        self._limit_s = START_TIMEOUT_S
        self.words: Fatal | None = None
        """What it said of its own end."""
        self.served = False
        """Whether it has ever been ready."""
        try:
            self._socket.bind(endpoint)
            self._beats.bind(endpoint + BEATS)
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, endpoint, str(os.getpid())],
                stdin=subprocess.PIPE,
                env={**NUMERICS, **os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        except BaseException:
            self._hang_up()
            raise
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `gone` tells
            self.process.stdin.write(msgspec.json.encode(config))
            self.process.stdin.close()

    def send(self, frames: Sequence[Any]) -> None:
        """Never blocks. What an engine that is gone did not read is lost with it."""
        if not self._socket.closed:
            sent = cast("asyncio.Future[Any]", self._socket.send_multipart(frames, copy=False))
            sent.add_done_callback(_seen)

    async def receive(self) -> EngineInfo | Outputs | Fatal | FromInstance:
        """The next message."""
        message: EngineInfo | Outputs | Fatal | FromInstance = _decoder.decode(await self._socket.recv())
        return message

    def ready(self) -> None:
        """It has started: from now on its silence means more."""
        self.served = True
        self._limit_s = self._timeout_s
        if self._pulse is not None:
            self._pulse.timeout_s = self._limit_s

    async def gone(self) -> str:
        """Returns when the process has ended, or hangs: how, in words that follow 'the engine process'."""
        while self.process.poll() is None:
            await asyncio.sleep(_LOOK_S)
            if self._silent(time.monotonic()):
                return f"was not heard of for {self._limit_s:g} s: it hangs"
        await asyncio.sleep(2 * _LOOK_S)  # what it said last may still be on its way
        code = self.process.returncode
        with suppress(OSError):  # its workers end with it; one that is stopped might not
            os.killpg(self.process.pid, signal.SIGKILL)
        return f"has ended with {signal.Signals(-code).name if code < 0 else f'exit code {code}'}"

    def end(self, at_once: bool = False) -> None:
        """End it, whatever it is doing. Harmless when repeated."""
        self._hang_up()
        if self.process.poll() is None:
            if not at_once:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(_END_S)
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _hang_up(self) -> None:
        self._socket.close()
        self._beats.close()
        self._context.destroy(linger=0)
        self._plain.destroy(linger=0)

    def _silent(self, now: float) -> bool:
        """An engine that has never sent a beat sends none."""
        while True:
            try:
                self._beats.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if self._pulse is None:
                self._pulse = Pulse([0], self._limit_s, now)
            self._pulse.heard(0, now)
        return self._pulse is not None and self._pulse.silent(now) is not None


def _seen(sent: asyncio.Future[Any]) -> None:
    """Whether a message to an engine that is gone could be sent does not matter."""
    if not sent.cancelled():
        sent.exception()
