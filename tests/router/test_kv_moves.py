"""KV on its way: what is sent has room where it goes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.router.decode_world import DecodeWorld

from headway.control.entries import KvSlice
from headway.runtime.engine.protocol import ReserveKv, SendKv


@pytest.fixture
def world() -> DecodeWorld:
    """A request whose prompt the scheduler of instance 0 computes."""
    made = DecodeWorld(500, 500, 500, 500)
    made.attempt.asked.told.clear()
    made.attempt.whole, made.attempt.at = {0}, 0
    return made


def _told(world: DecodeWorld, kind: type) -> list[Any]:
    return [message for _, message in world.registry.told if isinstance(message, kind)]


@pytest.mark.parametrize("since", [0, 1, 3])
def test_kv_of_a_growing_decode_is_sent_up_to_the_reserved_tokens(world: DecodeWorld, since: int) -> None:
    attempt, moves = world.attempt, world.moves
    attempt.asked.told += [1] * 5
    known = attempt.request.prompt_tokens + attempt.said
    moves.reserve(attempt, 1)
    attempt.asked.told += [1] * since
    moves.reserved(attempt, 1, attempt.room[1].serial)
    moves.send(KvSlice(attempt.request.id, 0, 1, 0, known), 0.0)
    attempt.asked.told += [1] * since
    moves.send(KvSlice(attempt.request.id, 2, 1, 0, known), 0.0)
    (room,) = _told(world, ReserveKv)
    assert room.tokens == 104
    assert [send.end for send in _told(world, SendKv)] == [104, 104]


@pytest.mark.parametrize("overlapped", [False, True])
def test_all_kv_of_a_prompt_that_a_scheduler_computed_is_sent_afterwards(world: DecodeWorld, overlapped: bool) -> None:
    """Under PecSched too, whose paper sends it layer by layer (docs/concepts/placement.md says so)."""
    attempt, moves = world.attempt, world.moves
    moves.reserve(attempt, 1)
    moves.reserved(attempt, 1, attempt.room[1].serial)
    moves.send(KvSlice(attempt.request.id, 0, 1, 0, 100, overlapped=overlapped), 0.0)
    (send,) = _told(world, SendKv)
    assert (send.start, send.end) == (0, attempt.kv_tokens)
    assert {"layer", "layers"}.isdisjoint(SendKv.__struct_fields__), "a message without a layer is of all"


def test_a_slice_waiting_for_room_is_sent_by_all_holders_of_its_kv(world: DecodeWorld) -> None:
    """Of a span on instance 0, of which instance 1 has a part by the time instance 2 has room."""
    attempt, moves = world.attempt, world.moves
    attempt.at, attempt.whole = None, set()
    entries: list[Any] = [SimpleNamespace(index=index, state="done") for index in range(2)]
    attempt.controlled = cast(Any, SimpleNamespace(entries=entries))
    attempt.runs = [cast(Any, SimpleNamespace(group=(0,)))]
    pieces = [KvSlice(attempt.request.id, 0, 2, 0, 40, entry=entries[0]) for _ in range(2)]
    assert not moves.ready(pieces[0])
    attempt.runs.append(cast(Any, SimpleNamespace(group=(0, 1))))
    attempt.running = {0, 1}
    moves.reserved(attempt, 2, attempt.room[2].serial)
    assert not moves.ready(pieces[0]), "the last span is not computed"
    attempt.running = set()
    for piece in pieces:
        assert moves.ready(piece)
        moves.send(piece, 0.0)
    assert [(one.start, one.end, one.to) for one in _told(world, SendKv)] == [(0, 40, 2)] * 2
    (movement,) = attempt.moving.values()
    movement.then()
    assert world.sent == pieces, "one movement stands for both"
    moves.send(pieces[0], 0.0)
    assert len(world.sent) == 3


def test_a_slice_is_sent_as_soon_as_there_is_room(world: DecodeWorld) -> None:
    attempt, moves = world.attempt, world.moves
    entry: Any = SimpleNamespace(index=0, state="running")
    attempt.controlled = cast(Any, SimpleNamespace(entries=[entry]))
    attempt.runs, attempt.running = [cast(Any, SimpleNamespace(group=(0,)))], {0}
    piece = KvSlice(attempt.request.id, 0, 2, 0, 40, entry=entry)
    assert not moves.ready(piece)
    assert len(_told(world, ReserveKv)) == 1
    assert not _told(world, SendKv)
    moves.reserved(attempt, 2, attempt.room[2].serial)
    assert moves.ready(piece)
    moves.send(piece, 0.0)
    assert [(one.start, one.end, one.to) for one in _told(world, SendKv)] == [(0, 40, 2)]


def test_room_of_an_earlier_attempt_is_not_counted_for_a_later_one(world: DecodeWorld) -> None:
    """A word that was on its way while the request left an instance and was asked to come there again."""
    attempt, moves = world.attempt, world.moves
    moves.reserve(attempt, 1)
    moves.settled(attempt)
    moves.bring(attempt, 1, (0,), 0, 100, lambda: None)
    first, second = (message.serial for message in _told(world, ReserveKv))
    moves.reserved(attempt, 1, first)
    assert not _told(world, SendKv)
    moves.reserved(attempt, 1, second)
    assert [message.to for message in _told(world, SendKv)] == [1]


def test_a_decode_in_place_waits_for_no_reservation_elsewhere(world: DecodeWorld) -> None:
    """All of its KV is on instance 1 when instance 2 has not even answered."""
    attempt, moves = world.attempt, world.moves
    attempt.at, attempt.controlled.kv_at = None, {1}
    attempt.asked.told += [1]
    assert not moves.ready(KvSlice(attempt.request.id, 0, 2, 0, 100))
    assert moves.waiting
    late = attempt.room[2].serial
    world.stays.enter(attempt, (1,), "decode")
    assert attempt.at == 1
    assert not moves.waiting
    moves.reserved(attempt, 2, late)  # it had answered already
    moves.bring(attempt, 3, (1,), 0, 100, lambda: None)
    moves.reserved(attempt, 3, attempt.room[3].serial)
    assert [message.to for message in _told(world, SendKv)] == [3]
    assert not moves.waiting
    moves.forget(attempt)
    assert moves.under_way == 0
