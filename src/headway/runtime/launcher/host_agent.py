"""A host beside node 0: joins it, runs the processes that it asks for, and looks for it when it is gone. No torch.

It keeps no state of requests, and restarts nothing of its own accord: node 0 decides what shall run, and how often.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from headway.core.errors import ConfigError
from headway.runtime.launcher.host_messages import (
    DesiredState,
    FromHost,
    HostHello,
    HostLeaving,
    HostShutdown,
    LaunchProcess,
    ObservedState,
    ProcessEnded,
    ToHost,
)
from headway.runtime.launcher.network import HostEndpoint, resolve
from headway.runtime.launcher.rank_launcher import end_words
from headway.runtime.launcher.secret import guard_client

log = logging.getLogger("headway.host")

_ASK_S = 1.0
_ANEW_S = 5.0
"""An unanswered connection is made anew after so long: the host may have been cut off, and routes change."""
_REFUSALS = 3
"""Handshakes that fail in a row before the token is what is wrong."""
_TURN_MS = 250
_GRACE_S = 5.0

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[ToHost] = msgspec.msgpack.Decoder(ToHost)


class HostedProcess(Protocol):
    """What a host needs of a process of its own: `multiprocessing`'s ranks have it. sentinel: readable when it has
    ended; exitcode: None before that, and -9 after SIGKILL."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def sentinel(self) -> int: ...

    @property
    def exitcode(self) -> int | None: ...

    def kill(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...


class ProcessLauncher(Protocol):
    """How processes are started on this host.

    noun: one of them, in words.
    """

    noun: str

    def warm(self) -> None:
        """Some will follow. Returns at once."""

    def start(self, launch: LaunchProcess) -> HostedProcess:
        """One of them, running. Called in a thread; it may raise what it likes."""


class _StartingProcess(threading.Thread):
    """A process on its way, which takes as long as importing torch where it is the first: node 0 is heard meanwhile."""

    def __init__(self, starter: ProcessLauncher, launch: LaunchProcess) -> None:
        super().__init__(name=f"start-{launch.rank}", daemon=True)
        self.process: HostedProcess | None = None
        self.why = ""
        self._starter, self._launch = starter, launch
        self.start()

    def run(self) -> None:
        try:
            self.process = self._starter.start(self._launch)
        except Exception as error:
            self.why = f"{type(error).__name__} before it ran: {error}"


class HostAgent:
    """`run` returns when node 0 ends in order, or after `end`.

    mine: this host's terms. patience_s: how long to look for node 0, at first and whenever it is lost.
    """

    def __init__(
        self, endpoint: HostEndpoint, token: str, mine: HostHello, starter: ProcessLauncher, patience_s: float
    ) -> None:
        self._endpoint, self._token, self._mine, self._starter = endpoint, token, mine, starter
        self._address = f"tcp://{resolve(endpoint.host)}:{endpoint.port}"
        self._patience_s = patience_s
        self._context = zmq.Context()
        self._wanted: dict[int, LaunchProcess] = {}
        self._starting: dict[int, _StartingProcess] = {}
        self._processes: dict[int, HostedProcess] = {}
        self._ended: dict[int, str] = {}
        self._session = ""
        self._lost_s = 0.0
        self._refusals = 0
        self._left = False
        self._socket: zmq.Socket[Any] | None = None

    def run(self) -> None:
        """Raises ConfigError when node 0 refuses this host, or does not answer for `patience_s`."""
        try:
            while not self._left:
                self._seek()
                self._attend()
            self._say(HostLeaving(self._mine.run))
        finally:
            for one in self._starting.values():
                one.join()
            self._take_started()
            self._end_all()
            self._disconnect(linger_ms=500)
            self._context.term()

    def end(self) -> None:
        """Have `run` tell node 0 and return, soon. For signal handlers and other threads."""
        self._left = True

    # -- one connection after another ---------------------------------------------------------------------------

    def _seek(self) -> None:
        """Until node 0 has taken this host, or it is time to end."""
        self._mine = msgspec.structs.replace(self._mine, run=secrets.token_hex(8))
        began = time.monotonic()
        asked_s = anew_s = told_s = 0.0
        while not self._left and not self._session:
            now = time.monotonic()
            if now - began > self._patience_s:
                raise ConfigError(f"no server answered at {self._endpoint} within {self._patience_s:g} s")
            if now - told_s >= 10.0:
                log.info("looking for node 0 at %s; %.0f s left", self._endpoint, self._patience_s - (now - began))
                told_s = now
            if now - anew_s >= _ANEW_S:
                self._connect()
                anew_s = now
            if now - asked_s >= _ASK_S and self._say(self._mine):
                asked_s = now
            self._turn()

    def _attend(self) -> None:
        """Until node 0 is lost, or it is time to end."""
        if self._session:
            self._starter.warm()
            log.info("joined node 0 at %s as node %d of %d", self._endpoint, self._mine.node, self._mine.nodes)
        self._heard_s = time.monotonic()
        while not self._left and self._session:
            self._turn()
            if time.monotonic() - self._heard_s > self._lost_s:
                log.warning(
                    "nothing was heard of node 0 for %g s: ending its %ss, looking for it",
                    self._lost_s,
                    self._starter.noun,
                )
                self._end_all()
                self._session = ""

    def _connect(self) -> None:
        self._disconnect(linger_ms=0)
        self._socket = socket = self._context.socket(zmq.DEALER)
        # Without a connection a send fails with EAGAIN instead of being queued and arriving late.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 2000)
        guard_client(socket, self._token)
        self._monitor = socket.get_monitor_socket(_FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.connect(self._address)

    def _disconnect(self, linger_ms: int) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger=linger_ms)
            self._socket = None

    # -- one turn -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for a moment at most; hear node 0, and tell it of processes that have ended."""
        assert self._socket is not None
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, *(process.sentinel for process in self._processes.values())):
            poller.register(source, zmq.POLLIN)
        poller.poll(_TURN_MS)
        while self._monitor.poll(0):
            self._shake(recv_monitor_message(self._monitor)["event"])
        if self._reap():
            self._say(self._kept(0.0))
        while not self._left:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(_decoder.decode(frame))

    def _shake(self, event: int) -> None:
        self._refusals = self._refusals + 1 if event & _FAILED else 0
        if not self._refusals and self._session:
            self._say(self._mine)  # the connection broke and is back: perhaps to another engine
        if self._refusals >= _REFUSALS:
            raise ConfigError(
                f"what listens at {self._endpoint} does not take this host's token: give all hosts the same "
                "HEADWAY_RDZV_TOKEN (node 0 prints the one that it makes)"
            )

    def _hear(self, said: ToHost) -> None:
        if isinstance(said, DesiredState):
            self._heard_s = time.monotonic()
            # Another engine at the same address: processes of the one before are not its own.
            if said.session != self._session:
                self._end_all()
                self._ended.clear()
                self._session = said.session
            self._lost_s = said.lost_s
            self._keep(said.launches)
            self._say(self._kept(said.sent_s))
        elif isinstance(said, HostShutdown):
            log.info("node 0 has ended")
            self._left = True
        else:
            raise ConfigError(said.why)

    def _keep(self, launches: tuple[LaunchProcess, ...]) -> None:
        wanted = self._wanted = {one.serial: one for one in launches}
        # Ends before starts: new processes may need the memory of the old ones.
        self._end([self._processes.pop(serial) for serial in list(self._processes) if serial not in wanted])
        self._ended = {serial: why for serial, why in self._ended.items() if serial in wanted}
        for serial, one in wanted.items():
            if not any(serial in known for known in (self._starting, self._processes, self._ended)):
                log.info("starting %s %d", self._starter.noun, one.rank)
                self._starting[serial] = _StartingProcess(self._starter, one)

    def _kept(self, echo_s: float) -> ObservedState:
        ended = tuple(ProcessEnded(serial, why) for serial, why in self._ended.items())
        running = tuple((serial, process.pid or 0) for serial, process in self._processes.items())
        return ObservedState(self._mine.run, self._session, ended, running, echo_s, time.monotonic())

    def _reap(self) -> bool:
        """Take over what has started. Whether anything has, or has ended by itself."""
        changed = self._take_started()
        gone = {serial: process for serial, process in self._processes.items() if process.exitcode is not None}
        for serial, process in gone.items():
            assert process.exitcode is not None
            self._ended[serial] = end_words(process.exitcode)
            log.info("%s has ended with %s", process.name, self._ended[serial])
            del self._processes[serial]
        return changed or bool(gone)

    def _take_started(self) -> bool:
        done = {serial: one for serial, one in self._starting.items() if not one.is_alive()}
        for serial, one in done.items():
            del self._starting[serial]
            if one.process is None:
                self._ended[serial] = one.why
            elif serial in self._wanted:
                self._processes[serial] = one.process
            # No longer desired: it was dropped while it started.
            else:
                self._end([one.process])
        return bool(done)

    def _say(self, message: FromHost) -> bool:
        """Whether it is on its way. Not waited for: what is lost is said again."""
        assert self._socket is not None
        try:
            self._socket.send(_encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    # -- ends ---------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """What is still starting ends when it has started."""
        self._wanted.clear()
        self._end(list(self._processes.values()))
        self._processes.clear()

    @staticmethod
    def _end(processes: Sequence[HostedProcess]) -> None:
        """They hold nothing that is worth an orderly end; those in one wait for peers that are gone."""
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_GRACE_S)
