"""Sockets between instances: order, waiting, pushes, and every way in which a wait ends."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.helpers.polling import until

from headway.core.errors import ConfigError
from headway.runtime.kv_transfer.peers import PeerAddress, PeerLostError, PeerNetwork, ReceivePlace

Make = Callable[..., PeerNetwork]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[PeerNetwork] = []

    def one(number: int, incarnation: int = 0, tcp: bool = False, secret: bytes = b"") -> PeerNetwork:
        address = "tcp:127.0.0.1:0" if tcp else f"unix:{tmp_path}/{number}.{incarnation}"
        made.append(PeerNetwork(number, incarnation, address, secret))
        return made[-1]

    yield one
    for peers in made:
        peers.close()


def meet(*all_: PeerNetwork) -> None:
    table = [PeerAddress(peers.number, peers.incarnation, peers.address) for peers in all_]
    for peers in all_:
        peers.meet(table)


def fails(body: Callable[[], object], says: str) -> None:
    with pytest.raises(PeerLostError, match=says):
        body()


@pytest.mark.parametrize("tcp", [False, True])
def test_messages_of_a_stream_arrive_in_order_expected_or_not(make: Make, tcp: bool) -> None:
    one, two = make(0, tcp=tcp, secret=b"s"), make(1, tcp=tcp, secret=b"s")
    meet(one, two)
    there, back = one.line("r", (0, 1)), two.line("r", (0, 1))
    chance = random.Random(0)
    sizes = [chance.choice([1, 7, 1000, 70_000, 900_000]) for _ in range(60)]
    bodies = [chance.randbytes(size) for size in sizes]
    rooms = [bytearray(size) for size in sizes]
    sent, came = [], []
    for index, body in enumerate(bodies):
        half = len(body) // 2
        if index % 3:
            came.append(back.expect(0, index % 2, memoryview(rooms[index])))
            sent.append(there.send(1, index % 2, [body[:half], body[half:]]))
        else:
            sent.append(there.send(1, index % 2, [body]))
            came.append(back.expect(0, index % 2, memoryview(rooms[index])))
    for ticket in (*sent, *came):
        ticket.wait()
    assert rooms == bodies


def test_both_sides_send_large_messages_at_once(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    size = 8 << 20
    lines = [one.line("r", (1,)), two.line("r", (0,))]
    rooms = [bytearray(size), bytearray(size)]
    sent = [line.send(1 - i, 0, [bytes([i + 1]) * size]) for i, line in enumerate(lines)]
    came = [line.expect(1 - i, 0, memoryview(rooms[i])) for i, line in enumerate(lines)]
    for ticket in (*sent, *came):
        ticket.wait()
    assert rooms == [bytes([2]) * size, bytes([1]) * size]


def test_a_pushed_body_goes_where_the_handler_says(make: Make) -> None:
    one, two = make(0), make(1)
    room, done = bytearray(300_000), threading.Event()
    asked = []

    def handler(source: int, scope: str, note: bytes, length: int) -> ReceivePlace | None:
        asked.append((source, scope, note, length))
        if note == b"no":
            return None
        view = memoryview(room)
        return ReceivePlace([view[200_000:], view[:200_000]], done.set)

    two.handle(handler)
    meet(one, two)
    one.push(1, "r", b"no", [bytes(5)]).wait()
    one.push(1, "r", b"yes", [b"a" * 100_000, b"b" * 200_000]).wait()
    assert done.wait(10.0)
    assert asked == [(0, "r", b"no", 5), (0, "r", b"yes", 300_000)]
    assert room == b"b" * 200_000 + b"a" * 100_000


def test_a_message_of_another_size_is_an_error(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    ticket = two.line("r", (0,)).expect(0, 0, memoryview(bytearray(3)))
    one.line("r", (1,)).send(1, 0, [b"four"])
    fails(ticket.wait, "4 bytes came for 3")


def test_forgetting_a_scope_ends_its_waits_and_no_other(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    gone, stays = (two.line(scope, (0,)).expect(0, 0, memoryview(bytearray(1))) for scope in ("a", "b"))
    late = one.line("a", (1,))
    two.forget("a")
    fails(gone.wait, "a was forgotten")
    late.send(1, 0, [b"x"]).wait()
    one.line("b", (1,)).send(1, 0, [b"y"])
    stays.wait()
    fails(two.line("a", (0,)).expect(0, 0, memoryview(bytearray(1))).wait, "forgotten")


def test_nothing_is_written_once_a_scope_is_forgotten(make: Make) -> None:
    """Half of a body is there when its scope is forgotten: the rest goes nowhere, and what follows is understood."""
    one, two = make(0), make(1)
    begun = threading.Event()
    body = b"\1" * (64 << 20)
    room = bytearray(len(body))
    complete: list[str] = []

    def place(source: int, scope: str, note: bytes, length: int) -> ReceivePlace:
        begun.set()
        return ReceivePlace([memoryview(room)], lambda: complete.append(scope))

    two.handle(place)
    meet(one, two)
    # on a busy machine all of it may be there before this thread goes on: then another scope is tried
    for scope in map(str, range(50)):
        begun.clear()
        room[:] = bytes(len(room))
        sent = one.push(1, scope, b"", [body])
        assert begun.wait(10.0)
        two.forget(scope)
        filled = room.count(1)
        sent.wait()
        if filled < len(room):
            break
    into = memoryview(bytearray(1))
    ticket = two.line("s", (0,)).expect(0, 0, into)
    one.line("s", (1,)).send(1, 0, [b"z"])
    ticket.wait()
    assert bytes(into) == b"z"
    assert room.count(1) == filled < len(room)
    assert scope not in complete


def test_a_peer_that_ends_wakes_waiting_receivers(make: Make) -> None:
    one, two, three = make(0), make(1), make(2)
    heard: list[int] = []
    one.on_lost(lambda instance, why: heard.append(instance))
    meet(one, two, three)
    line, other = one.line("r", (1, 2)), one.line("s", (2,))
    waits, goes_on = line.expect(1, 0, memoryview(bytearray(1))), other.expect(2, 0, memoryview(bytearray(1)))
    two.line("r", (0,)).send(0, 1, [b"x"]).wait()  # the connection is up
    threading.Timer(0.05, two.close).start()
    fails(waits.wait, "instance 1")
    fails(line.check, "instance 1")
    fails(line.send(1, 0, [b"x"]).wait, "instance 1")
    three.line("s", (0,)).send(0, 0, [b"x"])
    goes_on.wait()
    until(lambda: heard == [1])


def test_a_new_incarnation_of_an_instance_takes_its_place(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    waits = one.line("r", (1,)).expect(1, 0, memoryview(bytearray(1)))
    again = make(1, 1)
    meet(one, again)
    fails(waits.wait, "started again")
    into = memoryview(bytearray(1))
    ticket = one.line("s", (1,)).expect(1, 0, into)
    again.line("s", (0,)).send(0, 0, [b"n"])
    ticket.wait()
    one.meet([])
    fails(lambda: one.line("s", (1,)), "not here")


def test_a_connection_that_is_cut_is_made_again_and_old_lines_are_lost(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    ends = one.line("r", (1,)), two.line("r", (0,))
    into = memoryview(bytearray(1))
    ticket = ends[0].expect(1, 0, into)
    ends[1].send(0, 0, [b"a"])
    ticket.wait()
    sockets: socket.socket | None = two._connections[0]._socket
    assert sockets is not None
    sockets.shutdown(socket.SHUT_RDWR)
    for line, who in zip(ends, (1, 0), strict=True):
        fails(line.expect(who, 0, into).wait, f"instance {who}")
    # between its loss and the next meeting a peer has no connection
    until(lambda: all(to in end._connections and end._connections[to].up for end, to in ((one, 1), (two, 0))))
    ticket = one.line("s", (1,)).expect(1, 0, into)
    two.line("s", (0,)).send(0, 0, [b"b"])
    ticket.wait()
    assert bytes(into) == b"b"


def test_a_wait_calls_back_and_may_be_ended_by_that(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    ticket = one.line("r", (1,)).expect(1, 0, memoryview(bytearray(1)))
    looks = []

    def look() -> None:
        looks.append(0)
        if len(looks) == 3:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        ticket.wait(look, 0.001)


def test_a_peer_without_the_secret_gets_nothing(make: Make) -> None:
    one, two = make(0, tcp=True, secret=b"right"), make(1, tcp=True, secret=b"wrong")
    meet(one, two)
    fails(two.line("r", (0,)).expect(0, 0, memoryview(bytearray(1))).wait, "secret|handshake")
    assert not one._connections[1].up


def test_a_peer_that_was_never_reachable_is_lost_for_both_sides(make: Make) -> None:
    one, two, three = make(0), make(1), make(2)
    table = [PeerAddress(peers.number, peers.incarnation, peers.address) for peers in (one, two, three)]
    two.close()
    for peers in (one, three):
        peers.meet(table)
        fails(peers.line("r", (1,)).expect(1, 0, memoryview(bytearray(1))).wait, "cannot be reached")


def test_addresses_are_checked(make: Make) -> None:
    for address in ("127.0.0.1:80", "tcp:80", "unix:", "tcp:h:x"):
        with pytest.raises(ConfigError, match="must be unix:PATH or tcp:HOST:PORT"):
            PeerNetwork(0, 0, address)


def test_closing_wakes_all_and_ends_threads(make: Make) -> None:
    before = threading.active_count()
    one, two = make(0), make(1)
    meet(one, two)
    ticket = one.line("r", (1,)).expect(1, 0, memoryview(bytearray(1)))
    until(lambda: 1 in one._connections and one._connections[1].up)
    one.close()
    fails(ticket.wait, "this instance ends")
    two.close()
    until(lambda: threading.active_count() <= before)


def test_a_listener_that_is_out_of_descriptors_for_a_while_listens_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(24, "Too many open files")] * 3
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    one, two = make(0), make(1)
    meet(one, two)
    room = bytearray(3)
    came = two.line("r", (0, 1)).expect(0, 0, memoryview(room))
    one.line("r", (0, 1)).send(1, 0, [b"abc"]).wait()
    came.wait()
    assert bytes(room) == b"abc"
    assert not refusals
