"""One incarnation of an engine process on another host, with the interface of `runtime.engine.engine_child`.

It connects straight back, to two ports of this host that accept this one process only, whose settings hold a key made
for it alone (CURVE: encrypted, both ends authenticated); strangers that connect there and leave change nothing. Its own
connection is not re-established once it has ended, because messages on their way may be lost: the process then counts
as lost. What its host knows of it comes through `RayHosts`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from headway.runtime.engine.clock_offsets import by_our_clock
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.engine_channel import EngineChannel
from headway.runtime.engine.instance_protocol import FromInstance
from headway.runtime.engine.iteration_deadline import IterationDeadline
from headway.runtime.engine.protocol import EngineInfo, FatalError, IterationOutputs, join_endpoints
from headway.runtime.launcher.engine_spawn import ENGINE
from headway.runtime.launcher.ray_hosts import RayHosts, RemoteProcess
from headway.runtime.launcher.secret import guard_server, new_token

_LOOK_S = 0.1
_REPORT_S = 1.0
"""How long its host may take to say how a process ended whose connection has."""


class RemoteEngine:
    """Started at construction, on the host of `number`, as soon as that is there."""

    def __init__(self, config: EngineConfig, number: int, hosts: RayHosts, module: str = ENGINE) -> None:
        self._number, self._hosts = number, hosts
        token, ports = new_token(), []

        def bind(*sockets: zmq.Socket[Any]) -> None:
            for socket in sockets:
                guard_server(socket, token)
                ports.append(socket.bind_to_random_port(f"tcp://{hosts.address}"))

        deadline = IterationDeadline(config.worker_timeout_s, config.hang_factor)
        self._channel = EngineChannel(config.worker_timeout_s, bind, deadline)
        self.fatal_error: FatalError | None = None
        """What it said of its own end."""
        self.served = False
        """Whether it has ever been ready."""
        settings = msgspec.json.encode(msgspec.structs.replace(config, channel_token=token))
        endpoint = join_endpoints(*(f"tcp://{hosts.address}:{port}" for port in ports))
        process = hosts.launch(number, endpoint, settings, module)
        assert process is not None, "of this host it would be a child"
        self.process: RemoteProcess = process

    @property
    def ahead_s(self) -> float:
        """To be added to its clock to have ours."""
        return self._hosts.ahead_s(self._number)

    @property
    def abandoned(self) -> bool:
        """Whether it is gone because its host is, and that was waited for."""
        return self.process.abandoned

    def send(self, frames: Sequence[Any]) -> None:
        """See `EngineChannel.send`."""
        self._channel.send(frames)

    async def receive(self) -> EngineInfo | IterationOutputs | FatalError | FromInstance:
        """The next message, its times by our clock."""
        return by_our_clock(await self._channel.receive(), self.ahead_s)

    def ready(self) -> None:
        """It has started: from now on its silence means more."""
        self.served = True
        self._channel.ready()

    async def wait_until_exited(self) -> str:
        """Returns when the process has ended, is cut off or hangs, or its host is lost: how, in words that follow 'the
        process of instance 3'."""
        cut_s: float | None = None
        while self.process.ended is None:
            await asyncio.sleep(_LOOK_S)
            now = time.monotonic()
            if self.process.pid is not None:
                self._channel.started()
            if self._channel.disconnected:
                cut_s = now if cut_s is None else cut_s
                if now - cut_s > _REPORT_S:
                    return "was cut off: its connection has ended"
            elif (why := self._channel.hang(now)) is not None:
                return f"{why}, or is cut off"
        await asyncio.sleep(2 * _LOOK_S)  # what it said last may still be on its way
        return self.process.ended

    def end(self, at_once: bool = False) -> None:
        """Have it ended, whatever it is doing; not waited for. Harmless when repeated."""
        self._channel.close()
        self.process.kill()
