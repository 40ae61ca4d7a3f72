"""A process that has loaded a model and forks engines, seen from the server: the standby for an engine that is lost.

A fork shares the memory of weights, libraries and interpreter until it writes to it, so that the template costs little
beside the engine, and an engine starts without loading. `runtime.build.template_process` is the process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Lock

import msgspec

from headway.runtime.engine.config import EngineConfig
from headway.runtime.engine.numerics import NUMERICS

TEMPLATE = "headway.runtime.build.template_process"
READY = b"ready"
"""Sent by the template when it has loaded."""
MESSAGE_BYTES = 1 << 17
"""Longest message to a template: an engine's settings."""
_ANSWER_S = 5.0
"""How long a template that has loaded may take to fork."""
_LOST = -signal.SIGKILL


class ForkedEngine:
    """An engine's process that a template has forked, with the part of `subprocess.Popen` that is needed.

    The template reports process id and exit status on a pipe, since the process is no child of this one.
    """

    def __init__(self, template: EngineTemplate, reports: int) -> None:
        self.reports = reports
        """Becomes readable when the process is there, and when it has ended."""
        self.pid: int | None = None
        """None: not forked yet."""
        self.returncode: int | None = None
        self._template = template
        self._asked_s: float | None = None
        self._pending: signal.Signals | None = None
        """To be sent once the process is there."""
        self._text = b""
        self._lock = Lock()
        os.set_blocking(reports, False)

    def poll(self) -> int | None:
        """Return the exit status; None while the process runs, or is still to be forked."""
        with self._lock:
            if self.returncode is None:
                self._read()
        if self.returncode is None and self.pid is None and self._template.loaded:
            now = time.monotonic()
            self._asked_s = now if self._asked_s is None else self._asked_s
            if now - self._asked_s > _ANSWER_S:  # it is stopped: without it, the pipe ends
                self._template.kill()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired("engine", timeout or 0.0)
            select.select([self.reports], [], [], 0.1 if left is None else min(left, 0.1))
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask the process to end; one that is still to be forked, when it is."""
        self._signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the process and all that it has started; one that is still to be forked, when it is."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.pid is None:
            self._pending = number
        elif self.returncode is None or number == signal.SIGKILL:
            with suppress(OSError):
                os.killpg(self.pid, number)

    def _read(self) -> None:
        ended = False
        with suppress(BlockingIOError):
            while data := os.read(self.reports, 256):
                self._text += data
            ended = True
        lines = self._text.split(b"\n")[:-1]
        if lines and self.pid is None:
            self.pid = int(lines[0])
            if self._pending is not None:
                with suppress(OSError):
                    os.kill(self.pid, self._pending)
        if len(lines) > 1:
            self.returncode = int(lines[1])
        elif ended:  # the template is gone, and the engine ends with it
            self.returncode = _LOST

    def __del__(self) -> None:
        os.close(self.reports)


class EngineTemplate:
    """Starts the template at construction, again when one is needed and it has died, and ends it with `close`.

    config: of the engines that it will fork, which may differ in all but what is loaded: model, type, device, kernels.
    """

    def __init__(self, config: EngineConfig, module: str = TEMPLATE) -> None:
        self._config, self._module = config, module
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loaded = False
        self._start()

    @property
    def loaded(self) -> bool:
        """Whether the template has loaded the model: forks are immediate."""
        if not self._loaded and self._socket is not None:
            with suppress(OSError):
                self._loaded = self._socket.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._loaded

    def fork(self, endpoint: str, config: EngineConfig) -> ForkedEngine:
        """Have an engine forked that connects to `endpoint`. Never waits for it. Raises OSError."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        engine = ForkedEngine(self, reading)
        try:
            message = msgspec.json.encode((endpoint, config))
            try:
                self._send(message, writing)
            except OSError:
                self.kill()
                self._start()
                self._send(message, writing)
        finally:
            os.close(writing)
        return engine

    def kill(self) -> None:
        """Kill the template; engines that it has forked end with it. May be called repeatedly."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, message: bytes, pipe: int) -> None:
        if self._socket is None:
            raise BrokenPipeError("the template has been killed")
        socket.send_fds(self._socket, [message], [pipe], socket.MSG_DONTWAIT)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loaded = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**NUMERICS, **os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        self._socket = ours
        ours.send(msgspec.json.encode(self._config))


class TemplatePool:
    """The templates of a host's instances: one for all that load the same."""

    def __init__(self) -> None:
        self._templates: dict[tuple[object, ...], EngineTemplate] = {}

    def of(self, config: EngineConfig) -> EngineTemplate | None:
        """Return the template of an engine, started if need be; None where the settings ask for none."""
        if not config.standby:
            return None
        key = (config.model, config.dtype, config.device, config.attention_backend, config.max_model_len)
        if key not in self._templates:
            self._templates[key] = EngineTemplate(config)
        return self._templates[key]

    def close(self) -> None:
        """End all templates."""
        for template in self._templates.values():
            template.kill()
