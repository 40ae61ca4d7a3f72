"""The processes that this one starts, the one handle for all of them (`ProcessHandle`), and how processes of several
hosts find and trust each other. No torch here.

Here are those that are spawned anew, and ranks, which are forked from a server that has torch imported. Engines forked
from a template are in `standby`, processes of other hosts in `ray_hosts`.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import multiprocessing
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from typing import Any

import msgspec
import zmq
from typing_extensions import override
from zmq.utils import z85

from headway.core.errors import ConfigError
from headway.core.files import ScratchFolder
from headway.runtime.engine.config import NUMERICS

ENGINE = "headway.runtime.assembly.engine_process"
RANK = "headway.runtime.executor.rank_process"


class ProcessHandle(ABC):
    """A process that this one has started, whatever it runs, and wherever."""

    pid: int | None = None
    """None: it is still to be started, or its host has not said it."""
    sentinel: int | None = None
    """A file descriptor that is readable when there may be news of the process's end. None: this system has none."""
    local = True
    """Whether it runs on this host."""
    abandoned = False
    """Whether it is gone because its host is, and none came in its place in time."""
    _reaper: threading.Thread | None = None

    @property
    def local_pid(self) -> int | None:
        """Its process id, if it runs on this host."""
        return self.pid if self.local else None

    @property
    @abstractmethod
    def ended(self) -> str | None:
        """How it has ended, as a phrase that follows 'worker 3'; None while it runs, or is to run."""

    @abstractmethod
    def join(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it and all that it has started. Not waited for."""

    def terminate(self) -> None:
        """Ask it to end in order."""
        self.kill()

    def end(self, grace_s: float) -> None:
        """Have it ended. May be called repeatedly.

        grace_s: how long it may take to end in order; 0: it is killed at once and not waited for. A process that the
        kernel does not release in time (it frees much memory, or waits for a disk) is left to a background thread.
        """
        if self.ended is None and self._reaper is None:
            if grace_s:
                self.terminate()
                self.join(grace_s)
            if self.ended is None:
                self.kill()
                # `join` collects the exit status, without which the process remains as a zombie.
                self._reaper = threading.Thread(target=self.join, name="reaper", daemon=True)
                self._reaper.start()
        if self._reaper is not None and grace_s:
            self._reaper.join(grace_s)


class LocalProcess(ProcessHandle):
    """A process of this host, which has an exit code."""

    @property
    @override
    def ended(self) -> str | None:
        code = self.poll()
        return None if code is None else f"has ended with {end_words(code)}"

    @abstractmethod
    def poll(self) -> int | None:
        """Return the exit code, below 0 the signal's number; None while the process runs."""


def end_words(code: int) -> str:
    """Return an exit code in words."""
    return f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"


class SpawnedProcess(LocalProcess):
    """A process that leads a group of its own."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = process, process.pid
        with suppress(AttributeError, OSError):  # not Linux
            self.sentinel = os.pidfd_open(process.pid)
            weakref.finalize(self, os.close, self.sentinel)

    @override
    def poll(self) -> int | None:
        return self._process.poll()

    @override
    def join(self, timeout_s: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    @override
    def kill(self) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @override
    def terminate(self) -> None:
        self._process.terminate()


def spawn(endpoint: str, config: msgspec.Struct, module: str = ENGINE, *more: str) -> SpawnedProcess:
    """Start a process that speaks to its server at `endpoint` and ends with this one.

    config: its settings, as its `module` reads them; more: arguments that follow. Raises OSError.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, endpoint, str(os.getpid()), *more],
        stdin=subprocess.PIPE,
        env={**NUMERICS, **os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, which is noticed
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
    return SpawnedProcess(process)


class RankProcess(LocalProcess):
    """One rank's process on this host, started at construction.

    It will speak to the engine at `endpoint`. settings: a RankConfig as JSON.
    """

    def __init__(self, rank: int, endpoint: str, settings: bytes) -> None:
        warm()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_run, args=(rank, endpoint, settings), name=f"headway-rank-{rank}")
        self._process.start()
        self.pid, self.sentinel = self._process.pid, self._process.sentinel

    @override
    def poll(self) -> int | None:
        return self._process.exitcode

    @override
    def join(self, timeout_s: float | None = None) -> None:
        self._process.join(timeout_s)

    @override
    def kill(self) -> None:
        self._process.kill()


def warm() -> None:
    """Let the fork server import torch, and return at once. Called as soon as ranks are known to follow."""
    # Its socket lies in multiprocessing's own folder, which stays on the disk after a kill.
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if "tempdir" not in config:
        folder = ScratchFolder("headway-ranks-")
        atexit.register(folder.close)
        config["tempdir"] = str(folder.path)
    forkserver.set_forkserver_preload([RANK])
    forkserver.ensure_running()


def _run(rank: int, endpoint: str, settings: bytes) -> None:
    """In the rank's process."""
    main: Callable[[int, str, bytes], None] = import_module(RANK).main
    main(rank, endpoint, settings)


# How processes find and trust each other: addresses of hosts, and CURVE keys.

_ANY_PORT = 9
_SIOCGIFADDR = 0x8915


def address_towards(address: str) -> str:
    """This host's own address on the way to `address`, by its routes; nothing is sent. Raises ConfigError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError as error:
            raise ConfigError(f"this host has no route to {address} ({error.strerror})") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None when no interface does."""
    if address.startswith("127."):
        address = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


# ZeroMQ CURVE keys, derived from a random token that processes of different hosts get through Ray. No torch.
#
# Connections are encrypted, and closed to peers without the token: the serving socket's permanent key pair is made from
# it, and without that public key, which is never sent, a client cannot even begin CURVE's handshake (RFC 26/CurveZMQ).
# Every connection has keys of its own beside that.

_PURPOSE = b"headway channel 1\x00"


def new_token() -> str:
    """192 random bits, as text."""
    return secrets.token_urlsafe(24)


def guard_server(socket: zmq.Socket[Any], token: str) -> None:
    """Admit only peers with the token. Called before `bind`."""
    secret = _server_secret(token)
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)
    socket.curve_server = True


def guard_client(socket: zmq.Socket[Any], token: str) -> None:
    """Prove this end's token, and refuse servers without it. Called before `connect`."""
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_serverkey = zmq.curve_public(_server_secret(token))


def _server_secret(token: str) -> bytes:
    if not zmq.has("curve"):
        raise ConfigError("several hosts need a ZeroMQ with CURVE, which this one was built without")
    return bytes(z85.encode(hashlib.sha256(_PURPOSE + token.encode()).digest()))
