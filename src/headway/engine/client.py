"""The server's end: starts the engine process and speaks to it. The live `EngineClient`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import msgspec
import zmq
import zmq.asyncio

from headway.core.errors import ConfigError, OverloadedError, RequestError, UnavailableError
from headway.core.scratch import ScratchFolder
from headway.engine.config import EngineConfig
from headway.engine.numerics import NUMERICS
from headway.engine.protocol import (
    Abort,
    Delta,
    Drain,
    EngineInfo,
    EngineState,
    EngineStats,
    Fatal,
    Outputs,
    Submit,
)

_decoder = msgspec.msgpack.Decoder(EngineInfo | Outputs | Fatal)
_encoder = msgspec.msgpack.Encoder()
_LOST = "the engine process has ended unexpectedly; restart the server (its log says why)"


class ProcessEngineClient:
    """Spawns the engine at construction (so that it loads while the server imports its own modules) and connects when
    `start` is awaited. One instance per server.

    """

    def __init__(self, config: EngineConfig, module: str = "headway.cli.engine_process") -> None:
        self._folder = ScratchFolder("headway-engine-")
        self._endpoint = f"ipc://{self._folder.path}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(self._endpoint)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, self._endpoint],
            stdin=subprocess.PIPE,
            env={**NUMERICS, **os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(config))
        self._process.stdin.close()
        self._state: EngineState = "starting"
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._streams: dict[str, asyncio.Queue[Delta | None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._drained = asyncio.Event()
        self.failure: str | None = None
        """Why the engine could not start, once that is known."""

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("the engine is still starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def pid(self) -> int:
        """The engine's process id, for tests and operators."""
        return self._process.pid

    async def start(self) -> EngineInfo:
        """May be awaited by several; all get the same answer."""
        if self._ready is None:
            ready = self._ready = asyncio.get_running_loop().create_future()
            self._tasks = [asyncio.create_task(self._listen(ready)), asyncio.create_task(self._watch(ready))]
        try:
            return await asyncio.shield(self._ready)
        except ConfigError as error:
            self.failure = str(error)
            raise

    async def generate(self, submit: Submit, prompt: bytes | memoryview) -> AsyncIterator[Delta]:
        if self._state == "lost":
            raise UnavailableError(_LOST)
        if self._state != "ready":
            raise UnavailableError(f"the engine is {self._state}", 5.0)
        if submit.id in self._streams:
            raise RequestError(f"request id {submit.id!r} is in use", "id")
        stream: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._streams[submit.id] = stream
        finished = False
        try:
            await self._socket.send_multipart([_encoder.encode(submit), prompt], copy=False)
            while not finished:
                delta = await stream.get()
                if delta is None:
                    finished = True
                    raise UnavailableError(_LOST)
                finished = delta.finish is not None
                if delta.finish == "error" and delta.param is not None:
                    self._raise(delta)
                yield delta
        finally:
            self._streams.pop(submit.id, None)
            if not finished and self.state != "lost":
                self._socket.send(_encoder.encode(Abort(submit.id)))

    async def drain(self) -> None:
        if self._state in ("lost", "starting"):
            return
        self._state = "draining"
        await self._socket.send(_encoder.encode(Drain()))
        await self._drained.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(UnavailableError("the server is closing"))
            self._ready.exception()  # seen, should nobody wait for it
        self.end()

    def end(self) -> None:
        """What `close` does, for callers without an event loop. Harmless when repeated."""
        self._lose()
        self._socket.close()
        self._context.destroy(linger=0)
        self._folder.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @staticmethod
    def _raise(delta: Delta) -> None:
        message = delta.error or "the engine refused the request"
        if delta.param == "overloaded":
            raise OverloadedError(message)
        if delta.param == "unavailable":
            raise UnavailableError(message)
        raise RequestError(message, delta.param)

    async def _listen(self, ready: asyncio.Future[EngineInfo]) -> None:
        while True:
            message = _decoder.decode(await self._socket.recv())
            if isinstance(message, Outputs):
                if message.stats is not None:
                    self._stats = message.stats
                for delta in message.deltas:
                    stream = self._streams.get(delta.id)
                    if stream is not None:
                        stream.put_nowait(delta)
            elif isinstance(message, EngineInfo):
                if not ready.done():
                    self._info, self._state = message, "ready"
                    ready.set_result(message)
            else:
                if not ready.done():
                    ready.set_exception(ConfigError(message.error))
                self._lose()

    async def _watch(self, ready: asyncio.Future[EngineInfo]) -> None:
        while self._process.poll() is None:
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.2)  # what it said last may still be on its way
        if not ready.done():
            code = self._process.returncode
            ready.set_exception(ConfigError(f"the engine ended with exit code {code} while starting"))
        if self._state == "draining" and self._process.returncode == 0:
            self._drained.set()
        self._lose()

    def _lose(self) -> None:
        self._state = "lost"
        self._drained.set()
        for stream in self._streams.values():
            stream.put_nowait(None)
