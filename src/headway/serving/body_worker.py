"""Processes that decode, check and tokenise large request bodies, each with an interpreter's lock of its own.

Decoding JSON and making lists of token ids hold the lock from first byte to last, and what they take of memory does
not all come back: in the server every stream would feel both. A body comes here as a file in memory, which the server
has filled as it arrived; what returns is small, but for token ids. There is one process for bodies up to
`MEDIUM_BYTES` and one for larger ones, so that a long chat does not wait for a library of documents. Each is started
for its first body and works on one at a time.

A process that ends, or that says nothing for `SILENCE_S`, is replaced, and its body is given to the next one, once. A
process says that it lives while a body takes less CPU time than its size allows. It ends by itself when it holds much
more memory than at first, and when the server has ended in any way.

A `ProcessPoolExecutor` would not do: it has no bound on time, fails every body that waits when a process ends,
imports the server's main module again, finds modules in the working directory, and outlives a server that is killed.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from headway.core.errors import UnavailableError

T = TypeVar("T")

MEDIUM_BYTES = 1 << 20
SILENCE_S = 10
"""Longest silence of a process that lives: it says so twice a second, and needs a tenth of a busy core for that."""
_START_S = 60
"""Longest time until a process that starts says so, on a busy machine."""
_SAYS_S = 0.5
_CPU_S, _CPU_S_PER_BYTE = 20.0, 4e-6
"""CPU time that a body may take: some four times what tokenising it does."""
_DATA_BYTES = 3 << 30
"""Most memory of a process besides what tokenising may take: 64 MiB of text, four bytes a character, three times."""
_GROWN_BYTES = 128 << 20
"""A process that has grown by so much ends after its answer."""
_NICENESS = 10
"""It gets a tenth of a core that the engine or the event loop wants."""
_FIRST_TO_GO = 1000
"""Memory that runs out costs a body, not the server."""
_BROKEN = (OSError, EOFError, pickle.UnpicklingError)
_ENDING = "the server is ending; send the request again later"


class MemoryFile:
    """A file in memory, freed with its last reference."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("headway-body", os.MFD_CLOEXEC)

    def __del__(self) -> None:
        os.close(self.descriptor)


class BodyWorkers:
    """The processes of one server. tokenizer: pickled for them; memory: bytes that tokenising a text may take."""

    def __init__(self, tokenizer: object, memory: int) -> None:
        # Once, at the start: a large vocabulary takes the interpreter's lock for some 100 ms.
        setup = pickle.dumps((tokenizer, memory))
        self._workers = [BodyWorker(setup) for _ in range(2)]

    async def run(self, body: MemoryFile, size: int, work: Callable[..., T], *arguments: object) -> T:
        """Return `work(tokenizer, data, *arguments)` of another process. `work` is a function of a module.

        Raises what it raises; UnavailableError where two processes have failed with this body, and after `close`.
        """
        worker = self._workers[size > MEDIUM_BYTES]
        # A client that leaves does not stop the work on its body: the next one waits for the end of it.
        return await asyncio.get_running_loop().run_in_executor(worker.turn, worker.ask, body, work, arguments)

    def close(self) -> None:
        """End the processes; bodies that they have are refused. Idempotent."""
        for worker in self._workers:
            worker.close()


class BodyWorker:
    """One process."""

    def __init__(self, setup: bytes) -> None:
        self.turn = ThreadPoolExecutor(1, thread_name_prefix="headway-body")
        self.process: subprocess.Popen[bytes] | None = None
        # -P: the working directory is no place for modules.
        self.command = [sys.executable, "-P", "-m", __name__]
        self._setup = setup
        self._channel: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, body: MemoryFile, work: Callable[..., Any], arguments: tuple[object, ...]) -> Any:
        """Have a process work on a body; called by one thread."""
        for _ in range(2):
            try:
                raised, answer = self._answer(body, (work, arguments))
            except _BROKEN:
                self._end()
                if self._closed:
                    break
                continue
            if raised:
                raise answer
            return answer
        raise UnavailableError(
            _ENDING
            if self._closed
            else "two processes that read large bodies have failed with this one: send it again, or smaller ones"
        )

    def close(self) -> None:
        """End the process. Idempotent."""
        self._closed = True
        self._end()
        self.turn.shutdown(wait=False, cancel_futures=True)

    def _answer(self, body: MemoryFile, question: object) -> tuple[bool, Any]:
        """Return whether the work raised, and what it returned or raised. Raises _BROKEN."""
        channel = self._started()
        socket.send_fds(channel, [b"+"], [body.descriptor])
        link = Connection(os.dup(channel.fileno()))
        with link:
            link.send(question)
            while (answer := link.recv()) is None:
                # It has started.
                _set_timeout(channel, SILENCE_S)
        raised, value, ends = answer
        if ends:
            self._end()
        return raised, value

    def _started(self) -> socket.socket:
        with self._lock:
            if self._closed:
                raise EOFError
            if self._channel is None:
                self._channel, theirs = socket.socketpair()
                _set_timeout(self._channel, _START_S)
                with theirs:
                    # A session of its own: Ctrl-C of a terminal is the server's, which finishes what it has.
                    self.process = subprocess.Popen(self.command, stdin=theirs.fileno(), start_new_session=True)
                link = Connection(os.dup(self._channel.fileno()))
                with link:
                    link.send_bytes(self._setup)
            return self._channel

    def _end(self) -> None:
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if self.process is not None:
                self.process.kill()
                self.process.wait()


def _set_timeout(channel: socket.socket, seconds: int) -> None:
    """Bound how long sending and receiving may wait, also through other descriptors of the socket."""
    for direction in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        channel.setsockopt(socket.SOL_SOCKET, direction, struct.pack("@ll", seconds, 0))


class _Work:
    """What the process is doing, for the thread that says that it lives."""

    def __init__(self, link: Connection) -> None:
        self.link = link
        self.lock = threading.Lock()
        # Loading the tokenizer.
        self.until_cpu_s = _CPU_S
        threading.Thread(target=self._say, daemon=True).start()

    def _say(self) -> None:
        while True:
            time.sleep(_SAYS_S)
            with self.lock:
                if not self.until_cpu_s:
                    continue
                # A server that has ended, and a body that takes too long, end the process whatever it computes.
                try:
                    if time.process_time() < self.until_cpu_s:
                        self.link.send(None)
                        continue
                except OSError:
                    pass
                os._exit(1)


def main() -> None:
    """Work on bodies until the server has ended."""
    os.nice(_NICENESS)
    # Where sessions share cores as groups, niceness inside one says nothing to the others.
    _set("autogroup", _NICENESS)
    _set("oom_score_adj", _FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    work = _Work(link := Connection(os.dup(channel.fileno())))
    with suppress(*_BROKEN):
        tokenizer, memory = link.recv()
        resource.setrlimit(resource.RLIMIT_DATA, (_DATA_BYTES + memory, resource.RLIM_INFINITY))
        at_first = _resident()
        while files := socket.recv_fds(channel, 1, 1)[1]:
            raised, value = _worked(work, link.recv(), tokenizer, files[0])
            ends = _resident() > at_first + _GROWN_BYTES
            with work.lock:
                work.until_cpu_s = 0.0
                link.send((raised, value, ends))
    os._exit(0)


def _worked(work: _Work, question: tuple[Callable[..., Any], tuple[object, ...]], tokenizer: object, file: int) -> Any:
    """Return whether the work on a body raised, and what it returned or raised."""
    function, arguments = question
    with open(file, "rb") as body:
        size = os.fstat(file).st_size
        with work.lock:
            work.until_cpu_s = time.process_time() + _CPU_S + _CPU_S_PER_BYTE * size
        body.seek(0)
        try:
            return False, function(tokenizer, body.read(), *arguments)
        except MemoryError:
            return True, UnavailableError("reading the body takes more memory than this server allows for that")
        except Exception as error:
            return True, error
        except BaseException as error:  # the tokenizer library's panics are no Exception
            return True, RuntimeError(repr(error))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _set(what: str, value: int) -> None:
    """Set what Linux keeps of this process, where it does."""
    with suppress(OSError):
        Path("/proc/self", what).write_text(str(value))


if __name__ == "__main__":
    # Under its own name, so that what is pickled is found there.
    from headway.serving.body_worker import main

    main()
