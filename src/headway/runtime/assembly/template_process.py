"""Entry point of the process that loads a model once and forks engines (`runtime.launcher.standby`).

usage: python -m headway.runtime.assembly.template_process SOCKET

A forked process has the memory of its parent and only the thread that forked: so nothing is computed on several threads
here, and each engine starts its own. It ends with the server, whose end of the socket closes; engines outlive it.
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
from functools import partial

import msgspec

from headway.core.batch import ClockProtocol
from headway.core.errors import ConfigError
from headway.core.logs import setup
from headway.perf.device import choose
from headway.runtime.assembly import engine_process
from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.service import EngineService
from headway.runtime.executor.profiling import look
from headway.runtime.launcher.standby import EXIT_CODE, MESSAGE_BYTES, PROCESS_ID, READY

log = logging.getLogger("headway.engine")

Preload = Callable[[EngineConfig], engine_process.Make]
"""Loads what engines share; returns what makes an engine around it."""


def import_libraries() -> None:
    """Import what a model needs, which needs no settings."""
    import headway.runtime.assembly.single_process  # noqa: F401


def load_model(config: EngineConfig) -> engine_process.Make:
    """Load the model on one thread. Raises ConfigError."""
    import torch

    if config.instance is not None:
        import headway.runtime.assembly.instance  # noqa: F401 — so that each engine need not

    from headway.runtime.assembly.single_process import load

    if choose(config.device, 1, look) is not None:
        raise ConfigError("standby forks processes, which CUDA does not allow: leave it out, or set device to cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    loaded = load(config)

    def make(
        config: EngineConfig, clock: ClockProtocol, service: EngineService, is_wanted: engine_process.IsWanted
    ) -> engine_process.MadeEngine:
        torch.set_num_threads(threads)
        return engine_process.real(config, clock, service, is_wanted, loaded)

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
        """By pidfd: the process's id, and the pipe for its exit status."""

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
                if _has_reader(pipes[0]):
                    poller.register(self._fork(message, pipes[0]), select.POLLIN)
                else:  # given up while the model was loaded
                    os.close(pipes[0])

    def _fork(self, message: bytes, pipe: int) -> int:
        """Fork an engine; return its pidfd."""
        endpoint, config = msgspec.json.decode(message, type=tuple[str, EngineConfig])
        pid = os.fork()
        if pid == 0:
            self._become(endpoint, config, pipe)
        watched = os.pidfd_open(pid)
        self._running[watched] = (pid, pipe)
        return watched

    def _become(self, endpoint: str, config: EngineConfig, pipe: int) -> None:
        """Be an engine until its end, in the forked process. Never returns."""
        code = 1
        try:
            os.setsid()
            _write(pipe, PROCESS_ID, os.getpid())
            self._channel.close()
            for watched, (_, other) in self._running.items():
                os.close(watched)
                os.close(other)
            code = engine_process.main(endpoint, partial(_has_reader, pipe), config, self._make)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            _write(pipe, EXIT_CODE, code)  # the template may have ended meanwhile
            os._exit(code)

    def _report(self, watched: int) -> None:
        pid, pipe = self._running.pop(watched)
        _, status = os.waitpid(pid, 0)
        os.close(watched)
        _write(pipe, EXIT_CODE, os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _write(pipe: int, what: bytes, number: int) -> None:
    """Write a line of `ForkedEngine`."""
    with suppress(BrokenPipeError):  # the server has forgotten the engine, or is gone
        os.write(pipe, b"%s %d\n" % (what, number))


def _has_reader(pipe: int) -> bool:
    """Whether the server has its end of an engine's pipe, which it closes when it ends, however it does."""
    poller = select.poll()
    poller.register(pipe, 0)
    return not poller.poll(0)


def live(preload: Preload = load_model, prepare: Callable[[], None] = import_libraries) -> None:
    """Run the process: load, then fork until the server is gone, and exit. prepare: what needs no settings."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole group; the server drains
    channel = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # until an engine runs: collections beside imports take a tenth of a start
    with suppress(ImportError):  # reported once there is an engine to report it
        prepare()
    gc.freeze()  # libraries stay: collections need not look at them
    settings = channel.recv(MESSAGE_BYTES)
    if not settings:  # the server has ended meanwhile, or needs none
        os._exit(0)
    config = msgspec.json.decode(settings, type=EngineConfig)
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
