"""The server's handle of one engine process, on this host or on another, its sockets, and the supervisor that starts
another when one is lost.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio
from msgspec.structs import replace

from headway.core.errors import ConfigError
from headway.runtime.engine.config import EngineConfig, GaveUpError, RestartLimit, accumulate_counters
from headway.runtime.engine.liveness import HeartbeatMonitor, IterationDeadline, IterationProgress, StarvationCheck
from headway.runtime.engine.protocol import (
    HEARTBEAT_SUFFIX,
    EngineInfo,
    EngineSamples,
    EngineStats,
    FatalError,
    FromInstance,
    IterationOutputs,
    KvArrived,
    OutputDelta,
    SpanTaskDone,
    join_endpoints,
)
from headway.runtime.launcher.processes import ENGINE, ProcessHandle, guard_server, new_token, spawn
from headway.runtime.launcher.ray_hosts import RayHosts
from headway.runtime.launcher.standby import EngineTemplate

log = logging.getLogger("headway.engine")

START_TIMEOUT_S = 120.0
"""An engine that sends no heartbeat for so long while it starts counts as hung."""

Message = EngineInfo | IterationOutputs | FatalError | FromInstance

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


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
        self.process: ProcessHandle | None = None
        """Set once it is started: on this host, one that waits for a core is told from one that hangs."""
        self._starved = StarvationCheck()
        self._heartbeats: HeartbeatMonitor | None = None
        self._is_ready = False
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

    async def receive(self) -> Message:
        """Return the next message."""
        frame = await self._socket.recv()
        self._was_there = True
        return _decoder.decode(frame)

    def ready(self) -> None:
        """Apply the shorter time-out of a started engine from now on."""
        self._is_ready = True

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

        Heartbeats are overdue, or say that one iteration takes longer than its deadline.
        """
        pid = None if self.process is None else self.process.local_pid
        limit_s = self._timeout_s if self._is_ready else START_TIMEOUT_S
        # Silence counts from the first look on, even if no heartbeat ever comes.
        beats = self._heartbeats = self._heartbeats or HeartbeatMonitor([0], limit_s, now, lambda _: pid)
        beats.timeout_s = limit_s
        # Empty the socket: only the arrival of the newest heartbeat counts.
        with suppress(zmq.Again):
            while True:
                self._progress = IterationProgress.decode(self._beats.recv(zmq.NOBLOCK))
                beats.record_beat(0, now)
        if beats.silent(now) is not None:
            return f"sent no heartbeat for {limit_s:g} s: it hangs"
        progress, deadline = self._progress, self._deadline
        if deadline is None or not deadline.missed(progress):
            return None
        if self._starved.excuses(pid, deadline.allowed_s(progress), now):
            return None
        predicted = f"{progress.predicted_s:.3g} s were predicted"
        return f"has computed one iteration for {progress.ran_s:.1f} s, where {predicted}: it hangs"

    def close(self) -> None:
        """Close the sockets. May be called repeatedly."""
        for socket in (self._socket, self._beats):
            socket.close()
        self._context.destroy(linger=0)


ENDED_IN_ORDER = "has ended with exit code 0"
"""What `EngineProcess.wait_until_exited` returns after a drain."""
_LOOK_S = 0.1
"""Interval between two checks of the engine's heartbeats; the end of its process is noticed at once."""
_LAST_MESSAGES_S = 0.2
"""How long messages of an engine that has ended may still be on their way."""
_REPORT_S = 1.0
"""How long another host may take to say how a process ended whose connection has."""
_END_S = 2.0
"""How long an engine may take to end in order before it is killed."""


class EngineProcess:
    """One engine process, made by `start_engine` or `start_engine_elsewhere`. Tests have a double."""

    def __init__(
        self,
        channel: EngineChannel,
        process: ProcessHandle,
        ahead_s: Callable[[], float] | None = None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """ahead_s: seconds to be added to its times to have those of this host, for a process on another. keep: called
        again and again while the process is watched."""
        self._channel, self.process, self._ahead_s, self._keep = channel, process, ahead_s, keep
        channel.process = process
        self.fatal_error: FatalError | None = None
        """The engine's own report of why it ended, if it sent one."""
        self.served = False
        """Whether the engine has ever been ready."""

    @property
    def pid(self) -> int | None:
        """None until it is started."""
        return self.process.pid

    @property
    def ahead_s(self) -> float:
        """Seconds to be added to the engine's times to have those of this host."""
        return 0.0 if self._ahead_s is None else self._ahead_s()

    @property
    def abandoned(self) -> bool:
        """Whether the engine was lost with its host, which did not return in time."""
        return self.process.abandoned

    def send(self, frames: Sequence[Any]) -> None:
        """See `EngineChannel.send`."""
        self._channel.send(frames)

    async def receive(self) -> Message:
        """Return the next message, its times by the clock of this host."""
        message = await self._channel.receive()
        return message if self._ahead_s is None else by_our_clock(message, self._ahead_s())

    def ready(self) -> None:
        """Record that the engine has started: from now on the shorter time-out for silence applies."""
        self.served = True
        self._channel.ready()

    async def wait_until_exited(self) -> str:
        """Wait until the process has ended, hangs or is cut off. Returns how, as a phrase that follows 'the engine
        process'."""
        elsewhere, cut_s = not self.process.local, 0.0
        with _news(self.process) as event:
            while self.process.ended is None:
                now = time.monotonic()
                # A connection to another host is not opened again; its host may say how the process has ended.
                if elsewhere and self._channel.disconnected:
                    cut_s = cut_s or now
                    if now - cut_s > _REPORT_S:
                        return "was cut off: its connection has ended"
                elif self.process.pid is not None and (why := self._channel.hang(now)) is not None:
                    return f"{why}, or is cut off" if elsewhere else why
                self._keep()
                with suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), _LOOK_S)
                event.clear()
        until = time.monotonic() + _LAST_MESSAGES_S
        while time.monotonic() < until and not self._channel.drained:
            await asyncio.sleep(0.002)
        self.process.kill()  # its workers end with it; one that is stopped might not
        return self.process.ended

    def end(self, at_once: bool = False) -> None:
        """End the process; at_once: do not wait for it. May be called repeatedly."""
        self._channel.close()
        self.process.end(0.0 if at_once else _END_S)


def start_engine(
    config: EngineConfig, module: str, folder: Path, serial: int, template: EngineTemplate | None = None
) -> EngineProcess:
    """Start an engine on this host. Raises OSError.

    folder: holds its socket; serial: distinguishes incarnations; template: what the process is forked from; None: it is
    started anew.
    """
    endpoint = f"ipc://{folder}/e{serial}"

    def bind(messages: zmq.Socket[Any], beats: zmq.Socket[Any]) -> None:
        messages.bind(endpoint)
        beats.bind(endpoint + HEARTBEAT_SUFFIX)

    channel = EngineChannel(config.engine_timeout_s, bind, IterationDeadline.of(config))
    try:
        if template is None:
            return EngineProcess(channel, spawn(endpoint, config, module))
        return EngineProcess(channel, template.fork(endpoint, config), keep=template.keep)
    except BaseException:
        channel.close()
        raise


def start_engine_elsewhere(config: EngineConfig, number: int, hosts: RayHosts, module: str = ENGINE) -> EngineProcess:
    """Start an engine on the host of `number`, another than this one, as soon as that is there.

    It connects straight back, to two ports of this host that accept this one process only, whose settings hold a key
    made for it alone (CURVE: encrypted, both ends authenticated); strangers that connect there and leave change
    nothing. Its connection is not re-established once it has ended, because messages on their way may be lost: the
    process then counts as lost. What its host knows of it comes through `RayHosts`.
    """
    token, ports = new_token(), []

    def bind(*sockets: zmq.Socket[Any]) -> None:
        for socket in sockets:
            guard_server(socket, token)
            ports.append(socket.bind_to_random_port(f"tcp://{hosts.address}"))

    channel = EngineChannel(config.worker_timeout_s, bind, IterationDeadline.of(config))
    settings = msgspec.json.encode(replace(config, channel_token=token))
    endpoint = join_endpoints(*(f"tcp://{hosts.address}:{port}" for port in ports))
    process = hosts.launch(number, endpoint, settings, module)
    assert process is not None, "of this host it would be a child"
    return EngineProcess(channel, process, lambda: hosts.ahead_s(number))


@contextmanager
def _news(process: ProcessHandle) -> Iterator[asyncio.Event]:
    """Set the event, on the running loop, when there may be news of the process: it has ended, in the first place."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()
    if process.sentinel is None:  # the caller's interval serves
        yield event
        return
    loop.add_reader(process.sentinel, event.set)
    try:
        yield event
    finally:
        loop.remove_reader(process.sentinel)


class EngineSupervisor:
    """Starts an engine's process at construction, watches it, and starts another when that is gone, within limits.

    launch: starts a process of (settings, number of processes before it). names: the process and the engine, in words
    that errors use. where: added to the error that a process itself reports. clock: seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        launch: Callable[[EngineConfig, int], EngineProcess],
        names: tuple[str, str],
        incarnation: int = 0,
        where: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.incarnation = config, incarnation
        self._launch, self._where, self._clock = launch, where, clock
        self._process_name, self._name = names
        self.info: EngineInfo | None = None
        """The last process's report; None before the first is ready."""
        self.stats = self._before = EngineStats()
        """The newest snapshot, with the counters of earlier processes added."""
        self.failure: str | None = None
        """Why it could not start, or was given up."""
        self._ended_here = False
        """Whether the process was ended by `end`: then its channel's errors mean nothing."""
        self.process = launch(config, incarnation)
        self._restarts = RestartLimit(config.max_restarts, self._name, config.restart_window_s)

    async def watch(self, receive: Callable[[Message], None]) -> str:
        """Give a process's messages to `receive` until it is gone; return why, as a sentence.

        Raises what receiving raises.
        """
        listening = asyncio.create_task(self._listen(receive))
        going = asyncio.ensure_future(self.process.wait_until_exited())
        try:
            await asyncio.wait((listening, going), return_when=asyncio.FIRST_COMPLETED)
            if self._ended_here:
                return f"{self._process_name} was ended"
            if listening.done():
                listening.result()
            how = await going
        finally:
            for task in (listening, going):
                task.cancel()
                task.add_done_callback(_seen)
        fatal = self.process.fatal_error
        return f"{self._process_name} {how}" if fatal is None else f"{fatal.error}{self._where}"

    def replace(self, why: str) -> bool:
        """Start another process in place of one that is gone; False: it is given up (`failure`).

        Given up are an engine that never started, one whose host has not come back, and one that served and reported a
        final error; and any after too many restarts. Raises ConfigError when the system can start none.
        """
        process, fatal = self.process, self.process.fatal_error
        process.end(at_once=True)
        if self.info is None or process.abandoned or (fatal is not None and fatal.final and process.served):
            self.failure = why if fatal is not None or self.info is not None else f"{why} while starting"
            return False
        try:
            self._restarts.spend(self._clock(), why)
        except GaveUpError as error:
            self.failure = str(error)
            return False
        log.warning("%s; starting it again", why)
        self.incarnation += 1
        # Base of the new process's counters, which start at 0: totals never fall.
        self.stats = self._before = accumulate_counters(self.stats, EngineStats(engine_restarts_total=1))
        config = self.config
        # The same pool size as before: accepted requests rely on it, however little memory is free now.
        if config.kv_cache_bytes is None:
            config = replace(config, kv_cache_bytes=self.info.kv_bytes)
        # A file of its own: the event log of the lost process is kept.
        if config.event_log is not None:
            config = replace(config, event_log=f"{config.event_log}.{self.incarnation}")
        try:
            self.process, self._ended_here = self._launch(config, self.incarnation), False
        except OSError as error:
            raise ConfigError(f"{self._name} cannot be started again: {error}") from error
        return True

    def clear_gauges(self) -> None:
        """Record that nothing runs: counters stay, gauges are zero."""
        self.stats = accumulate_counters(self.stats, EngineStats())

    def end(self) -> None:
        """End the process at once; `watch` returns."""
        self._ended_here = True
        self.process.end(at_once=True)

    async def _listen(self, receive: Callable[[Message], None]) -> None:
        process = self.process
        while True:
            message = await process.receive()
            if isinstance(message, IterationOutputs) and message.stats is not None:
                self.stats = accumulate_counters(self._before, message.stats)
            elif isinstance(message, EngineInfo):
                process.ready()
                self._restarts.record_up(self._clock())
                self.info = message
            elif isinstance(message, FatalError):
                process.fatal_error = message
            receive(message)


def _seen(task: asyncio.Future[Any]) -> None:
    """Retrieve a cancelled task's exception, so that asyncio does not log it as never retrieved."""
    if not task.cancelled():
        task.exception()


def by_our_clock(message: Message, ahead_s: float) -> Message:
    """Return the message with `ahead_s` added to all times."""
    match message:
        case IterationOutputs(deltas=deltas, samples=samples):
            moved_samples = None if samples is None else _samples(samples, ahead_s)
            return replace(message, deltas=tuple(_delta(each, ahead_s) for each in deltas), samples=moved_samples)
        case SpanTaskDone(delta=delta):
            moved = None if delta is None else _delta(delta, ahead_s)
            began_s, ended_s = message.began_s + ahead_s, message.ended_s + ahead_s
            return replace(message, began_s=began_s, ended_s=ended_s, delta=moved)
        # Other messages carry no times.
        case KvArrived():
            return replace(message, began_s=message.began_s + ahead_s, ended_s=message.ended_s + ahead_s)
    return message


def _samples(samples: EngineSamples, ahead_s: float) -> EngineSamples:
    iterations = (
        replace(one, decided_s=one.decided_s + ahead_s, start_s=one.start_s + ahead_s, end_s=one.end_s + ahead_s)
        for one in samples.iterations
    )
    return EngineSamples(tuple(iterations), tuple(replace(one, due_s=one.due_s + ahead_s) for one in samples.waiting))


def _delta(delta: OutputDelta, ahead_s: float) -> OutputDelta:
    """Correct a delta. A time of 0 is unknown and stays."""
    first_s = delta.first_scheduled_s
    return replace(
        delta,
        emitted_s=delta.emitted_s and delta.emitted_s + ahead_s,
        first_scheduled_s=None if first_s is None else first_s + ahead_s,
    )
