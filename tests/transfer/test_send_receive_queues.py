"""What leaves leaves in order and once; what comes is counted until all of it is there, whoever comes first."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.kv.slot_ranges import slots_of
from headway.runtime.kv_transfer import send_queue as outlets
from headway.runtime.kv_transfer.body_notes import END, BodyNote, decode, packets
from headway.runtime.kv_transfer.connector import Bytes, KvPart, KvPlace, SaveKv
from headway.runtime.kv_transfer.peers import SendRoom, TransferCompletion
from headway.runtime.kv_transfer.receive_queue import ReceiveQueue
from headway.runtime.kv_transfer.send_queue import KvPacket, SendQueue, packets_of

LAYERS, SLOTS, HEADS, VECTOR = 2, 64, 2, 8


class Way:
    """What was pushed, as (note, body), and how many rooms were given out and neither pushed from nor dropped."""

    def __init__(self, opened: bool = True) -> None:
        """opened: there is room, or there will be after `open`."""
        self.dead = False
        self.pushed: list[tuple[BodyNote, bytes]] = []
        self.taken = 0
        self._opened = opened
        self._again: Callable[[], None] = lambda: None

    def open(self) -> None:
        self._opened = True
        self._again()

    def room(self, size: int, again: Callable[[], None]) -> SendRoom | None:
        self._again = again
        if not self._opened:
            return None
        self.taken += 1
        return SendRoom(np.empty(size, dtype=np.uint8))

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        self.taken -= 1
        self.pushed.append((decode(note), room.view.tobytes()))
        ticket = TransferCompletion()
        ticket.finish()
        return ticket

    def drop(self, room: SendRoom) -> None:
        self.taken -= 1


class Last(Way):
    """The last thing to leave."""

    def __init__(self, left: threading.Event) -> None:
        super().__init__()
        self._left = left

    def push(self, note: bytes, room: SendRoom) -> TransferCompletion:
        self._left.set()
        return super().push(note, room)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, LAYERS - 1), st.integers(1, 30)), max_size=12),
    st.lists(st.tuples(st.sampled_from(["copy", "forget"]), st.sampled_from("abc")), max_size=4),
    st.booleans(),
)
def test_packets_leave_in_order_and_forgotten_ones_never_leave(
    moves: list[tuple[str, int, int]], acts: list[tuple[str, str]], again: bool
) -> None:
    """What is done to some requests is done before anything can leave; copied ones are then overwritten."""
    rng = np.random.default_rng(len(moves))
    caches = {name: rng.integers(0, 255, (LAYERS, 2, HEADS, SLOTS, VECTOR), dtype=np.uint8) for name in "abc"}
    way, left = Way(opened=False), threading.Event()
    outlet = SendQueue("test", lambda request, why, end: None)
    wanted: list[tuple[str, BodyNote, bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outlets, "PACKET_BYTES", 8 * 2 * HEADS * VECTOR)
        for piece, (request, layer, tokens) in enumerate(moves):
            part = KvPart(caches[request], range(HEADS), 0, np.arange(tokens), np.arange(tokens)[::-1].copy())
            some = list(packets_of(SaveKv(request, piece, 1), way, layer, part))
            assert sum(packet.size for packet in some) == 2 * HEADS * tokens * VECTOR
            for packet in some:
                body = np.ascontiguousarray(part.cache[layer][:, :, part.slots[packet.chosen]])
                wanted.append((request, packet.note, body.tobytes()))
            outlet.add(some)
    for act, request in acts:
        (outlet.copy if act == "copy" else outlet.forget)(request)
        caches[request][...] = 0
    if again:
        outlet.add([KvPacket("d", way, BodyNote(99, END, (0, 0)))])
        wanted.append(("d", BodyNote(99, END, (0, 0)), b""))
    outlet.add([KvPacket("e", Last(left), BodyNote(100, END, (0, 0)))])
    way.open()
    assert left.wait(10)
    outlet.close()
    forgotten = {request for act, request in acts if act == "forget"}
    assert way.pushed == [(note, body) for request, note, body in wanted if request not in forgotten]
    assert way.taken == 0


def test_a_dead_route_takes_no_more_packets_and_other_routes_continue() -> None:
    dead, way, left = Way(), Way(), threading.Event()
    dead.dead = True
    outlet = SendQueue("test", lambda request, why, end: None)
    outlet.add([KvPacket("a", each, BodyNote(piece, END, (0, 0))) for piece, each in enumerate((dead, way, dead, way))])
    outlet.add([KvPacket("e", Last(left), BodyNote(100, END, (0, 0)))])
    assert left.wait(10)
    outlet.close()
    assert (dead.pushed, dead.taken) == ([], 0)
    assert [note.piece for note, _ in way.pushed] == [1, 3]


def come(inbox: ReceiveQueue, source: int, request: str, note: BodyNote, body: Bytes) -> bool:
    """A message is read, as a connection does; whether anybody wanted it."""
    place = inbox.handle(source, request, note, body.nbytes)
    if place is None:
        return False
    at = 0
    for view in place.views:
        view[:] = body[at : at + view.nbytes].data
        at += view.nbytes
    if not place.views and place.write is not None:
        place.write(body)
    place.complete()
    return True


@settings(max_examples=100)
@given(st.integers(1, SLOTS), st.integers(1, 4), st.integers(1, 20), st.randoms(use_true_random=False), st.booleans())
def test_received_messages_are_counted_and_the_slice_is_complete_at_its_end(
    tokens: int, sources: int, most: int, chance: Any, hole: bool
) -> None:
    """Each source has some of the tokens; its messages come in order, those of several mixed. hole: one is missing."""
    told: list[tuple[int, str, int]] = []
    inbox = ReceiveQueue(lambda: None, lambda source, request, piece: told.append((source, request, piece)))
    cut = chance.randint(0, tokens)
    runs = tuple(run for run in ((SLOTS - cut, cut), (0, tokens - cut)) if run[1])
    cache = np.zeros((LAYERS, 2, HEADS, SLOTS, VECTOR), dtype=np.uint8)
    truth = np.random.default_rng(tokens).integers(1, 255, (LAYERS, 2, HEADS, tokens, VECTOR), dtype=np.uint8)
    inbox.open("r", KvPlace(cache, range(HEADS), tokens, runs))
    owner = np.array([chance.randrange(sources) for _ in range(tokens)])
    mail: dict[int, list[tuple[BodyNote, Bytes]]] = defaultdict(list)
    for source in range(sources):
        mine = np.flatnonzero(owner == source)
        for layer in range(LAYERS):
            for part, short in packets(mine, most):
                body = np.ascontiguousarray(truth[layer][:, :, mine[part]]).reshape(-1)
                mail[source].append((BodyNote(7, layer, (0, HEADS), short), body))
        mail[source].append((BodyNote(7, END, (len(mail[source]), 0)), np.empty(0, dtype=np.uint8)))
    victim = next((source for source in range(sources) if hole and len(mail[source]) > 1), None)
    lost_tokens = 0
    if victim is not None:
        lost_tokens = sum(count for _, count, _ in mail[victim].pop(0)[0].tokens)
    done = np.zeros((LAYERS, tokens), dtype=bool)
    while mail:
        source = chance.choice(sorted(mail))
        note, body = mail[source].pop(0)
        if not mail[source]:
            del mail[source]
        assert come(inbox, source, "r", note, body)
        if note.layer != END:
            for first, count, step in note.tokens:
                done[note.layer, first : first + count * step : step] = True
        left = done.size - int(done.sum())
        assert inbox.matched("r") == tokens - -(-left // LAYERS)
    received, lost = inbox.take()
    whole = set(range(sources)) - {victim}
    assert {one.source for one in received} == whole == {source for source, _, _ in told}
    assert len(received) == len(whole)
    assert bool(lost) == (victim is not None)
    assert inbox.take() == ([], [])
    slots = slots_of(runs, np.arange(tokens))
    for layer in range(LAYERS):
        assert np.array_equal(cache[layer][:, :, slots][:, :, done[layer]], truth[layer][:, :, done[layer]])
    assert not cache[:, :, :, np.setdiff1d(np.arange(SLOTS), slots)].any(), "nobody's slots are written"
    assert lost_tokens == done.size - int(done.sum())
    inbox.close("r")
    assert not come(inbox, 0, "r", BodyNote(7, 0, (0, HEADS), ((0, 1, 1),)), truth[0][:, :, :1].copy().reshape(-1))
    assert inbox.matched("r") is None
