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
from msgspec.structs import replace
from tests.helpers.polling import until

from headway.kv.allocator import slots_of
from headway.runtime.engine.protocol import KvArrived, PeerLostError
from headway.runtime.kv_transfer import slab_memory
from headway.runtime.kv_transfer.connector import Bytes, KvBody, KvPart, KvPlace, SaveKv, SlabFree, SliceEnd, decode
from headway.runtime.kv_transfer.local import KvPacket, ReceiveQueue, SendQueue, packets_of

LAYERS, SLOTS, HEADS, VECTOR = 2, 64, 2, 8


class Line:
    """What was pushed, as (request, note, body); the other end reads it when it is `open`. `last`: "z" has left."""

    def __init__(self) -> None:
        self.pushed: list[tuple[str, KvBody | SliceEnd, bytes]] = []
        self.outlet: SendQueue | None = None
        self.gone, self.open, self.last = False, threading.Event(), threading.Event()
        self.slabs: list[int] = []

    def push(self, to: int, note: bytes, body: memoryview, scope: str) -> None:
        said = decode(note)
        assert isinstance(said, KvBody | SliceEnd)
        if isinstance(said, KvBody):
            self.slabs.append(said.slab)
            self.pushed.append((scope, replace(said, size=0, memory=0, slab=0), bytes(body)))
            assert said.size == body.nbytes
            assert self.outlet is not None
            self.outlet.freed(SlabFree(said.memory + 1, said.slab))  # of other memory
            self.open.wait()
            self.outlet.freed(SlabFree(said.memory, said.slab))
        else:
            self.pushed.append((scope, said, b""))
        if scope == "z":
            self.last.set()

    def check(self) -> None:
        if self.gone:
            raise PeerLostError("it is gone")


def queue(failed: Callable[[str, str, int | None], None] = lambda request, why, end: None) -> tuple[Line, SendQueue]:
    line = Line()
    line.outlet = SendQueue(1, line, (), failed)
    line.outlet.start()
    return line, line.outlet


def end_of(request: str) -> tuple[SaveKv, list[KvPacket]]:
    save = SaveKv(request, 99, 1)
    return save, [KvPacket(save, SliceEnd(99, 0))]


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
    wanted: list[tuple[str, KvBody | SliceEnd, bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab_memory, "SLAB_BYTES", 8 * 2 * HEADS * VECTOR)
        line, outlet = queue()
        one = KvPart(caches["a"], range(HEADS), 0, np.arange(1), np.arange(1))
        outlet.add(SaveKv("y", 0, 1), packets_of(SaveKv("y", 0, 1), 0, one))  # which keeps the thread
        until(lambda: len(line.pushed) == 1)
        for piece, (request, layer, tokens) in enumerate(moves):
            part = KvPart(caches[request], range(HEADS), 0, np.arange(tokens), np.arange(tokens)[::-1].copy())
            some = list(packets_of(SaveKv(request, piece, 1), layer, part))
            assert sum(packet.size for packet in some) == 2 * HEADS * tokens * VECTOR
            for packet in some:
                body = np.ascontiguousarray(part.cache[layer][:, :, part.slots[packet.chosen]])
                wanted.append((request, packet.note, body.tobytes()))
            outlet.add(SaveKv(request, piece, 1), some)
    for act, request in acts:
        (outlet.copy if act == "copy" else outlet.forget)(request)
        caches[request][...] = 0
    if again:
        outlet.add(*end_of("d"))
        wanted.append(("d", SliceEnd(99, 0), b""))
    outlet.add(*end_of("z"))
    line.open.set()
    assert line.last.wait(10)
    outlet.close()
    forgotten = {request for act, request in acts if act == "forget"}
    assert line.pushed[1:-1] == [one for one in wanted if one[0] not in forgotten]


def test_a_lost_connection_is_told_once_for_each_request_and_takes_nothing_more() -> None:
    failed: list[tuple[str, str, int | None]] = []
    line, outlet = queue(lambda *told: failed.append(told))
    for request in "abz":
        outlet.add(*end_of(request))
    outlet.add(SaveKv("a", 5, 1), [])
    assert line.last.wait(10)
    outlet.answered(SaveKv("b", 99, 1))
    outlet.forget("z")
    assert outlet.pending
    line.gone = True
    assert outlet.gone == "it is gone"
    outlet.close("it is gone")
    outlet.close("again")
    assert failed == [("a", "it is gone", 1)]
    outlet.add(*end_of("a"))
    for _ in range(2):
        outlet.add(*end_of("c"))
    assert failed == [("a", "it is gone", 1), ("c", "it is gone", 1)]
    assert len(line.pushed) == 3


@settings(max_examples=100)
@given(st.integers(1, SLOTS), st.integers(1, 4), st.integers(1, 20), st.randoms(use_true_random=False), st.booleans())
def test_received_messages_are_counted_and_the_slice_is_complete_at_its_end(
    tokens: int, sources: int, most: int, chance: Any, hole: bool
) -> None:
    """Each source has some of the tokens; its messages come in order, those of several mixed. hole: one is missing."""
    told: set[int] = set()
    inbox = ReceiveQueue(lambda: None)
    cut = chance.randint(0, tokens)
    runs = tuple(run for run in ((SLOTS - cut, cut), (0, tokens - cut)) if run[1])
    cache = np.zeros((LAYERS, 2, HEADS, SLOTS, VECTOR), dtype=np.uint8)
    truth = np.random.default_rng(tokens).integers(1, 255, (LAYERS, 2, HEADS, tokens, VECTOR), dtype=np.uint8)
    inbox.open("r", KvPlace(cache, range(HEADS), tokens, runs))
    owner = np.array([chance.randrange(sources) for _ in range(tokens)])
    mail: dict[int, list[tuple[KvBody | SliceEnd, Bytes]]] = defaultdict(list)
    for source in range(sources):
        mine = np.flatnonzero(owner == source)
        for layer in range(LAYERS):
            for at in range(0, len(mine), most):
                some = mine[at : at + most]
                body = np.ascontiguousarray(truth[layer][:, :, some]).reshape(-1)
                mail[source].append((KvBody(7, layer, (0, HEADS), some.astype(np.int32).tobytes()), body))
        mail[source].append((SliceEnd(7, len(mail[source])), np.empty(0, dtype=np.uint8)))
    victim = next((source for source in range(sources) if hole and len(mail[source]) > 1), None)
    lost_tokens = 0
    if victim is not None:
        first_note = mail[victim].pop(0)[0]
        assert isinstance(first_note, KvBody)
        lost_tokens = len(first_note.positions)
    done = np.zeros((LAYERS, tokens), dtype=bool)
    while mail:
        source = chance.choice(sorted(mail))
        note, body = mail[source].pop(0)
        if not mail[source]:
            del mail[source]
        if isinstance(note, SliceEnd):
            told |= {source} if inbox.end(source, "r", note) else set()
        else:
            inbox.body(source, "r", note, body)
            done[note.layer, note.positions] = True
        left = done.size - int(done.sum())
        assert inbox.matched("r") == tokens - -(-left // LAYERS)
    ends = inbox.take()
    received = [end for end in ends if isinstance(end, KvArrived)]
    whole = set(range(sources)) - {victim}
    assert {one.source for one in received} == whole == told
    assert len(received) == len(whole)
    assert (len(ends) > len(received)) == (victim is not None)
    assert inbox.take() == []
    slots = slots_of(runs, np.arange(tokens))
    for layer in range(LAYERS):
        assert np.array_equal(cache[layer][:, :, slots][:, :, done[layer]], truth[layer][:, :, done[layer]])
    assert not cache[:, :, :, np.setdiff1d(np.arange(SLOTS), slots)].any(), "nobody's slots are written"
    assert lost_tokens == done.size - int(done.sum())
    inbox.close("r")
    before = cache.copy()
    inbox.body(0, "r", KvBody(7, 0, (0, HEADS), bytes(4)), truth[0][:, :, :1].copy().reshape(-1))
    assert not inbox.end(0, "r", SliceEnd(7, 1))
    assert np.array_equal(cache, before)
    assert inbox.matched("r") is None


def test_what_comes_twice_counts_once() -> None:
    """As when a request is awaited again while bodies of an earlier piece are on their way."""
    inbox = ReceiveQueue(lambda: None)
    cache = np.zeros((LAYERS, 2, HEADS, SLOTS, VECTOR), dtype=np.uint8)
    inbox.open("r", KvPlace(cache, range(HEADS), 10, ((0, 10),)))
    first = np.arange(6, dtype=np.int32)
    for piece in (1, 2):
        for layer in range(LAYERS):
            body = np.zeros(2 * HEADS * len(first) * VECTOR, dtype=np.uint8)
            inbox.body(piece, "r", KvBody(piece, layer, (0, HEADS), first.tobytes()), body)
    assert inbox.matched("r") == 6
