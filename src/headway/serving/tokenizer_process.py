"""Tokenisation of long texts in a process with an interpreter's lock of its own, seen from the server.

The tokenizer's library holds the lock while it makes a list of a text's ids, and text is cut by expressions that hold
it: a megabyte of one letter would keep the event loop from every stream for 170 ms. `tokenizer_child` is the process.
"""

from __future__ import annotations

import logging
import socket
import struct
import subprocess
import sys
import threading
from array import array
from contextlib import suppress
from pathlib import Path

from headway.core.errors import RequestError, UnavailableError

QUESTION = struct.Struct("<?q")
"""Before a text: whether special tokens are added, and the most tokens; -1: no limit."""
ANSWER = struct.Struct("<cq")
"""Before an answer: its kind, and its bytes. An answer of fewer bytes is of a process that has ended."""
IDS, REFUSAL, FAILURE = b"i", b"r", b"f"
"""Kinds: token ids as int32, the text of a RequestError, and of any other exception."""
_CHILD = "headway.serving.tokenizer_child"
_ATTEMPTS = 2
_PIECE_BYTES = 256 << 10

log = logging.getLogger("headway.server")


class TokenizerProcess:
    """The process of one tokenizer: started for the first text, and again where it has ended. Used by several threads.

    folder: the checkpoint's; memory: bytes that tokenising texts may take at one time.
    """

    def __init__(self, folder: Path, memory: int) -> None:
        self._command = [sys.executable, "-m", _CHILD, str(folder), str(memory)]
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._closed = False

    def encode(self, text: str, *, add_special_tokens: bool, most_tokens: int | None = None) -> array[int]:
        """Return what `ModelTokenizer.encode_long` returns. Blocks without the interpreter's lock.

        Raises its RequestErrors, and UnavailableError where the process ends twice, cannot be started, or is closed.
        """
        question = QUESTION.pack(add_special_tokens, -1 if most_tokens is None else most_tokens) + text.encode()
        for _ in range(_ATTEMPTS):
            process, channel = self._channel()
            try:
                with channel:
                    channel.sendall(question)
                    channel.shutdown(socket.SHUT_WR)
                    return _ids(received(channel))
            except (ConnectionError, EOFError):
                self._lost(process)
        raise UnavailableError(
            f"the process that tokenises long texts has ended {_ATTEMPTS} times with this one: send it again, or as "
            "token ids"
        )

    def close(self) -> None:
        """End the process; texts that it has are refused. Idempotent."""
        with self._lock:
            self._closed = True
            self._end()

    def _channel(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the process, started where there is none, and a connection to it for one text."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the server is ending; send the request again later", 5.0)
            try:
                if self._running is None:
                    self._running = self._start()
                process, control = self._running
                ours, theirs = socket.socketpair()
            except OSError as error:
                raise UnavailableError(f"a long text cannot be tokenised now: {error.strerror}; try again") from error
            with theirs, suppress(ConnectionError):  # of a process that has ended, which the caller notices
                socket.send_fds(control, [b"+"], [theirs.fileno()])
            return process, ours

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        control, theirs = socket.socketpair()
        with theirs:
            try:
                # A session of its own: Ctrl-C of a terminal is the server's, which finishes what it has.
                return subprocess.Popen(self._command, stdin=theirs.fileno(), start_new_session=True), control
            except OSError:
                control.close()
                raise

    def _lost(self, process: subprocess.Popen[bytes]) -> None:
        """Reap a process that has closed a channel, unless another thread has; the next text starts another."""
        with self._lock:
            if self._running is not None and self._running[0] is process:
                self._end()
                fields = {"status": process.returncode}
                log.warning("the process that tokenises long texts has ended", extra={"fields": fields})

    def _end(self) -> None:
        if self._running is not None:
            (process, control), self._running = self._running, None
            control.close()
            process.kill()
            process.wait()


def received(channel: socket.socket) -> bytearray:
    """Read up to the end of what the other side sends."""
    data = bytearray()
    while piece := channel.recv(_PIECE_BYTES):
        data += piece
    return data


def _ids(answer: bytearray) -> array[int]:
    """Return the ids of an answer. Raises RequestError, RuntimeError, and EOFError for an answer that broke off."""
    if len(answer) < ANSWER.size:
        raise EOFError
    kind, size = ANSWER.unpack_from(answer)
    with memoryview(answer)[ANSWER.size :] as content:
        if len(content) < size:
            raise EOFError
        if kind == IDS:
            ids = array("i")
            ids.frombytes(content)
            return ids
        words = str(content, "utf-8")
    if kind == REFUSAL:
        raise RequestError(words, "prompt")
    raise RuntimeError(f"a long text could not be tokenised: {words}")
