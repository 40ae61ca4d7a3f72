"""Connections between instances: order, waiting, pushes, terms, and every way in which a wait ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from msgspec.structs import replace
from tests.helpers.polling import until

from headway.core.errors import ConfigError
from headway.runtime.engine.protocol import PeerAddress, PeerLostError, endpoint
from headway.runtime.kv_transfer.peers import FrameHead, FrameKind, PeerNetwork

Make = Callable[..., PeerNetwork]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[PeerNetwork] = []

    def one(number: int, incarnation: int = 0, tcp: bool = False, secret: str = "") -> PeerNetwork:
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
    one, two = make(0, tcp=tcp, secret="s"), make(1, tcp=tcp, secret="s")
    meet(one, two)
    there, back = one.line("r", (0, 1)), two.line("r", (0, 1))
    chance = random.Random(0)
    sizes = [chance.choice([1, 7, 1000, 70_000, 900_000]) for _ in range(60)]
    bodies = [chance.randbytes(size) for size in sizes]
    rooms = [bytearray(size) for size in sizes]
    sent, came = [], []
    for index, body in enumerate(bodies):
        if index % 3:
            came.append(back.expect(0, index % 2, memoryview(rooms[index])))
            sent.append(there.send(1, index % 2, body))
        else:
            sent.append(there.send(1, index % 2, body))
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
    sent = [line.send(1 - i, 0, bytes([i + 1]) * size) for i, line in enumerate(lines)]
    came = [line.expect(1 - i, 0, memoryview(rooms[i])) for i, line in enumerate(lines)]
    for ticket in (*sent, *came):
        ticket.wait()
    assert rooms == [bytes([2]) * size, bytes([1]) * size]


def test_a_pushed_body_is_given_to_the_handler_in_order(make: Make) -> None:
    one, two = make(0), make(1)
    got: list[tuple[int, str, bytes, bytes]] = []
    two.handle(lambda source, scope, note, body: got.append((source, scope, note, bytes(body))))
    meet(one, two)
    one.push(1, "r", b"note")
    one.push(1, "s", b"", b"a" * 300_000).wait()
    one.push(1, "s", b"last")
    until(lambda: len(got) == 3)
    assert got == [(0, "r", b"note", b""), (0, "s", b"", b"a" * 300_000), (0, "s", b"last", b"")]


def test_a_message_of_another_size_is_an_error(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    ticket = two.line("r", (0,)).expect(0, 0, memoryview(bytearray(3)))
    one.line("r", (1,)).send(1, 0, b"four")
    fails(ticket.wait, "4 bytes came for 3")


def test_forgetting_a_scope_ends_its_waits_and_no_other(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    gone, stays = (two.line(scope, (0,)).expect(0, 0, memoryview(bytearray(1))) for scope in ("a", "b"))
    late = one.line("a", (1,))
    two.forget("a")
    fails(gone.wait, "a was forgotten")
    late.send(1, 0, b"x").wait()
    one.line("b", (1,)).send(1, 0, b"y")
    stays.wait()
    fails(two.line("a", (0,)).expect(0, 0, memoryview(bytearray(1))).wait, "forgotten")


def test_a_peer_that_ends_wakes_waiting_receivers(make: Make) -> None:
    one, two, three = make(0), make(1), make(2)
    heard: list[int] = []
    one.on_lost(lambda instance, why: heard.append(instance))
    meet(one, two, three)
    line, other = one.line("r", (1, 2)), one.line("s", (2,))
    waits, goes_on = line.expect(1, 0, memoryview(bytearray(1))), other.expect(2, 0, memoryview(bytearray(1)))
    two.line("r", (0,)).send(0, 1, b"x").wait()  # the connection is up
    threading.Timer(0.05, two.close).start()
    fails(waits.wait, "instance 1")
    fails(line.check, "instance 1")
    fails(line.send(1, 0, b"x").wait, "instance 1")
    three.line("s", (0,)).send(0, 0, b"x")
    goes_on.wait()
    until(lambda: set(heard) == {1})


def test_a_new_incarnation_of_an_instance_takes_its_place(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    waits = one.line("r", (1,)).expect(1, 0, memoryview(bytearray(1)))
    again = make(1, 1)
    meet(one, again)
    fails(waits.wait, "started again")
    into = memoryview(bytearray(1))
    ticket = one.line("s", (1,)).expect(1, 0, into)
    again.line("s", (0,)).send(0, 0, b"n")
    ticket.wait()
    one.meet([])
    fails(lambda: one.line("s", (1,)), "not here")


def test_a_new_incarnation_is_met_at_once_while_the_old_one_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.runtime.kv_transfer.peers._AGAIN_S", 60.0)
    one, two = make(0), make(1)
    lost: list[str] = []
    one.on_lost(lambda end, why: lost.append(why))
    meet(one, two)
    two.close()
    until(lambda: any("cannot be reached" in why for why in lost))
    again = make(1, 1)
    one.meet([PeerAddress(peers.number, peers.incarnation, peers.address) for peers in (one, again)])
    got: list[bytes] = []
    again.handle(lambda end, scope, note, body: got.append(bytes(note)))
    one.push(1, "s", b"n").wait()
    until(lambda: got)


def test_a_connection_that_is_cut_is_made_again_and_old_lines_are_lost(make: Make) -> None:
    one, two = make(0), make(1)
    meet(one, two)
    ends = one.line("r", (1,)), two.line("r", (0,))
    into = memoryview(bytearray(1))
    ticket = ends[0].expect(1, 0, into)
    ends[1].send(0, 0, b"a")
    ticket.wait()
    two._connections[0].end("instance 0: it was cut")
    for line, who in zip(ends, (1, 0), strict=True):
        fails(line.expect(who, 0, into).wait, f"instance {who}")
    # between its loss and the next meeting a peer has no connection
    until(lambda: all(to in end._connections and end._connections[to].up for end, to in ((one, 1), (two, 0))))
    ticket = one.line("s", (1,)).expect(1, 0, into)
    two.line("s", (0,)).send(0, 0, b"b")
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
    one, two = make(0, tcp=True, secret="right"), make(1, tcp=True, secret="wrong")
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
    one, two = make(0), make(1)
    meet(one, two)
    ticket = one.line("r", (1,)).expect(1, 0, memoryview(bytearray(1)))
    until(lambda: 1 in one._connections and one._connections[1].up)
    one.close()
    fails(ticket.wait, "this instance ends")
    two.close()
    assert not one._reader.is_alive()
    assert not two._reader.is_alive()


def test_messages_of_an_earlier_term_are_dropped(make: Make) -> None:
    """As they are when the ends have begun anew while some were still on their way."""
    one, two = make(0), make(1)
    got: list[bytes] = []
    two.handle(lambda source, scope, note, body: got.append(note))
    meet(one, two)
    one.push(1, "r", b"first")
    until(lambda: got == [b"first"])
    two._connections[0].end("it was cut")
    until(lambda: one._connections[1].term == two._connections[0].term == 1)
    context = zmq.Context()
    late = context.socket(zmq.PUSH)
    late.connect(endpoint(two.address))
    now = FrameHead(0, 0, 0, 1, FrameKind.PUSH, "r", 0, b"in its term")
    for head in (replace(now, term=0, note=b"late"), replace(now, target_life=1, note=b"for another"), now):
        late.send_multipart([msgspec.msgpack.encode(head), b""])
    late.send(b"what is this")
    until(lambda: len(got) > 1)
    one.push(1, "r", b"last")
    until(lambda: got[-1] == b"last")
    assert got == [b"first", b"in its term", b"last"]
    context.destroy(linger=0)


def test_an_end_that_greets_first_is_then_reached_where_it_is_named(make: Make, tmp_path: Path) -> None:
    one, two = make(0), make(1)
    got: list[bytes] = []
    two.handle(lambda source, scope, note, body: got.append(note))
    two.meet([PeerAddress(0, 0, one.address)])
    until(lambda: 1 in one._connections)
    assert one._connections[1].peer.address == two.address
    (tmp_path / "named").symlink_to(two.address.removeprefix("unix:"))
    one.meet([PeerAddress(1, 0, f"unix:{tmp_path}/named")])
    assert one._connections[1].peer.address == f"unix:{tmp_path}/named"
    one.push(1, "r", b"note")
    until(lambda: got == [b"note"])
