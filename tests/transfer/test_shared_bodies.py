"""Bodies in shared memory: that they are there, that what it holds is bounded, and every way in which it ends."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from tests.helpers.child_processes import python_path
from tests.helpers.kv_ends import LAYERS, SLOTS, End, meet
from tests.helpers.polling import let_arrive, until

from headway.runtime.kv_transfer import connection
from headway.runtime.kv_transfer.buffered_reader import BufferedReader
from headway.runtime.kv_transfer.connection import PeerConnection
from headway.runtime.kv_transfer.connector import SaveKv
from headway.runtime.kv_transfer.frames import FrameHead, FrameKind, head
from headway.runtime.kv_transfer.peers import PeerAddress, PeerLostError, PeerNetwork, ReceivePlace, SendRoom

ARENA = 1 << 16
WIDE = 1 << 12
Make = Callable[..., list[End]]

HANGS = """
import sys, threading
from pathlib import Path
from tests.helpers.kv_ends import End
from headway.runtime.kv_transfer.peers import PeerAddress
number, folder = int(sys.argv[1]), Path(sys.argv[2])
end = End(number, folder)
end.peers.handle(lambda *_: print("got", flush=True) or threading.Event().wait())
end.peers.meet([PeerAddress(n, 0, f"unix:{folder}/{n}") for n in (0, 1)])
print("up", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    made: list[End] = []
    monkeypatch.setattr("headway.runtime.kv_transfer.send_queue.PACKET_BYTES", 1 << 20)

    def make(count: int, arena_bytes: int = ARENA) -> list[End]:
        for number in range(count):
            end = End(number, tmp_path, arena_bytes=arena_bytes)
            end.cache = np.random.default_rng(number).integers(0, 255, (LAYERS, 2, 2, SLOTS, WIDE), dtype=np.uint8)
            made.append(end)
        meet(*made)
        return made

    yield make
    for end in made:
        end.close()


def up(end: End, to: int) -> PeerConnection:
    found = end.peers._connections[to]
    end.until(lambda: found.up)
    return found


def say(by: PeerConnection, frame: bytes) -> None:
    """A frame's head, whatever it says."""
    by._leave(connection._OutgoingFrame("r", [memoryview(frame)], connection.TransferCompletion(), None))


def test_bodies_are_in_shared_memory_and_only_notes_in_the_socket(make: Make) -> None:
    sender, receiver = make(2, 1 << 22)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    positions = np.arange(SLOTS)
    there = up(receiver, 0)
    read, inline = there._incoming._body, list[int]()

    def body(ahead: BufferedReader, frame: FrameHead) -> bool:
        inline.append(frame.length)
        return read(ahead, frame)

    there._incoming._body = body  # type: ignore[method-assign]
    sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache)
    assert there._incoming._reader.messages > LAYERS
    assert inline == [0]  # the end of the piece


def test_a_buffer_of_a_few_bodies_moves_any_number(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.runtime.kv_transfer.send_queue.PACKET_BYTES", WIDE * 4)
    sender, receiver, other = make(3)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    receiver.open("b", SLOTS // 2, ((0, SLOTS // 2),))
    positions = np.arange(SLOTS)
    sender.save(SaveKv("a", 1, 1), sender.part(positions, positions[::-1].copy()))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache[:, :, :, ::-1])
    other.save(SaveKv("b", 2, 1), other.part(positions[: SLOTS // 2], positions[::2].copy()))
    receiver.until(lambda: len(receiver.received) == 2)
    assert np.array_equal(receiver.cache[:, :, :, : SLOTS // 2], other.cache[:, :, :, ::2])


def test_a_slow_receiver_costs_one_buffer_and_changing_kv_is_copied(make: Make) -> None:
    sender, receiver = make(2, 1 << 22)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    sent, before, positions = up(sender, 1), sender.cache.copy(), np.arange(SLOTS)
    with receiver.connector._inbox._gate:  # type: ignore[attr-defined]
        sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
        sender.until(lambda: sent._ring.bytes >= 3 << 20)
        let_arrive(0.05)
        assert sent._ring.bytes <= 1 << 22
        outlet = sender.connector._outlets[1]  # type: ignore[attr-defined]
        assert outlet._bytes == 0
        assert outlet._queue
        sender.connector.wait_for_save("a")
        sender.cache[:] = 0
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, before)


def test_a_request_forgotten_while_waiting_leaves_its_room_to_the_rest(make: Make) -> None:
    sender, receiver = make(2, 1 << 22)
    for name in "ab":
        receiver.open(name, SLOTS, ((0, SLOTS),))
    sent, positions = up(sender, 1), np.arange(SLOTS)
    with receiver.connector._inbox._gate:  # type: ignore[attr-defined]
        sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
        sender.until(lambda: sent._ring.bytes >= 3 << 20)
        sender.connector.forget("a")
        sender.peers.forget("a")
        sender.save(SaveKv("b", 2, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    assert [got.request for got in receiver.received] == ["b"]
    assert np.array_equal(receiver.cache, sender.cache)
    assert sender.lost == receiver.lost == []


def test_forget_waits_for_the_copy_under_way_and_nothing_is_written_after(make: Make) -> None:
    sender, receiver = make(2)
    begun, go_on = threading.Event(), threading.Event()
    wrote: list[str] = []

    def write(body: object) -> None:
        begun.set()
        go_on.wait()
        wrote.append("all")

    receiver.peers.handle(lambda *_: ReceivePlace((), lambda: wrote.append("complete"), write))
    here = up(sender, 1)
    for _ in range(2):
        room = here.room(connection.SMALL, lambda: None)
        assert room is not None
        assert room.taken is not None
        here.push("r", b"", room)
    assert begun.wait(5.0)
    forgets = threading.Thread(target=receiver.peers.forget, args=("r",))
    forgets.start()
    forgets.join(0.05)
    assert forgets.is_alive()
    go_on.set()
    forgets.join(5.0)
    assert not forgets.is_alive()
    sender.peers.push(1, "s", b"", [b"x"])
    receiver.until(lambda: receiver.peers._connections[0]._incoming._reader.messages == 2)
    assert wrote.count("all") <= 2  # "r" and "s"
    assert wrote[0] == "all"


@pytest.mark.parametrize("arena_bytes", [0, ARENA])
def test_a_place_suspended_before_its_body_is_read_is_requested_again(make: Make, arena_bytes: int) -> None:
    """A handler has just said where a body goes, when that is given to others."""
    sender, receiver = make(2, arena_bytes)
    wrote: list[str] = []
    asked: list[str] = []

    def handle(source: int, scope: str, note: bytes, length: int) -> ReceivePlace | None:
        asked.append(scope)
        if scope == "s":
            return ReceivePlace((), lambda: wrote.append("s"), lambda body: None)
        if asked.count("r") > 1:
            return None
        receiver.peers.cease("r")
        return ReceivePlace((), lambda: wrote.append("complete"), lambda body: wrote.append("all"))

    receiver.peers.handle(handle)
    up(sender, 1)
    sender.peers.push(1, "r", b"", [bytes(connection.SMALL)])
    sender.peers.push(1, "s", b"", [b"x"])
    receiver.until(lambda: "s" in wrote)
    assert asked == ["r", "r", "s"]
    assert wrote == ["s"]


def test_a_suspended_scope_does_not_complete_and_may_return(make: Make) -> None:
    """The place of a body that is being written may be given to others: it is not, before that has ended."""
    sender, receiver = make(2)
    begun, go_on = threading.Event(), threading.Event()
    wrote: list[str] = []

    def write(body: object) -> None:
        begun.set()
        go_on.wait()
        wrote.append("all")

    receiver.peers.handle(lambda *_: ReceivePlace((), lambda: wrote.append("complete"), write))
    here = up(sender, 1)
    for turn in ("first", "again"):
        room = here.room(connection.SMALL, lambda: None)
        assert room is not None
        here.push("r", b"", room)
        if turn == "again":
            break
        assert begun.wait(5.0)
        receiver.peers.cease("other")  # which is not what is written
        ceases = threading.Thread(target=receiver.peers.cease, args=("r",))
        ceases.start()
        ceases.join(0.05)
        assert ceases.is_alive()
        go_on.set()
        ceases.join(5.0)
        assert not ceases.is_alive()
        receiver.until(lambda: receiver.peers._connections[0]._incoming._reader.messages == 1)
        assert wrote == ["all"]
    receiver.until(lambda: wrote == ["all", "all", "complete"])


@pytest.mark.parametrize(("at", "length"), [(ARENA, 64), (ARENA - 64, 128), (-2, 64), (2**62, 64), (0, ARENA)])
def test_places_outside_the_shared_buffer_end_the_connection(make: Make, at: int, length: int) -> None:
    sender, receiver = make(2)
    there, wrote = up(receiver, 0), []
    receiver.peers.handle(lambda *_: ReceivePlace((), lambda: None, wrote.append))
    here = up(sender, 1)
    say(here, head(FrameKind.PUSH, 0, "r", b"", length, at))
    receiver.until(lambda: there.ended is not None)
    assert f"{length} bytes at {at} are in no arena" in str(there.ended)
    assert wrote == []


@pytest.mark.parametrize("messages", [1, -1, 2**40])
def test_a_count_of_what_was_never_sent_ends_the_connection(make: Make, messages: int) -> None:
    sender, receiver = make(2)
    there, here = up(receiver, 0), up(sender, 1)
    say(there, head(FrameKind.READ, 0, "", b"", 0, messages))
    sender.until(lambda: here.ended is not None)
    assert f"{messages} messages read, of 0" in str(here.ended)


def test_a_message_in_a_missing_shared_buffer_ends_the_connection(make: Make) -> None:
    sender, receiver = make(2, 0)
    there, here = up(receiver, 0), up(sender, 1)
    say(here, head(FrameKind.PUSH, 0, "r", b"", 64, 0))
    receiver.until(lambda: there.ended is not None)
    assert "are in no arena" in str(there.ended)


def test_a_reconnection_gets_another_shared_buffer(make: Make) -> None:
    sender, receiver = make(2)
    here, positions = up(sender, 1), np.arange(SLOTS)
    room = here.room(connection.SMALL, lambda: None)
    assert room is not None
    cut = here._socket
    assert cut is not None
    cut.shutdown(socket.SHUT_RDWR)
    sender.until(lambda: here.ended is not None)
    with pytest.raises(PeerLostError):
        here.push("r", b"", room).wait()
    asked = here.room(connection.SMALL, lambda: None)
    assert asked is not None
    assert asked.taken is None
    sender.until(lambda: sender.peers._connections.get(1) not in (None, here))
    receiver.open("a", SLOTS, ((0, SLOTS),))
    again = up(sender, 1)
    up(receiver, 0)
    sender.save(SaveKv("a", 1, 1), sender.part(positions, positions))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache)
    assert again._arena is not None
    assert again._arena is not here._arena


def test_one_end_without_a_shared_buffer_still_reads_the_others(tmp_path: Path) -> None:
    """Each direction has its own: here the mapping fails on one side only."""
    ends = [End(number, tmp_path, arena_bytes=size) for number, size in enumerate((ARENA, 128))]
    try:
        meet(*ends)
        assert up(ends[0], 1)._arena is not None
        assert up(ends[1], 0)._arena is None
    finally:
        for end in ends:
            end.close()


class Child:
    """Another process with an end, which hangs in what comes. Killed with the test."""

    def __init__(self, number: int, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HANGS, str(number), str(folder)],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.says("up")

    def says(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


T = TypeVar("T")


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:headway-kv")


def collected(count: Callable[[], T]) -> T:
    """What is counted once garbage is gone."""
    gc.collect()
    return count()


def test_a_receiver_killed_with_a_full_buffer_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def state() -> tuple[int, int]:
        return mapped(), len(os.listdir("/proc/self/fd"))

    until(lambda: collected(mapped) == 0, 5.0, "tests before this one keep their maps")
    before = state()
    end, child = End(0, tmp_path), Child(1, tmp_path)
    end.cache = np.ones((LAYERS, 2, 2, SLOTS, 1 << 16), dtype=np.uint8)
    positions = np.arange(SLOTS)
    try:
        end.peers.meet([PeerAddress(n, 0, f"unix:{tmp_path}/{n}") for n in (0, 1)])
        up(end, 1)
        assert mapped() == 2
        end.save(SaveKv("a", 1, 1), end.part(positions, positions))
        child.says("got")
        end.until(lambda: end.peers._connections[1]._ring.bytes > 6 << 20)
        end.connector.wait_for_save("a")
        child.end()
        end.until(lambda: bool(end.lost))
        assert [lost.request for lost in end.lost] == ["a"]
        assert "instance 1" in end.lost[0].why
        end.until(lambda: not end.connector._outlets[1]._queue)  # type: ignore[attr-defined]
    finally:
        child.end()
        end.close()
    until(lambda: collected(state) == before, 5.0, "something is kept")


def test_send_rooms_of_a_socket_are_memory_of_their_own(tmp_path: Path) -> None:
    peers = [PeerNetwork(number, 0, f"unix:{tmp_path}/{number}", arena_bytes=0) for number in (0, 1)]
    got = bytearray(10)
    done = threading.Event()
    peers[1].handle(lambda *_: ReceivePlace([memoryview(got)], done.set))
    for each in peers:
        each.meet([PeerAddress(one.number, 0, one.address) for one in peers])
    line = peers[0].line("r", (1,))
    asked = threading.Event()
    room: SendRoom | None = None
    while (room := line.room(1, 10, asked.set)) is None:
        assert asked.wait(5.0)
        asked.clear()
    assert room.taken is None
    room.view[:] = range(10)
    line.push_from(1, b"", room)
    assert done.wait(5.0)
    assert got == bytes(range(10))
    for each in peers:
        each.close()
