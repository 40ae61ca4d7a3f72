"""The server's handle of one engine process, on this host or on another: the process, its channel and its
heartbeats.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.liveness import HeartbeatMonitor, IterationDeadline, IterationProgress
from headway.runtime.engine.protocol import (
    HEARTBEAT_SUFFIX,
    EngineInfo,
    FatalError,
    FromInstance,
    IterationOutputs,
    join_endpoints,
)
from headway.runtime.engine.supervisor import by_our_clock
from headway.runtime.launcher.network import ENGINE, guard_server, new_token, spawn
from headway.runtime.launcher.ray_hosts import RayHosts, RemoteProcess
from headway.runtime.launcher.standby import EngineTemplate, ForkedEngine

START_TIMEOUT_S = 120.0
"""An engine that sends no heartbeat for so long while it starts counts as hung."""

_decoder = msgspec.msgpack.Decoder(EngineInfo | IterationOutputs | FatalError | FromInstance)


class EngineChannel:
    """The server's sockets to one engine process: messages both ways, and its heartbeats.

    timeout_s: how long an engine that has started may send no heartbeat. deadline: how long one iteration may take.
    bind: called with the message and the heartbeat socket; its errors are passed on.
    """

    def __init__(
        self,
        timeout_s: float,
        bind: Callable[[zmq.Socket[Any], zmq.Socket[Any]], None],
        deadline: IterationDeadline | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._deadline = deadline
        self._progress = IterationProgress()
        self._limit_s = START_TIMEOUT_S
        self._heartbeats: HeartbeatMonitor | None = None
        self._context = zmq.asyncio.Context()
        # Heartbeats are polled synchronously, on the same context.
        self._plain: zmq.Context[Any] = zmq.Context.shadow(self._context.underlying)
        self._socket = self._context.socket(zmq.PAIR)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            self._socket.setsockopt(option, value)
        self._beats = self._plain.socket(zmq.PULL)
        self._was_there = self._disconnected = False
        try:
            bind(self._socket, self._beats)
        except BaseException:
            self.close()
            raise

    def send(self, frames: Sequence[Any]) -> None:
        """Send one message without blocking. Messages that an engine has not read when it ends are lost."""
        if not self._socket.closed:
            sent = cast("asyncio.Future[Any]", self._socket.send_multipart(frames, copy=False))
            sent.add_done_callback(_seen)

    async def receive(self) -> EngineInfo | IterationOutputs | FatalError | FromInstance:
        """Return the next message."""
        frame = await self._socket.recv()
        self._was_there = True
        message: EngineInfo | IterationOutputs | FatalError | FromInstance = _decoder.decode(frame)
        return message

    def started(self) -> None:
        """Begin to count silence, even if no heartbeat ever comes."""
        if self._heartbeats is None:
            self._heartbeats = HeartbeatMonitor([0], self._limit_s, time.monotonic())

    def ready(self) -> None:
        """Apply the shorter time-out of a started engine from now on."""
        self._limit_s = self._timeout_s
        # A running monitor keeps its time of the last heartbeat and only gets the shorter limit.
        if self._heartbeats is not None:
            self._heartbeats.timeout_s = self._limit_s

    @property
    def disconnected(self) -> bool:
        """Whether an established connection has ended. Messages in transit may be lost, and it is not reopened.

        A PAIR socket with an unbounded queue can send exactly while its authenticated peer is connected; connections
        that fail authentication change nothing.
        """
        if not self._disconnected and not self._socket.closed:
            there = bool(cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)
            self._disconnected = self._was_there and not there
            self._was_there |= there
        return self._disconnected

    @property
    def drained(self) -> bool:
        """Whether the connection has ended and all that came over it has been received."""
        return self.disconnected and not cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN

    def hang(self, now: float) -> str | None:
        """Return why the engine counts as hung, as the predicate of a sentence; None: it does not.

        Heartbeats are overdue (before `started`, silence counts from the first one), or say that one iteration takes
        longer than its deadline.
        """
        # Empty the socket: only the arrival of the newest heartbeat counts.
        while True:
            try:
                self._progress = IterationProgress.decode(self._beats.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            if self._heartbeats is None:
                self._heartbeats = HeartbeatMonitor([0], self._limit_s, now)
            self._heartbeats.record_beat(0, now)
        if self._heartbeats is not None and self._heartbeats.silent(now) is not None:
            return f"sent no heartbeat for {self._limit_s:g} s: it hangs"
        progress = self._progress
        if self._deadline is not None and self._deadline.missed(progress):
            predicted = f"{progress.predicted_s:.3g} s were predicted"
            return f"has computed one iteration for {progress.ran_s:.1f} s, where {predicted}: it hangs"
        return None

    def close(self) -> None:
        """Close the sockets. May be called repeatedly."""
        for socket in (self._socket, self._beats):
            socket.close()
        self._context.destroy(linger=0)


def _seen(sent: asyncio.Future[Any]) -> None:
    """Retrieve the exception of a failed send, so that asyncio does not log it: the loss is detected elsewhere."""
    if not sent.cancelled():
        sent.exception()


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


# One incarnation of an engine process on another host, with the interface of `runtime.engine.process`.
#
# It connects straight back, to two ports of this host that accept this one process only, whose settings hold a key made
# for it alone (CURVE: encrypted, both ends authenticated); strangers that connect there and leave change nothing. Its
# own connection is not re-established once it has ended, because messages on their way may be lost: the process then
# counts as lost. What its host knows of it comes through `RayHosts`.

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
