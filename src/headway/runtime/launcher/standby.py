"""A process that has loaded a model and forks engines, seen from the server: the standby for an engine that is lost.

A fork shares the memory of weights, libraries and interpreter until it writes to it, so that the template costs little
beside the engine, and an engine starts without loading. It outlives the template, which is started again when it has
ended. `runtime.assembly.template_process` is the process.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

import msgspec
from typing_extensions import override

from headway.perf.device import available_bytes, gib
from headway.runtime.engine.config import NUMERICS, EngineConfig, GaveUpError, InstanceConfig, RestartLimit
from headway.runtime.launcher.processes import LocalProcess

log = logging.getLogger("headway.server")

TEMPLATE = "headway.runtime.assembly.template_process"
READY = b"ready"
"""Sent by the template when it has loaded."""
PROCESS_ID, EXIT_CODE = b"process", b"exit"
"""First words of the lines that an engine, or its template, writes to the engine's pipe."""
MESSAGE_BYTES = 1 << 17
"""Longest message to a template: an engine's settings."""
_ANSWER_S = 5.0
"""How long a template that has loaded may take to fork."""
_EARLY_RESTARTS = 3
"""How often within a minute of running a template is started again before an engine needs it."""
_LOST = -signal.SIGKILL


class ForkedEngine(LocalProcess):
    """An engine's process that a template has forked.

    Process id and exit status come on a pipe, since it is no child of this process. The engine writes both lines; the
    template writes the exit line too, for an engine killed by a signal.
    """

    def __init__(self, template: EngineTemplate, reports: int) -> None:
        # Also readable when the process is there.
        self.sentinel = self._reports = reports
        self._code: int | None = None
        self._template = template
        self._asked_s: float | None = None
        self._pending: signal.Signals | None = None
        """To be sent once the process is there."""
        self._text = b""
        self._at_end = False
        """Whether the pipe has ended: neither the engine nor its template holds it."""
        self._lock = Lock()
        os.set_blocking(reports, False)

    @override
    def poll(self) -> int | None:
        with self._lock:
            self._read()
        if self._code is None and self.pid is None and self._template.loaded:
            now = time.monotonic()
            self._asked_s = now if self._asked_s is None else self._asked_s
            if now - self._asked_s > _ANSWER_S:  # it is stopped: without it, the pipe ends
                self._template.kill()
        return self._code

    @override
    def join(self, timeout_s: float | None = None) -> None:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self.poll() is None and (left_s := until - time.monotonic()) > 0:
            select.select([self._reports], [], [], min(left_s, 0.1))

    @override
    def terminate(self) -> None:
        """Ask the process to end; one that is still to be forked, when it is, or never where the template loads."""
        self._signal(signal.SIGTERM)

    @override
    def kill(self) -> None:
        """Kill the process and all that it has started; one that is still to be forked as by `terminate`."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        self.poll()
        if self.pid is None and self._code is None and not self._template.loaded:
            self._give_up()
        elif self.pid is None:
            self._pending = number
        elif self._code is None or number == signal.SIGKILL:
            with suppress(OSError):
                os.killpg(self.pid, number)

    def _give_up(self) -> None:
        """Wait for no fork: once the template has loaded, it forks nothing for a pipe without a reader."""
        with self._lock:
            ended, writing = os.pipe()
            os.close(writing)
            # In place of the pipe, not closed: an event loop may watch this file descriptor.
            os.dup2(ended, self._reports, inheritable=False)
            os.close(ended)
            self._code = _LOST

    def _read(self) -> None:
        """Take in what there is on the pipe; at its end, which may come after the exit status, reap the process."""
        if self._at_end:
            return
        with suppress(BlockingIOError):
            while data := os.read(self._reports, 256):
                self._text += data
            self._at_end = True
        *lines, self._text = self._text.split(b"\n")
        for what, number in (line.split() for line in lines):
            if what == EXIT_CODE:
                self._code = int(number)
            elif self.pid is None:
                self.pid = int(number)
                if self._pending is not None:
                    with suppress(OSError):
                        os.kill(self.pid, self._pending)
        if self._at_end:
            status = self._adopted_status()
            if self._code is None:  # the template is gone, or both are
                self._code = status

    def _adopted_status(self) -> int:
        """Return the exit status of a process whose template is gone: known where this process has become its parent,
        as a container's first one does, and reaps it."""
        if self.pid is not None:
            with suppress(ChildProcessError):
                return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return _LOST

    def __del__(self) -> None:
        os.close(self._reports)


class _TemplateProcess:
    """A process that imports libraries, and waits for its settings at the other end of `socket`."""

    def __init__(self, module: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env={**NUMERICS, **os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.socket.close()


_early: list[_TemplateProcess] = []
"""At most one process that was started before settings were known."""


def start_early() -> None:
    """Start a process for the first `EngineTemplate` to come, whose libraries load meanwhile."""
    # Without them the command itself says what to install.
    if all(map(find_spec, ("torch", "zmq", "numpy"))):
        _early.append(_TemplateProcess(TEMPLATE))


def discard_early() -> None:
    """End the process of `start_early` unless it has been put to use."""
    while _early:
        _early.pop().kill()


class EngineTemplate:
    """Starts the template at construction, again when it has ended, and ends it with `kill`.

    config: of the engines that it will fork, which may differ in all but what is loaded: model, type, device, kernels.
    """

    def __init__(self, config: EngineConfig, module: str = TEMPLATE) -> None:
        self._config, self._module = config, module
        self._process: _TemplateProcess | None = None
        self._loaded = False
        self._restarts = RestartLimit(_EARLY_RESTARTS, "it was")
        self._start()

    @property
    def loaded(self) -> bool:
        """Whether the template has loaded the model: forks are immediate."""
        if not self._loaded and self._process is not None:
            with suppress(OSError):
                self._loaded = self._process.socket.recv(len(READY), socket.MSG_DONTWAIT) == READY
            if self._loaded:
                self._restarts.record_up(time.monotonic())
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

    def keep(self) -> None:
        """Start the template again where it has ended after it had loaded. Called every tenth of a second.

        Not before an engine is needed where it has ended too often, or where memory might not hold the weights twice:
        its engines go on with those of the one that has ended.
        """
        # Asked first, since that reaps one that ended while it loaded.
        if self._process is None or not self._process.ended or not self.loaded:
            return
        self.kill()
        try:
            self._restarts.spend(time.monotonic(), "the standby process has ended")
        except GaveUpError as error:
            log.warning("%s; the next starts when an engine is needed", error)
            return
        weights = sum(path.stat().st_size for path in Path(self._config.model).glob("*.safetensors"))
        if available_bytes() <= weights:
            log.warning("the standby process has ended; another needs %s, when an engine is needed", gib(weights))
            return
        log.warning("the standby process has ended; starting it again")
        with suppress(OSError):  # tried again when an engine is needed
            self._start()

    def kill(self) -> None:
        """Kill the template; engines that it has forked go on. May be called repeatedly."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _send(self, message: bytes, pipe: int) -> None:
        if self._process is None:
            raise BrokenPipeError("the template has been killed")
        socket.send_fds(self._process.socket, [message], [pipe], socket.MSG_DONTWAIT)

    def _start(self) -> None:
        self._loaded = False
        early = _early.pop() if _early and self._module == TEMPLATE else None
        try:
            self._process = early or _TemplateProcess(self._module)
            self._process.socket.send(msgspec.json.encode(self._config))
        except OSError:
            self.kill()
            if early is None:
                raise
            self._start()  # it has died meanwhile


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
            # Of any instance: what instances need is loaded, and no bars are drawn.
            config = msgspec.structs.replace(config, instance=InstanceConfig(number=0, listen=""))
            self._templates[key] = EngineTemplate(config)
        return self._templates[key]

    def close(self) -> None:
        """End all templates."""
        for template in self._templates.values():
            template.kill()
