"""Node 0's side of several hosts: waits for them, sends the desired processes, and notices when one is gone. No torch.

A thread of its own says and hears everything, so that hosts are looked after whatever the engine is doing.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from headway import __version__
from headway.core.errors import ConfigError
from headway.runtime.launcher.host_compatibility import mismatch
from headway.runtime.launcher.host_messages import (
    DesiredState,
    FromHost,
    HostHello,
    HostLeaving,
    HostRefused,
    HostShutdown,
    LaunchProcess,
    ObservedState,
    ToHost,
)
from headway.runtime.launcher.network import HostEndpoint, resolve
from headway.runtime.launcher.remote_rank import RemoteProcess
from headway.runtime.launcher.secret import guard_server

log = logging.getLogger("headway.engine")

BEAT_S = 1.0
LOST_S = 10.0
"""A host of which nothing was heard for so long is lost (and so is node 0 to its hosts)."""
_FAREWELL_S = 2.0

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromHost] = msgspec.msgpack.Decoder(FromHost)


class _JoinedHost:
    """One that has joined. clocks: (round trip, seconds to add to its clock) of the last answers."""

    def __init__(self, name: bytes, hello: HostHello, now: float) -> None:
        self.name = name
        self.hello = hello
        self.heard_s = now
        self.clocks: deque[tuple[float, float]] = deque(maxlen=64)


class HostCoordinator:
    """Listens at `endpoint`, on that address only, from construction until `close`. `mine`: node 0's own terms.

    node_of: the node on which a rank, or whatever is numbered here, is to run. patience_s: how long a host may be away
    before what should run there has failed.
    """

    def __init__(
        self,
        endpoint: HostEndpoint,
        token: str,
        mine: HostHello,
        node_of: Callable[[int], int],
        patience_s: float,
        lost_s: float = LOST_S,
    ) -> None:
        self.address = resolve(endpoint.host)
        self._token, self._mine, self.node_of = token, mine, node_of
        self._patience_s, self._lost_s = patience_s, lost_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        guard_server(self._socket, token)
        try:
            self._socket.bind(f"tcp://{self.address}:{endpoint.port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen at {endpoint} ({error}): --rdzv-endpoint must be a free port at an address of node 0"
            ) from error
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._hosts: dict[int, _JoinedHost] = {}
        self._ahead_s: dict[int, float] = {}
        self._rivals: dict[str, float] = {}
        self._refused: dict[int, str] = {}
        self._processes: dict[int, RemoteProcess] = {}
        self._absent: dict[int, float] = {}
        self._serials = secrets.randbits(48)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def gather(self, wanted: Callable[[], bool] = lambda: True) -> list[HostHello]:
        """Return the hellos of all hosts, by node, as soon as all are there; log the missing ones every 10 s.

        Raises ConfigError after `patience_s`, or when `wanted` returns False.
        """
        began, told, timeout_s = time.monotonic(), 0.0, self._patience_s
        with self._changed:
            while missing := [node for node in range(1, self._mine.nodes) if node not in self._hosts]:
                now = time.monotonic()
                names = ", ".join(map(str, missing))
                if now - began > timeout_s or not wanted():
                    refused = "".join(f"; host {n} was refused: {why}" for n, why in self._refused.items())
                    raise ConfigError(f"no host came with --node-rank {names} within {timeout_s:g} s{refused}")
                if now - told >= 10.0:
                    told = now
                    left = timeout_s - (now - began)
                    log.warning(
                        "waiting for hosts: %d of %d are here, --node-rank %s missing; %.0f s left",
                        self._mine.nodes - len(missing), self._mine.nodes, names, left,
                    )  # fmt: skip
                self._changed.wait(0.5)
            if told:
                log.warning("all %d hosts are here", self._mine.nodes)
            return [self._mine, *(self._hosts[node].hello for node in range(1, self._mine.nodes))]

    def open(self, socket: zmq.Socket[Any]) -> str:
        """Bind the engine's socket for ranks on the same address, for peers with the token; return its endpoint."""
        guard_server(socket, self._token)
        port = socket.bind_to_random_port(f"tcp://{self.address}")
        return f"tcp://{self.address}:{port}"

    def launch(self, rank: int, endpoint: str, settings: bytes) -> RemoteProcess | None:
        """Have a rank's process run on its host, as soon as that is there; None for ranks of node 0, which runs its
        own."""
        node = self.node_of(rank)
        if node == 0:
            return None
        with self._changed:
            self._serials += 1
            launch = LaunchProcess(self._serials, rank, endpoint, settings.decode())
            process = RemoteProcess(launch, node, self._changed, self._drop)
            self._processes[launch.serial] = process
            if node not in self._hosts:
                self._absent.setdefault(node, time.monotonic())
        os.eventfd_write(self._wake, 1)
        return process

    def ahead_s(self, rank: int) -> float:
        """Seconds to add to the clock of that rank's host to have node 0's, as exact as half the round trip. Of a host
        that is gone, what was known last: what its processes said before is still to be read."""
        with self._changed:
            return self._ahead_s.get(self.node_of(rank), 0.0)

    def close(self) -> None:
        """Tell all hosts that this is the end. Harmless when repeated."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due_s = 0.0
        while not self._closing:
            ready = dict(poller.poll(max(0, round((due_s - time.monotonic()) * 1000.0))))
            with self._changed:
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    due_s = 0.0
                while (message := self._receive()) is not None:
                    if self._hear(*message):
                        due_s = 0.0
                now = time.monotonic()
                for node, host in list(self._hosts.items()):
                    if now - host.heard_s > self._lost_s:
                        self._lose(node, f"of which nothing was heard for {self._lost_s:g} s")
                for node, since in list(self._absent.items()):
                    if now - since > self._patience_s:
                        self._fail(node, f"which has not come back for {self._patience_s:g} s", for_good=True)
                if now >= due_s:
                    due_s = now + BEAT_S
                    for node, host in self._hosts.items():
                        self._send(host.name, self._keep(node))
        with self._changed:
            self._dismiss()
            for process in self._processes.values():
                process.end("was told to end")
            self._processes.clear()
        self._socket.close()
        self._context.term()

    def _dismiss(self) -> None:
        """Say that it is over until all have understood, for as long as that is worth waiting for."""
        until_s = time.monotonic() + _FAREWELL_S
        while self._hosts and time.monotonic() < until_s:
            for host in self._hosts.values():
                self._send(host.name, HostShutdown())
            self._socket.poll(200)
            while (message := self._receive()) is not None:
                self._hear(*message)

    def _keep(self, node: int) -> DesiredState:
        launches = (process.launch for process in self._processes.values() if process.node == node)
        return DesiredState(self._mine.run, tuple(launches), self._lost_s, time.monotonic())

    def _receive(self) -> tuple[bytes, bytes] | None:
        try:
            name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return name, frames[0] if frames else b""

    def _hear(self, name: bytes, frame: bytes) -> bool:
        """Handle a host's message; return whether a host has joined."""
        now = time.monotonic()
        try:
            said = _decoder.decode(frame)
        except msgspec.DecodeError:
            self._send(name, HostRefused(f"node 0 runs Headway {__version__}, and does not understand this host's"))
            return False
        if isinstance(said, HostHello):
            return not self._closing and self._greet(name, said, now)
        found = next(((node, host) for node, host in self._hosts.items() if host.hello.run == said.run), None)
        if found is None:
            # It was lost before; it will notice, and join again.
            return False
        if isinstance(said, HostLeaving):
            del self._hosts[found[0]]
            if not self._closing:
                log.warning("host %d has ended", found[0])
            self._fail(found[0], "which was told to end")
        else:
            self._note(found[1], said, now)
        return False

    def _greet(self, name: bytes, hello: HostHello, now: float) -> bool:
        why = mismatch(self._mine, hello)
        host = self._hosts.get(hello.node)
        if why is None and host is not None and host.hello.run != hello.run:
            since = self._rivals.setdefault(hello.run, now)
            if host.heard_s > since + 2.0 * BEAT_S:
                why = f"there is another process with --node-rank {hello.node}"
            elif now - host.heard_s < 3.0 * BEAT_S:
                # Not known yet whether the earlier process is alive; the new one repeats its hello.
                return False
            else:
                self._lose(hello.node, "which was started anew")
        if why is not None:
            log.warning("host %d was refused: %s", hello.node, why)
            self._refused[hello.node] = why
            self._send(name, HostRefused(f"node 0 refuses this host: {why}"))
            return False
        if hello.node in self._hosts:
            self._hosts[hello.node].name = name
            # A repeated hello: the answer has not arrived yet, or the connection was re-established.
            return True
        self._hosts[hello.node] = _JoinedHost(name, hello, now)
        self._rivals.pop(hello.run, None)
        self._refused.pop(hello.node, None)
        if self._absent.pop(hello.node, None) is not None:
            log.warning("host %d is back", hello.node)
        self._changed.notify_all()
        return True

    def _note(self, host: _JoinedHost, said: ObservedState, now: float) -> None:
        host.heard_s = now
        if said.echo_s:
            # As NTP does: the remote clock was read in the middle of the round trip; the shortest trip is most exact.
            trip = now - said.echo_s
            host.clocks.append((trip, said.echo_s + trip / 2.0 - said.now_s))
            self._ahead_s[host.hello.node] = min(host.clocks)[1]
        if said.session != self._mine.run:
            return
        for serial, pid in said.running:
            if serial in self._processes:
                self._processes[serial].pid = pid
        for gone in said.ended:
            process = self._processes.pop(gone.serial, None)
            if process is not None:
                process.end(f"(on host {host.hello.node}) has ended with {gone.why}")

    def _lose(self, node: int, why: str) -> None:
        del self._hosts[node]
        log.warning("lost host %d, %s; it can come back within %g s", node, why, self._patience_s)
        self._fail(node, why)

    def _fail(self, node: int, why: str, for_good: bool = False) -> None:
        """End what runs on that host; what was not known to run yet goes on waiting for it, unless that is over
        (for_good)."""
        self._absent.pop(node, None)
        for process in [process for process in self._processes.values() if process.node == node]:
            # Never reported as running: nothing is lost, and it starts when the host is back.
            if process.pid is None and not for_good:
                self._absent[node] = time.monotonic()
                continue
            del self._processes[process.launch.serial]
            process.abandoned = for_good
            process.end(f"was on host {node}, {why}")
        self._changed.notify_all()

    def _drop(self, serial: int) -> None:
        with self._changed:
            process = self._processes.pop(serial, None)
            if process is not None:
                process.end("was told to end")
                os.eventfd_write(self._wake, 1)

    def _send(self, name: bytes, message: ToHost) -> None:
        self._socket.send_multipart([name, _encoder.encode(message)])
