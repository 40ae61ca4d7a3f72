"""Places of an arena: never two at one byte, and room again as soon as what came before was read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.runtime.kv_transfer.ring_buffer import BufferRange, RingBuffer, RingReader, aligned, most

SIZES = st.sampled_from([256, 320, 1024, 4096 + 64, 8 << 10])


@settings(max_examples=150, derandomize=True, deadline=None)
@given(SIZES, st.lists(st.tuples(st.sampled_from("tttldr"), st.integers(0, 2000)), max_size=120))
def test_ranges_never_overlap_and_all_are_freed(size: int, steps: list[tuple[str, int]]) -> None:
    ring = RingBuffer(size)
    held: list[BufferRange] = []
    away: list[BufferRange] = []
    read = 0
    for step, number in steps:
        if step == "t":
            taken = ring.take(1 + number % most(size))
            if taken is not None:
                assert 0 <= taken.at < taken.end <= size
                assert taken.at % 64 == 0
                assert taken.end - taken.at == aligned(1 + number % most(size))
                assert all(taken.end <= other.at or other.end <= taken.at for other in (*held, *away))
                held.append(taken)
            else:
                assert held or away
        elif step == "l" and held:
            away.append(held.pop(number % len(held)))
            ring.leave(away[-1])
        elif step == "d" and (held or away):
            index = number % (len(held) + len(away))
            ring.drop(held.pop(index) if index < len(held) else away.pop(index - len(held)))
        elif step == "r" and away:
            count = 1 + number % len(away)
            read += count
            ring.read(read)
            del away[:count]
        assert ring.bytes == sum(taken.end - taken.at for taken in (*held, *away))
    for taken in held:
        ring.drop(taken)
    ring.read(read + len(away))
    assert ring.bytes == 0
    whole = ring.take(most(size))
    assert whole is not None
    assert whole.at == 0


@settings(max_examples=150, derandomize=True, deadline=None)
@given(SIZES, st.data())
def test_a_waiting_request_is_called_when_there_is_space(size: int, data: st.DataObject) -> None:
    """A reader that tells when it is due only, and reads as late as it may: nobody waits for what was read."""
    ring, reader = RingBuffer(size), RingReader(size)
    under_way: list[int] = []
    for body in data.draw(st.lists(st.integers(1, most(size)), max_size=80)):
        while (taken := ring.take(body)) is None:
            assert under_way, "all was read, and there is no room"
            if reader.read(under_way.pop(0)):
                ring.read(reader.messages)
        ring.leave(taken)
        under_way.append(body)
        while under_way and data.draw(st.booleans()):
            if reader.read(under_way.pop(0)):
                ring.read(reader.messages)


@pytest.mark.parametrize("messages", [-1, 0, 3])
def test_an_impossible_read_count_is_refused(messages: int) -> None:
    ring = RingBuffer(1024)
    for _ in range(2):
        taken = ring.take(64)
        assert taken is not None
        ring.leave(taken)
    ring.read(1)
    with pytest.raises(ValueError, match=f"{messages} messages read, of 2"):
        ring.read(messages)
    ring.read(2)
    assert ring.bytes == 0
