"""Entry point of the process that loads a model once and forks engines (`runtime.launcher.engine_template`).

usage: python -m headway.runtime.build.template_process SOCKET

A forked process has the memory of its parent and only the thread that forked: so nothing is computed on several threads
here, and each engine starts its own. It ends with the server, whose end of the socket closes.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from headway.core.clock import ClockProtocol
from headway.core.structured_log import setup
from headway.runtime.build import engine_process
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.service import EngineService
from headway.runtime.launcher.engine_template import MESSAGE_BYTES, READY

log = logging.getLogger("headway.engine")

Preload = Callable[[EngineConfig], engine_process.Make]
"""Loads what engines share; returns what makes an engine around it."""


def load_model(config: EngineConfig) -> engine_process.Make:
    """Load the model on one thread. Raises ConfigError."""
    import torch

    from headway.runtime.build.single_process import load

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load(config)

    def make(
        config: EngineConfig, clock: ClockProtocol, service: EngineService, server_pid: int
    ) -> engine_process.MadeEngine:
        torch.set_num_threads(threads)
        return engine_process.real(config, clock, service, server_pid, loaded)

    return make


def _failing(error: Exception) -> engine_process.Make:
    """Return a function whose engines report the error, each to its own server."""

    def make(*_: object) -> engine_process.MadeEngine:
        raise error

    return make


class _EngineForks:
    """The engines that are running, by file descriptors that become readable when they end."""

    def __init__(self, channel: socket.socket, make: engine_process.Make) -> None:
        self._channel, self._make = channel, make
        self._running: dict[int, tuple[int, int]] = {}
        """Of each pidfd the process's id and the pipe for its exit status."""

    def run(self) -> None:
        """Fork engines on request until the server is gone."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        while True:
            for file, _ in poller.poll():
                if file != self._channel.fileno():
                    poller.unregister(file)
                    self._report(file)
                    continue
                message, pipes, _, _ = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
                if not message:
                    return
                poller.register(self._fork(message, pipes[0]), select.POLLIN)

    def _fork(self, message: bytes, pipe: int) -> int:
        """Fork an engine; return its pidfd."""
        endpoint, config = msgspec.json.decode(message, type=tuple[str, EngineConfig])
        template = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(endpoint, config, template, pipe)
        os.write(pipe, b"%d\n" % pid)
        watched = os.pidfd_open(pid)
        self._running[watched] = (pid, pipe)
        return watched

    def _become(self, endpoint: str, config: EngineConfig, template: int, pipe: int) -> None:
        """Be an engine until its end, in the forked process. Never returns."""
        code = 1
        try:
            os.setsid()
            self._channel.close()
            for watched, (_, other) in self._running.items():
                os.close(watched)
                os.close(other)
            os.close(pipe)
            # Its parent is the template, which ends with the server.
            code = engine_process.main(endpoint, template, config, self._make)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def _report(self, watched: int) -> None:
        pid, pipe = self._running.pop(watched)
        _, status = os.waitpid(pid, 0)
        os.close(watched)
        with suppress(BrokenPipeError):  # the server has forgotten it
            os.write(pipe, b"%d\n" % os.waitstatus_to_exitcode(status))
        os.close(pipe)


def live(preload: Preload = load_model) -> None:
    """Run the process: load, then fork until the server is gone, and exit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group; the server drains
    channel = socket.socket(fileno=int(sys.argv[1]))
    config = msgspec.json.decode(channel.recv(MESSAGE_BYTES), type=EngineConfig)
    setup(config.log_level, config.log_format)
    try:
        make = preload(config)
    except Exception as error:
        make = _failing(error)
    gc.collect()
    gc.freeze()  # a collection in an engine would write to, and so copy, what it shares
    try:
        channel.send(READY)
        _EngineForks(channel, make).run()
    except ConnectionError:  # the server ended meanwhile
        pass
    os._exit(0)


if __name__ == "__main__":
    live()
