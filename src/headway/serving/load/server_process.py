"""A server as a child process that is always ended with its context."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from headway.core.errors import HeadwayError
from headway.core.ports import free_port

SERVE: tuple[str, ...] = (sys.executable, "-P", "-m", "headway.cli.main", "serve")
KEPT_STDERR_CHARS = 4000
"""Bytes of the server's output that an error quotes."""


class ServerError(HeadwayError):
    """The server did not start; the message ends with the end of its output."""


class ServerProcess:
    """Context manager around `command … --port P` on loopback: ready on entry, ended on exit in every case.

    The child leads its own process group, so Ctrl-C does not reach it; on exit the whole group gets SIGTERM and,
    `grace_s` seconds later, SIGKILL. Its output goes to a temporary file, whose end is quoted in errors. environment:
    the child's, by default this process's.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = SERVE,
        ready_s: float = 180.0,
        grace_s: float = 10.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.command = [*command, *arguments, "--port", str(self._port)]
        self._ready_s, self._grace_s = ready_s, grace_s
        self._environment = environment
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 — lives as long as this object
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: OSError | None = None
        self.start_s: float | None = None

    def __enter__(self) -> Self:
        begun = time.monotonic()
        # In a thread: a signal's exception, which is raised in the main one, cannot hide a process that has started.
        starter = threading.Thread(target=self._start)
        starter.start()
        try:
            starter.join()
            while not _answers(f"{self.url}/ready", f"{self.url}/health"):
                self._check_alive()
                if time.monotonic() - begun > self._ready_s:
                    raise ServerError(f"the server was not ready after {self._ready_s:g} s; {self.last_words()}")
                time.sleep(0.05)
        # Ctrl-C while waiting included: __exit__ is not called when __enter__ raises.
        except BaseException:
            starter.join()
            self.stop()
            raise
        self.start_s = time.monotonic() - begun
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is not None and isinstance(value, Exception) and self._process and self._process.poll() is not None:
            # The client's error is often only a closed connection; the server's output has the cause.
            value.add_note(f"the server had ended with status {self._process.returncode}; {self.last_words()}")
        self.stop()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None
        return self._process.pid

    def _start(self) -> None:
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )
        except OSError as error:
            self._failed = error

    def _check_alive(self) -> None:
        if self._failed is not None:
            raise self._failed
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServerError(
                f"the server ended with status {self._process.returncode} before it was ready "
                f"({' '.join(self.command)}); {self.last_words()}"
            )

    def last_words(self) -> str:
        """Return the end of the server's output, as part of a sentence."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - KEPT_STDERR_CHARS))
        text = self._log.read().decode("utf-8", "replace").strip()
        return f"it wrote:\n{text}" if text else "it wrote nothing"

    def kill(self) -> None:
        """Kill the server and its child processes at once, as a crash would."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the server and its child processes. Idempotent."""
        process, self._process = self._process, None
        try:
            if process is not None:
                self._end(process)
        finally:
            self._log.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        for number, patience in (
            (signal.SIGTERM, self._grace_s),
            (signal.SIGKILL, 10.0),
        ):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
            try:
                process.wait(patience)
            except subprocess.TimeoutExpired:
                continue
            # The leader has ended, its children may not have: SIGKILL follows for the rest of the group.
        process.poll()


def _answers(*urls: str) -> bool:
    """Return whether the first URL that exists answers 200 (`/ready`, or `/health` on a server without it)."""
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except urllib.error.HTTPError as problem:
            # 404: this server lacks the path, try the next one. Any other status: not ready yet.
            if problem.code != 404:
                return False
        except OSError:
            return False
    return False
