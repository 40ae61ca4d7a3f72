"""Bodies in shared memory: what is found there, how much of it is used, and that nothing is read or kept wrongly."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.polling import let_arrive, until
from tests.helpers.present import present
from tests.transfer.kv_ends import LAYERS, SLOTS, End, meet

from headway.runtime.engine.protocol import PeerAddress
from headway.runtime.kv_transfer import local, slab_memory
from headway.runtime.kv_transfer.connector import KvBody, SaveKv, decode, encode
from headway.runtime.kv_transfer.slab_memory import SLAB_BYTES, SLABS, SharedMemory, SlabReader

WIDE = 1 << 16
POSITIONS = np.arange(SLOTS)

HANGS = """
import sys, threading
from pathlib import Path
from tests.transfer.kv_ends import End
from headway.runtime.kv_transfer import local as receive_queue
from headway.runtime.engine.protocol import PeerAddress
end = End(1, Path(sys.argv[1]))
receive_queue.SourceReader._keep = lambda *_: print("got", flush=True) or threading.Event().wait()
end.peers.meet([PeerAddress(n, 0, f"unix:{sys.argv[1]}/{n}") for n in (0, 1)])
print("up", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[End, End]]:
    both = End(0, tmp_path), End(1, tmp_path)
    for end in both:
        end.cache = np.random.default_rng(end.number).integers(0, 255, (LAYERS, 2, 2, SLOTS, WIDE), dtype=np.uint8)
    meet(*both)
    yield both
    for end in both:
        end.close()


def outlet(end: End) -> Any:
    return end.connector._outlets[1 - end.number]


def fill(sender: End, request: str) -> None:
    """Send until all slabs are taken."""
    sender.save(SaveKv(request, 1, 1), sender.part(POSITIONS, POSITIONS))
    sender.until(lambda: outlet(sender)._memory.kind == "shared" and not outlet(sender)._free)


def test_bodies_are_in_shared_memory_and_only_notes_in_the_socket(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    sizes: list[int] = []
    handle = present(receiver.peers._handler)

    def counted(source: int, scope: str, note: bytes, body: memoryview) -> None:
        sizes.append(body.nbytes)
        handle(source, scope, note, body)

    receiver.peers.handle(counted)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    sender.save(SaveKv("a", 1, 1), sender.part(POSITIONS, POSITIONS))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache)
    assert len(sizes) > SLABS
    assert set(sizes) == {0}


def test_a_slow_receiver_costs_its_slabs_and_changing_kv_is_copied(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    receiver.open("a", SLOTS, ((0, SLOTS),))
    before = sender.cache.copy()
    with receiver.connector._inbox._gate:
        fill(sender, "a")
        let_arrive(0.05)
        assert outlet(sender)._queue
        assert outlet(sender)._memory.slabs.nbytes == SLABS * SLAB_BYTES
        sender.connector.wait_for_save("a")
        sender.cache[:] = 0
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, before)


def test_a_request_forgotten_while_waiting_leaves_its_room_to_the_rest(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    for name in "ab":
        receiver.open(name, SLOTS, ((0, SLOTS),))
    with receiver.connector._inbox._gate:
        fill(sender, "a")
        sender.connector.forget("a")
        sender.peers.forget("a")
        sender.save(SaveKv("b", 2, 1), sender.part(POSITIONS, POSITIONS))
    receiver.until(lambda: bool(receiver.received))
    assert [got.id for got in receiver.received] == ["b"]
    assert np.array_equal(receiver.cache, sender.cache)
    assert sender.lost == receiver.lost == []


def test_forget_waits_for_the_body_that_is_written_and_nothing_is_after_it(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    begun, go_on = threading.Event(), threading.Event()
    write = local._RequestPlace.write

    def held(self: Any, note: KvBody, body: Any) -> int:
        begun.set()
        go_on.wait()
        return write(self, note, body)

    monkeypatch.setattr(local._RequestPlace, "write", held)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    sender.save(SaveKv("a", 1, 1), sender.part(POSITIONS, POSITIONS))
    assert begun.wait(5.0)
    forgets = threading.Thread(target=receiver.connector.forget, args=("a",))
    forgets.start()
    forgets.join(0.05)
    assert forgets.is_alive()
    go_on.set()
    forgets.join(5.0)
    assert not forgets.is_alive()
    kept = receiver.cache.copy()
    receiver.open("b", 1, ((0, 1),))
    sender.save(SaveKv("b", 2, 1), sender.part(POSITIONS[:1], POSITIONS[:1]))
    receiver.until(lambda: bool(receiver.received))  # behind all of "a"
    assert np.array_equal(receiver.cache[:, :, :, 1:], kept[:, :, :, 1:])


def test_memory_of_another_number_is_not_read(ends: tuple[End, End]) -> None:
    """As one of an earlier connection would be, whose memory has another number."""
    sender, receiver = ends
    push = sender.peers.line("", (1,)).__class__.push

    def stale(self: Any, to: int, note: bytes, body: Any = b"", scope: str | None = None) -> Any:
        said = decode(note)
        if isinstance(said, KvBody) and scope == "a" and not said.layer:
            note = encode(replace(said, memory=said.memory ^ 1))
        return push(self, to, note, body, scope)

    receiver.open("a", SLOTS, ((0, SLOTS),))
    before = receiver.cache.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.runtime.kv_transfer.peers.PeerStream.push", stale)
        sender.connector.save_kv_layer(SaveKv("a", 1, 1), 0, sender.part(POSITIONS, POSITIONS))
        receiver.until(lambda: len(receiver.lost) == SLABS)
    assert all("the memory is not known" in lost.why for lost in receiver.lost)
    assert np.array_equal(receiver.cache, before)
    assert receiver.connector.get_num_new_matched_tokens("a") == 0


def test_another_connection_has_other_memory(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    receiver.open("a", SLOTS, ((0, SLOTS),))
    with receiver.connector._inbox._gate:
        fill(sender, "a")
        first = outlet(sender)._memory.number
        receiver.peers._connections[0].end("it was cut")
        sender.until(lambda: bool(sender.lost))
    assert [lost.id for lost in sender.lost] == ["a"]
    for end in ends:
        end.connector.forget("a")
    receiver.open("b", SLOTS, ((0, SLOTS),))
    sender.save(SaveKv("b", 2, 1), sender.part(POSITIONS, POSITIONS))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache)
    assert outlet(sender)._memory.number != first


@pytest.mark.parametrize("call", ["os.memfd_create", "mmap.mmap"])
def test_where_the_system_refuses_bodies_travel_with_their_notes(
    ends: tuple[End, End], call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> int:
        raise OSError("none left")

    sender, receiver = ends
    monkeypatch.setattr(f"headway.runtime.kv_transfer.slab_memory.{call}", refuses)
    receiver.open("a", SLOTS, ((0, SLOTS),))
    sender.save(SaveKv("a", 1, 1), sender.part(POSITIONS, POSITIONS))
    receiver.until(lambda: bool(receiver.received))
    assert np.array_equal(receiver.cache, sender.cache)
    assert outlet(sender)._memory.kind == ""


def offered(file: int, size: int, nonce: bytes = bytes(32)) -> SlabReader | None:
    try:
        return SharedMemory().attach(slab_memory._ABOUT.pack(os.getpid(), file, size, nonce))
    finally:
        os.close(file)


def memory(size: int, name: str = "headway-kv", seals: int = fcntl.F_SEAL_SHRINK) -> int:
    file = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(file, size)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def test_only_offered_memory_is_mapped(tmp_path: Path) -> None:
    size = 4096 + SLABS * 4096
    assert offered(memory(size), size) is not None
    assert offered(memory(size), size + 4096) is None
    assert offered(memory(size), size, b"another" + bytes(25)) is None
    assert offered(memory(size, name="else"), size) is None
    assert offered(memory(size, seals=0), size) is None
    near, far = os.pipe()
    os.close(far)
    assert offered(near, size) is None
    assert SharedMemory().attach(b"short") is None
    reader = present(offered(memory(size), size))
    assert not reader.read(SLABS - 1, 4096, lambda: None).any()
    for slab, length in ((SLABS, 1), (-1, 1), (0, 4097)):
        with pytest.raises(OSError, match="in no shared memory"):
            reader.read(slab, length, lambda: None)


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:headway-kv")


def test_a_receiver_killed_with_full_slabs_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    until(lambda: mapped() == 0, 5.0, "tests before this one keep their maps")
    files = len(os.listdir("/proc/self/fd"))
    end = End(0, tmp_path)
    child = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    end.cache = np.ones((LAYERS, 2, 2, SLOTS, WIDE), dtype=np.uint8)
    try:
        assert child.stdout.readline() == "up\n"
        end.peers.meet([PeerAddress(n, 0, f"unix:{tmp_path}/{n}") for n in (0, 1)])
        fill(end, "a")
        assert child.stdout.readline() == "got\n"
        assert mapped() == 1
        end.connector.wait_for_save("a")
        child.send_signal(signal.SIGKILL)
        end.until(lambda: bool(end.lost))
        assert [lost.id for lost in end.lost] == ["a"]
        assert "instance 1" in end.lost[0].why
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        end.close()
    until(lambda: mapped() == 0, 5.0, "a map is kept")
    until(lambda: len(os.listdir("/proc/self/fd")) <= files + 5, 5.0, "files are kept")
