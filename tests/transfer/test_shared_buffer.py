"""Memory that another process reads: offered, found and proved, or not, and then nobody waits."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headway.runtime.kv_transfer import send_queue as outlet
from headway.runtime.kv_transfer import shared_buffer as arena
from headway.runtime.kv_transfer.peer import PeerLostError
from headway.runtime.kv_transfer.ring_buffer import most
from headway.runtime.kv_transfer.shared_buffer import Memory, SharedBuffer, at_home, exchange, find

SIZE = 1 << 16
Both = tuple[tuple[SharedBuffer | None, Memory | None], tuple[SharedBuffer | None, Memory | None]]


def both(near: socket.socket, far: socket.socket, sizes: tuple[int, int] = (SIZE, SIZE)) -> Both:
    """What the two ends of a connection agree on."""
    found: list[tuple[SharedBuffer | None, Memory | None]] = []
    for end in (near, far):
        end.settimeout(5.0)
    other = threading.Thread(target=lambda: found.append(exchange(far, sizes[1])))
    other.start()
    mine = exchange(near, sizes[0])
    other.join()
    near.close()
    far.close()
    return mine, found[0]


@contextmanager
def tcp(source: str, target: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server((target, 0)) as listener:
        near = socket.create_connection((target, listener.getsockname()[1]), source_address=(source, 0))
        far, _ = listener.accept()
        yield near, far


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_each_end_reads_what_the_other_writes() -> None:
    (own, theirs), (others, mine) = both(*socket.socketpair())
    assert own is not None
    assert others is not None
    assert theirs is not None
    assert mine is not None
    own.memory[:3] = (1, 2, 3)
    others.memory[-3:] = (4, 5, 6)
    assert mine[:4].tolist() == [1, 2, 3, 0]
    assert theirs[-4:].tolist() == [0, 4, 5, 6]
    assert own.memory.nbytes == mine.nbytes == SIZE
    with pytest.raises(ValueError, match="read-only"):
        theirs[0] = 1


def test_an_end_without_shared_memory_uses_the_socket_both_ways() -> None:
    assert both(*socket.socketpair(), (SIZE, 0)) == ((None, None), (None, None))


def test_a_connection_from_an_address_to_itself_counts_as_local() -> None:
    with tcp("127.0.0.1", "127.0.0.1") as (near, far):
        assert at_home(near)
        (own, theirs), _ = both(near, far)
        assert own is not None
        assert theirs is not None
    with tcp("127.0.0.2", "127.0.0.1") as (near, far):
        assert not at_home(far)
        assert both(near, far) == ((None, None), (None, None))


def test_descriptors_are_closed_with_the_last_use() -> None:
    before = files()
    found = both(*socket.socketpair())
    assert files() > before
    del found
    assert files() == before
    assert both(*socket.socketpair(), (0, 0)) == ((None, None), (None, None))
    assert files() == before


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate", "readlink", "open"])
def test_where_the_system_refuses_bodies_go_through_the_socket(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    before = files()
    monkeypatch.setattr(arena.os, call, refuses)
    assert both(*socket.socketpair()) == ((None, None), (None, None))
    monkeypatch.undo()
    assert files() == before


def test_an_offer_from_another_process_than_the_peer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is at the other end of the socket than offers memory."""
    monkeypatch.setattr(arena.os, "getpid", lambda: 1)
    assert both(*socket.socketpair()) == ((None, None), (None, None))


def test_an_end_that_leaves_or_hangs_during_the_handshake_is_given_up() -> None:
    near, far = socket.socketpair()
    near.settimeout(0.1)
    with pytest.raises(TimeoutError):
        exchange(near, SIZE)
    far.close()
    with pytest.raises((PeerLostError, OSError)):
        exchange(near, SIZE)
    near.close()


def offered(file: int, size: int = SIZE, nonce: bytes = bytes(32), process: int = 0) -> Memory | None:
    return find(struct.pack("<IIQ32s", process or os.getpid(), file, size, nonce))


def memory(name: str = "headway-kv", seals: int = fcntl.F_SEAL_SHRINK, size: int = 4096 + SIZE) -> int:
    file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def test_only_offered_memory_is_mapped() -> None:
    good = memory()
    assert offered(good) is not None
    others = [memory("other"), memory(seals=0), memory(size=SIZE)]
    for file in others:
        assert offered(file) is None
    assert offered(good, nonce=b"\1" * 32) is None, "another process's file of that number"
    assert offered(good, size=SIZE - 1) is None
    assert offered(good, process=2**31 - 1) is None
    assert offered(2**31 - 1) is None
    assert find(bytes(48)) is None
    for file in (good, *others):
        os.close(file)
    assert offered(good) is None


def test_a_pipe_or_a_file_in_its_place_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "memfd:headway-kv")
    pipe = os.open(tmp_path / "memfd:headway-kv", os.O_RDONLY | os.O_NONBLOCK)
    assert offered(pipe) is None
    os.close(pipe)


def test_memory_stays_when_its_owner_is_killed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        child = os.fork()
        if not child:
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(tmp_path / "s"))
            own, _ = exchange(far, SIZE)
            assert own is not None
            own.memory[:] = 7
            far.sendall(b"!")
            threading.Event().wait()
        near, _ = listener.accept()
    _, theirs = exchange(near, SIZE)
    assert theirs is not None
    assert near.recv(1) == b"!"
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert np.all(theirs == 7)
    near.close()


def test_a_packet_is_placed_in_the_shared_buffer() -> None:
    assert most(arena.ARENA_BYTES) >= outlet.PACKET_BYTES
