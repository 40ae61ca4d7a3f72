"""Ranks as processes: started by forkserver with torch preloaded, connected over ZeroMQ. No torch here.

The forkserver imports once and each rank is a fork of it, so that ten ranks start nearly as quickly as one.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from typing import Any

import msgspec
import zmq

from headway import __version__
from headway.core.errors import ConfigError
from headway.core.scratch_folder import ScratchFolder
from headway.runtime.engine.protocol import EndProcess, FatalError
from headway.runtime.executor.messages import (
    CONTROL_IDENTITY,
    HEARTBEAT_IDENTITY,
    PROTOCOL_VERSION,
    FromRank,
    LoadedRank,
    RankHello,
    RankWelcome,
)
from headway.runtime.executor.rank_config import RankConfig
from headway.runtime.executor.rank_transport import Frame, RankLostError
from headway.runtime.launcher.heartbeat import HeartbeatMonitor
from headway.runtime.launcher.rank_launcher import RANK, end_words, launch
from headway.runtime.launcher.ray_hosts import RayHosts, RemoteProcess

_GRACE_S = 3.0
"""How long `close` waits for ranks to stop before it kills them."""
_LOOK_S = 0.5
"""Interval between two checks for silent ranks."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)


class ProcessTransport:
    """`RankTransport` to the ranks of `config.layout`, started at construction and ready after `start`.

    hosts: launches the ranks that run on other hosts. Each rank sends heartbeats from a separate thread; one that hangs
    or is cut off counts as lost after `config.timeout_s`.
    """

    def __init__(self, config: RankConfig, hosts: RayHosts | None = None) -> None:
        self._folder = ScratchFolder("headway-ranks-")
        self._directory = self._folder.path
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # Sending to a rank without a connection is an error, not a silent drop.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that was cut off may be back before that is noticed
        if hosts is None:
            endpoint = f"ipc://{self._directory}/ranks"
            self._socket.bind(endpoint)
        else:
            endpoint = hosts.open(self._socket)
        settings = msgspec.json.encode(config)
        self.processes: list[ForkServerProcess | RemoteProcess] = []
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        for rank in range(config.layout.accelerators):
            remote = None if hosts is None else hosts.launch(rank, endpoint, settings, RANK)
            process = launch(rank, endpoint, settings) if remote is None else remote
            self.processes.append(process)
            self._poller.register(process.sentinel, zmq.POLLIN)
        self._timeout_s = config.timeout_s
        self._pulse = HeartbeatMonitor(range(len(self.processes)), config.start_timeout_s, time.monotonic())

    @property
    def waits_on(self) -> tuple[Any, ...]:
        """See `RankTransport.waits_on`."""
        return (self._socket, *(process.sentinel for process in self.processes))

    def start(self) -> list[LoadedRank]:
        """Wait until all ranks have connected and loaded. Returns their reports, by rank.

        Raises ConfigError, with the rank's own message, when one cannot start.
        """
        try:
            hellos = self._gather()
            for rank, hello in enumerate(hellos):
                if (hello.protocol, hello.version) != (PROTOCOL_VERSION, __version__):
                    raise ConfigError(
                        f"worker {rank} is of version {hello.version} (protocol {hello.protocol}), the engine of "
                        f"{__version__} (protocol {PROTOCOL_VERSION})"
                    )
            for rank in range(len(hellos)):
                self.send(rank, (_encoder.encode(RankWelcome(hellos[0].store_port)),))
            ready = [hello.loaded for hello in self._gather() if hello.loaded is not None]
            if len({one.mark for one in ready}) > 1:
                raise ConfigError("the workers have loaded different checkpoints: " + ", ".join(r.mark for r in ready))
            # Until here the longer start time-out applied.
            self._pulse.timeout_s = self._timeout_s
            return ready
        except RankLostError as error:
            self.close()
            raise ConfigError(
                f"{error} while starting (its log says more; out of memory ends with signal 9)"
            ) from error
        except BaseException:
            self.close()
            raise

    def send(self, rank: int, frames: Sequence[Frame]) -> None:
        """See `RankTransport.send`."""
        try:
            self._socket.send_multipart([b"%d" % rank, *frames], copy=False)
        except zmq.ZMQError as error:
            self.processes[rank].join(1.0)  # its connection ends a moment before it does
            self._check_alive()
            raise RankLostError(rank, f"cannot be reached ({error})") from error

    def receive(self, timeout_s: float | None) -> tuple[int, list[bytes]] | None:
        """See `RankTransport.receive`. Messages that a rank sent before it ended are returned before the loss."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                # A rank has up to three connections; any message on any of them counts as a sign of life.
                rank = int(name.removeprefix(HEARTBEAT_IDENTITY).removeprefix(CONTROL_IDENTITY))
                self._pulse.record_beat(rank, time.monotonic())
                if not name.startswith(HEARTBEAT_IDENTITY):
                    return rank, frames
                continue
            except zmq.Again:
                self._check_silence()
            left_s = _LOOK_S if until is None else max(0.0, min(_LOOK_S, until - time.monotonic()))
            ready = dict(self._poller.poll(round(left_s * 1000.0)))
            # Only with an empty socket: what a rank sent before it ended is delivered first.
            if self._socket not in ready:
                self._check_alive()
                if until is not None and time.monotonic() >= until:
                    return None

    def kill(self) -> None:
        """See `RankTransport.kill`."""
        for process in self.processes:
            process.kill()
        self.close()

    def close(self) -> None:
        """See `RankTransport.close`."""
        for rank, process in enumerate(self.processes):
            if process.is_alive():
                try:
                    self._socket.send_multipart([b"%d" % rank, _encoder.encode(EndProcess())])
                except zmq.ZMQError:
                    process.kill()
        until = time.monotonic() + _GRACE_S
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._socket.close()
        self._context.destroy(linger=0)
        self._folder.close()

    def _check_alive(self) -> None:
        for rank, process in enumerate(self.processes):
            why = _ended(process)
            if why is not None:
                raise RankLostError(rank, why)

    def _check_silence(self) -> None:
        silent = self._pulse.silent(time.monotonic())
        if silent is not None:
            raise RankLostError(silent, f"sent no heartbeat for {self._pulse.timeout_s:g} s: it hangs or is cut off")

    def _gather(self) -> list[RankHello]:
        """Receive a hello from every rank; return them by rank."""
        replies: dict[int, RankHello] = {}
        while len(replies) < len(self.processes):
            message = self.receive(None)
            assert message is not None
            rank, frames = message
            try:
                reply = _decoder.decode(frames[0])
            except msgspec.ValidationError as error:
                raise ConfigError(f"worker {rank} is of another version than this engine's: {error}") from None
            if isinstance(reply, FatalError):
                raise ConfigError(reply.error if reply.final else f"worker {rank} failed while starting: {reply.error}")
            if not isinstance(reply, RankHello):
                raise ConfigError(f"worker {rank} sent {reply!r} while starting")
            replies[rank] = reply
        return [replies[rank] for rank in sorted(replies)]


def _ended(process: ForkServerProcess | RemoteProcess) -> str | None:
    """Return why a process has ended, as a phrase that follows 'worker 3'; None while it runs."""
    if isinstance(process, RemoteProcess):
        return process.ended
    return None if process.exitcode is None else f"has ended with {end_words(process.exitcode)}"
