"""What instances were asked for counts until a snapshot shows it: no two decisions take the same room."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.router.decode_world import DecodeWorld

from headway.control.kv import KvReservations
from headway.core.request import SpanTask
from headway.runtime.engine.protocol import ReserveKv


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 99))))
def test_a_new_reservation_replaces_the_one_of_the_same_purpose(made: list[tuple[int, str, str, int]]) -> None:
    promises, last = KvReservations(), dict[tuple[int, str, str], int]()
    for number, request, what, tokens in made:
        if tokens % 5:
            promises.make(number, request, what, tokens)
            last[number, request, what] = tokens
        elif tokens % 2:
            promises.kept(number, request, what, tokens // 5)
            if (number, request, what) in last and tokens:
                last[number, request, what] = tokens // 5
        else:
            promises.forget(request, None if tokens % 4 else what)
            last = {k: n for k, n in last.items() if k[1] != request or (not tokens % 4 and k[2] != what)}
        for each in range(3):
            assert promises.on(each) == sum(n for k, n in last.items() if k[0] == each)


def test_reserved_room_is_not_given_to_others_before_a_snapshot_shows_it() -> None:
    world = DecodeWorld(500, 500)
    moves, registry, attempt = world.moves, world.registry, world.attempt
    moves.reserve(attempt, 0)
    ((_, asked),) = registry.take(ReserveKv)
    assert registry.kv.room(0) == 500 - asked.tokens
    assert registry.kv.free(0) == 500
    assert registry.kv.roomiest((0, 1)) == 1
    registry[0].stats.kv_tokens_used = asked.tokens
    moves.reserved(attempt, 0, asked.serial)
    assert registry.kv.room(0) == 500 - asked.tokens, "once"
    moves.settled(attempt)
    assert registry.kv.on(0) == 0


def test_a_shrinking_group_reserves_room_until_its_token_arrives() -> None:
    world = DecodeWorld(500, 500, 500)
    attempt, registry = world.attempt, world.registry
    attempt.runs, attempt.spread, attempt.admitted = [SpanTask(0, 100, (0, 1, 2))], (0, 1, 2), {0, 1, 2}
    world.stays.enter(attempt, (0, 1, 2), "decode")
    world.wants(0, 1)
    assert world.token()[0].run.keepers == (0, 1)
    assert registry.kv.room(0) == registry.kv.room(1) < 500 - attempt.kv_tokens // 2
    assert registry.kv.room(2) == 500
    assert world.token()[0].run.keepers == ()
    assert [registry.kv.on(number) for number in range(3)] == [0] * 3


def test_a_decode_without_room_is_gathered_when_blocks_are_free() -> None:
    world = DecodeWorld(500, 500, in_place=False)
    attempt, registry = world.attempt, world.registry
    attempt.runs, attempt.spread, attempt.admitted = [SpanTask(0, 100, (0, 1))], (0, 1), {0, 1}
    for number in (0, 1):
        registry.kv.make(number, "another", "move", 400)
    world.stays.enter(attempt, (0, 1), "decode")
    assert world.token()[0].run.group == (0, 1), "another's KV is on its way to either"
    registry.kv.forget("another")
    assert world.token() == []
    assert attempt.gathers
    ((to, asked),) = [(number, message) for number, message in registry.told if isinstance(message, ReserveKv)]
    assert (to, asked.tokens) == (0, attempt.kv_tokens)
