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

from headway.core.errors import RequestError, UnavailableError

READY = b"+"
"""What a process that has loaded the tokenizer says to a new connection."""
QUESTION = struct.Struct("<?q")
"""Before a text: whether special tokens are added, and the most tokens; -1: no limit."""
ANSWER = struct.Struct("<cq")
"""Before an answer: its kind, and its bytes. An answer of fewer bytes is of a process that has ended."""
IDS, REFUSAL, FAILURE = b"i", b"r", b"f"
"""Kinds: token ids as int32, the text of a RequestError, and of any other exception."""
_CHILD = "headway.serving.tokenizer_child"
_ANSWER_S, _ANSWER_S_PER_CHARACTER = 60.0, 60e-6
"""Longest wait for a process that lives: some hundred times what a text takes on an idle core, for it has a tenth of a
busy one, and shares that with other texts."""
_END_S = 1.0
"""A process that ends has closed its connections this long before it can be reaped, at most."""
_PIECE_BYTES = 256 << 10
_BROKEN = (OSError, EOFError)

log = logging.getLogger("headway.server")


class TokenizerProcess:
    """The process of one tokenizer: started for the first text, and again where it has ended. Used by several threads.

    description: the tokenizer.json; memory: bytes that tokenising texts may take at one time.
    """

    def __init__(self, description: str, memory: int) -> None:
        # -P: the working directory is no place for modules.
        self._command = [sys.executable, "-P", "-m", _CHILD, str(memory)]
        self._description = description.encode()
        self._lock, self._alone = threading.Lock(), threading.Lock()
        # False: of all texts; True: of one that was in a process that failed.
        self._running: dict[bool, tuple[subprocess.Popen[bytes], socket.socket]] = {}
        self._loaded, self._usable, self._closed = False, True, False

    def encode(self, text: str, *, add_special_tokens: bool, most_tokens: int | None = None) -> array[int] | None:
        """Return what `ModelTokenizer.encode_long` returns; None where no process has ever been able to load it.

        Blocks without the interpreter's lock: not for an event loop's thread. Raises encode_long's RequestErrors, and
        UnavailableError where two processes end or do not answer, or after `close`.
        """
        if not self._usable:
            return None
        question = QUESTION.pack(add_special_tokens, -1 if most_tokens is None else most_tokens) + text.encode()
        limit_s = _ANSWER_S + _ANSWER_S_PER_CHARACTER * len(text)
        try:
            return self._ask(question, limit_s, alone=False)
        except _BROKEN as error:
            if not self._loaded and not self._closed:
                with self._lock:
                    if self._usable:
                        log.warning("no process starts for long texts: the server tokenises them itself (%r)", error)
                    self._usable = False
                return None
        # What ends a process that has no other text is this one's fault.
        with self._alone:
            try:
                return self._ask(question, limit_s, alone=True)
            except _BROKEN as error:
                raise UnavailableError(
                    "two processes that tokenise long texts have failed with this one: send it again, or as token ids"
                ) from error
            finally:
                with self._lock:
                    self._end(alone=True)

    def close(self) -> None:
        """End the processes; texts that they have are refused. Idempotent."""
        with self._lock:
            self._closed = True
            self._end(alone=False)
            self._end(alone=True)

    def _ask(self, question: bytes, limit_s: float, *, alone: bool) -> array[int]:
        """Have a process answer, each step within `limit_s`. Raises _BROKEN where it does not, and errors of texts."""
        process, channel = self._channel(alone)
        try:
            with channel:
                channel.settimeout(limit_s)
                self._loaded |= channel.recv(1) == READY
                channel.sendall(question)
                channel.shutdown(socket.SHUT_WR)
                return _ids(received(channel))
        except _BROKEN as error:
            self._lost(process, alone, silent=isinstance(error, TimeoutError))
            raise

    def _channel(self, alone: bool) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the process, started where there is none, and a connection to it for one text."""
        with self._lock:
            if self._closed:
                raise UnavailableError("the server is ending; send the request again later", 5.0)
            if alone not in self._running:
                self._running[alone] = self._start()
            process, control = self._running[alone]
            return process, _connected(control)

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        control, theirs = socket.socketpair()
        with theirs:
            try:
                first = _connected(control)
                threading.Thread(target=_give, args=(first, self._description), daemon=True).start()
                # A session of its own: Ctrl-C of a terminal is the server's, which finishes what it has.
                return subprocess.Popen(self._command, stdin=theirs.fileno(), start_new_session=True), control
            except OSError:
                control.close()
                raise

    def _lost(self, process: subprocess.Popen[bytes], alone: bool, *, silent: bool) -> None:
        """Reap a process that has ended, or end a silent one, unless another thread has; the next text starts another.

        One that lives has closed one text's connection only.
        """
        with suppress(subprocess.TimeoutExpired):
            process.wait(0 if silent else _END_S)
        with self._lock:
            found = self._running.get(alone)
            if found is not None and found[0] is process and (silent or process.returncode is not None):
                self._end(alone)
                fields = {"status": process.returncode}
                log.warning("the process that tokenises long texts has ended", extra={"fields": fields})

    def _end(self, alone: bool) -> None:
        if (found := self._running.pop(alone, None)) is not None:
            process, control = found
            control.close()
            process.kill()
            process.wait()


def _connected(control: socket.socket) -> socket.socket:
    """Return a connection to the process at `control`; it is found closed where that has ended."""
    ours, theirs = socket.socketpair()
    with theirs, suppress(ConnectionError):
        socket.send_fds(control, [b"+"], [theirs.fileno()])
    return ours


def _give(channel: socket.socket, data: bytes) -> None:
    with channel, suppress(ConnectionError):
        channel.sendall(data)


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
