"""Messages meet who expects them, in order, whichever comes first and however reading and waiting interleave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.kv_transfer.completion import TransferCompletion
from headway.runtime.kv_transfer.peer import PeerLostError
from headway.runtime.kv_transfer.streams import MessageStreams

SIZE = 4
Acts = list[tuple[str, str, int]]
acts = st.lists(
    st.tuples(st.sampled_from(["expect", "come", "forget"]), st.sampled_from("ab"), st.integers(0, 1)), max_size=40
)


def came(lanes: MessageStreams, lane: int, scope: str, body: bytes) -> Callable[[], None] | None:
    """A message begins and is read; what follows when all of it is."""
    begun = lanes.begin(lane, scope, len(body))
    if begun is None:
        return None
    into, there = begun
    into[:] = body
    return there


@settings(max_examples=200, derandomize=True, deadline=None)
@given(acts, st.booleans())
def test_the_nth_message_of_a_stream_is_for_the_nth_receiver(acts: Acts, late: bool) -> None:
    """late: a message is only there when the next thing has happened."""
    lanes = MessageStreams(1)
    waits: dict[tuple[str, int], list[tuple[TransferCompletion, bytearray]]] = defaultdict(list)
    told: dict[tuple[str, int], int] = defaultdict(int)
    read: list[tuple[str, Callable[[], None]]] = []
    ended: list[TransferCompletion] = []
    for number, (act, scope, lane) in enumerate(acts):
        key, due = (scope, lane), read
        read = []
        if act == "expect":
            into = bytearray(SIZE)
            waits[key].append((lanes.expect(lane, scope, memoryview(into)), into))
        elif act == "come":
            there = came(lanes, lane, scope, bytes([told[key], lane, ord(scope), number]))
            told[key] += 1
            assert there is not None
            read.append((scope, there))
        else:
            lanes.forget(scope, "forgotten")
            due = [one for one in due if one[0] != scope]  # a connection reads no more of it
            for gone in [key for key in waits if key[0] == scope]:
                ended += [ticket for ticket, _ in waits.pop(gone)[told[gone] :]]
                told.pop(gone, None)
            told = defaultdict(int, {key: count for key, count in told.items() if key[0] != scope})
        for _, there in due if late else [*due, *read]:
            there()
        read = read if late else []
    for _, there in read:
        there()
    for key, found in waits.items():
        for place, (ticket, into) in enumerate(found):
            assert ticket.done == (place < told[key])
            if ticket.done:
                ticket.wait()
                assert (into[0], into[1], into[2]) == (place, key[1], ord(key[0]))
    for ticket in ended:
        with pytest.raises(PeerLostError, match="forgotten"):
            ticket.wait()


@pytest.mark.parametrize("first", ["message", "reader"])
def test_a_message_of_another_size_is_refused_and_the_next_one_is_not(first: str) -> None:
    lanes, into = MessageStreams(1), bytearray(SIZE)
    if first == "message":
        there = came(lanes, 0, "a", bytes(SIZE + 1))
        assert there is not None
        there()
        ticket = lanes.expect(0, "a", memoryview(into))
    else:
        ticket = lanes.expect(0, "a", memoryview(into))
        assert came(lanes, 0, "a", bytes(SIZE + 1)) is None
    with pytest.raises(PeerLostError, match="5 bytes came for 4"):
        ticket.wait()
    ticket = lanes.expect(0, "a", memoryview(into))
    there = came(lanes, 0, "a", b"next")
    assert there is not None
    there()
    ticket.wait()
    assert into == b"next"


def test_clear_reports_to_all_waiters() -> None:
    lanes = MessageStreams(1)
    tickets = [lanes.expect(lane, scope, memoryview(bytearray(SIZE))) for lane in range(2) for scope in "ab"]
    assert lanes.begin(0, "a", SIZE) is not None  # being read when the connection ends
    lanes.clear("it has ended")
    for ticket in tickets:
        with pytest.raises(PeerLostError, match="it has ended"):
            ticket.wait()
