"""The process that tokenises long texts: `python -P -m headway.serving.tokenizer_child MEMORY`.

Standard input is a socket, on which `tokenizer_process` sends connections: the first brings the tokenizer.json, each
other one text, and takes its ids. The process ends when the other end of that socket is closed, as it is when the
server has ended in any way.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import tokenizers

from headway.core.errors import RequestError
from headway.serving.tokenizer import ModelTokenizer
from headway.serving.tokenizer_process import ANSWER, FAILURE, IDS, QUESTION, READY, REFUSAL, received

_NICENESS = 10
"""It gets a tenth of a core that the engine or the event loop wants."""
_FIRST_TO_GO = 1000
"""Memory that runs out costs a text, not the server."""


def main() -> None:
    """Tokenise until the server has ended."""
    os.nice(_NICENESS)
    # Where sessions share cores as groups, niceness inside one says nothing to the others.
    _set("autogroup", _NICENESS)
    _set("oom_score_adj", _FIRST_TO_GO)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connections = _connections(socket.socket(fileno=sys.stdin.fileno()))
    with next(connections) as channel:
        backend = tokenizers.Tokenizer.from_str(received(channel).decode())
    tokenizer = ModelTokenizer(backend, memory=int(sys.argv[1]))
    for channel in connections:
        threading.Thread(target=_answer, args=(tokenizer, channel), daemon=True).start()
    os._exit(0)  # the answers of running threads would reach no connection


def _connections(control: socket.socket) -> Iterator[socket.socket]:
    while files := socket.recv_fds(control, 1, 1)[1]:
        yield socket.socket(fileno=files[0])


def _set(what: str, value: int) -> None:
    """Set what Linux keeps of this process, where it does."""
    with suppress(OSError):
        Path("/proc/self", what).write_text(str(value))


def _answer(tokenizer: ModelTokenizer, channel: socket.socket) -> None:
    """Read a text from its connection and write its ids."""
    with channel, suppress(ConnectionError):
        channel.sendall(READY)
        question = received(channel)
        try:
            special, most = QUESTION.unpack_from(question)
            text = str(memoryview(question)[QUESTION.size :], "utf-8")
            ids = tokenizer.encode_long(text, add_special_tokens=special, most_tokens=None if most < 0 else most)
            kind, content = IDS, memoryview(ids).cast("B")
        except RequestError as error:
            kind, content = REFUSAL, memoryview(str(error).encode())
        except BaseException as error:  # the library's panics are no Exception
            kind, content = FAILURE, memoryview(repr(error).encode())
        channel.sendall(ANSWER.pack(kind, len(content)))
        channel.sendall(content)


if __name__ == "__main__":
    main()
