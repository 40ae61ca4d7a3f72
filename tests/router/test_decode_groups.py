"""Decodes that a policy pauses, moves, or gives another group while they decode."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from tests.helpers.polling import eventually
from tests.router.cluster_clients import ask, prompt, running
from tests.router.decode_world import DecodeWorld
from tests.router.fake_instances import FakeCluster, answer

from headway.control.entries import KvSlice
from headway.core.request import SpanTask, Strategy
from headway.runtime.engine.protocol import AbortRequest, ComputeSpan, OutputDelta, PauseRequest, ReserveKv, SendKv


def test_a_group_grows_without_moving_anything_and_shrinks_with_a_token() -> None:
    world = DecodeWorld(500, 500, 900, 500)
    attempt = world.attempt
    attempt.runs, attempt.spread, attempt.admitted = [SpanTask(0, 100, (0, 1))], (0, 1), {0, 1}
    world.stays.enter(attempt, (0, 1), "decode")
    world.token()
    world.token()
    world.wants(0, 1, 2)
    grown = world.token()[0]
    assert (grown.run.group, grown.run.keepers) == ((2, 0, 1), ()), "who joins gets what is decoded from now on"
    assert grown.before == (SpanTask(0, 100, (0, 1)), SpanTask(100, 103, (0, 1), grown.run.strategy, in_place=True))
    assert len(grown.drawn) == attempt.said
    world.wants(1, 2)
    shrunk = world.token()[0]
    assert (shrunk.run.group, shrunk.run.keepers, shrunk.before) == ((2, 0, 1), (1, 2), ())
    assert attempt.spread == (0, 1, 2)
    follows = world.token()[0]
    assert (follows.run.group, attempt.spread) == ((2, 1), (1, 2))
    assert world.registry.take(AbortRequest) == [(0, AbortRequest(attempt.wire, for_good=False))]
    assert attempt.admitted == {1, 2}
    assert attempt.left == {0}
    assert (world.steps.grown, world.steps.shrunk) == (1, 1)


def test_a_group_shrinks_when_the_remaining_instances_have_room() -> None:
    world = DecodeWorld(500, 500, 500)
    attempt = world.attempt
    attempt.runs, attempt.spread, attempt.admitted = [SpanTask(0, 100, (0, 1, 2))], (0, 1, 2), {0, 1, 2}
    world.stays.enter(attempt, (0, 1, 2), "decode")
    cast(Any, world.registry[1].stats).kv_tokens_used = 400
    world.wants(0, 1)
    for _ in range(2):
        waits = world.token()[0].run
        assert (waits.keepers, attempt.spread) == ((), (0, 1, 2)), "50 tokens and some more do not fit instance 1"
    cast(Any, world.registry[1].stats).kv_tokens_used = 300
    assert world.token()[0].run.keepers == (0, 1)
    assert world.token()[0].run.keepers == ()
    assert (attempt.spread, world.steps.shrunk) == ((0, 1), 1)


def test_a_master_without_room_is_replaced_by_the_instance_with_most_free_tokens() -> None:
    world = DecodeWorld(500, 500)
    attempt = world.attempt
    attempt.runs, attempt.spread = [SpanTask(0, 100, (0, 1))], (0, 1)
    world.stays.enter(attempt, (0, 1), "decode")
    assert world.token()[0].run.group == (0, 1)
    cast(Any, world.registry[0].stats).kv_tokens_used = 470
    assert world.token()[0].run.group == (1, 0)
    assert world.token()[0].run.group == (1, 0)


def _by_heads(*rooms: int, in_place: bool = True) -> DecodeWorld:
    """A decode whose prompt has left KV cut by heads on instances 2 and 0: Ulysses."""
    world = DecodeWorld(*rooms, in_place=in_place)
    attempt = world.attempt
    attempt.runs = [SpanTask(0, 60, (2,)), SpanTask(60, 100, (2, 0), Strategy("ulysses"), rows=8)]
    attempt.spread, attempt.admitted = (2, 0), {0, 2}
    world.stays.enter(attempt, (0, 2), "decode")
    return world


@pytest.mark.parametrize("in_place", [True, False])
def test_a_group_decodes_in_place_over_kv_cut_by_heads(in_place: bool) -> None:
    world = _by_heads(140, 500, 110, in_place=in_place)
    for _ in range(3):
        assert world.token()[0].run.group == (2, 0), "whose heads are whose is said by the order"
        run = world.attempt.token
        assert run is not None
        assert (run.strategy, run.in_place, run.keepers) == (Strategy("ulysses"), True, ())
    assert world.attempt.spread == (0, 2)
    assert world.attempt.steps[2:] == [SpanTask(100, 103, (2, 0), Strategy("ulysses"), in_place=True)]


def test_kv_by_heads_is_laid_out_by_tokens_when_a_group_grows_and_there_is_room() -> None:
    world = _by_heads(500, 500, 90)
    attempt = world.attempt
    world.wants(0, 1, 2)
    waits = world.token()[0]
    assert (waits.run.group, waits.run.strategy.attn, attempt.running) == ((2, 0), "ulysses", {0, 2})
    assert attempt.places() == {0, 2}, "instance 1 has no part in it yet"
    cast(Any, world.registry[2].info).kv_tokens_total = 100
    grown = world.token()[0]
    assert (grown.run.group, grown.run.strategy.attn, grown.run.keepers) == ((1, 0, 2), "ring", ())
    assert grown.before == (*attempt.runs, SpanTask(100, 102, (2, 0), Strategy("ulysses"), in_place=True))
    assert [(run.group, run.strategy.attn) for run in (world.token()[0].run, world.token()[0].run)] == [
        ((1, 0, 2), "ring")
    ] * 2
    assert attempt.steps[-1] == SpanTask(102, 104, (1, 0, 2), Strategy("ring"), in_place=True)
    assert (world.steps.grown, world.steps.shrunk) == (1, 0)


def test_kv_by_heads_of_a_shrinking_group_moves_to_the_remaining_instances() -> None:
    world = _by_heads(500, 500, 500)
    attempt = world.attempt
    world.wants(1, 2)
    first = world.token()[0]
    assert (first.run.group, first.run.keepers, first.run.strategy.attn) == ((1, 0, 2), (1, 2), "ring")
    assert world.token()[0].run.group == (1, 2)
    assert world.registry.take(AbortRequest) == [(0, AbortRequest(attempt.wire, for_good=False))]


def test_kv_by_heads_leaves_an_instance_that_is_full() -> None:
    world = _by_heads(400, 500, 300)
    cast(Any, world.registry[2].stats).kv_tokens_used = 240
    run = world.token()[0].run
    assert (run.group, run.keepers, run.strategy.attn) == ((0, 2), (0,), "ring")
    assert world.token()[0].run.group == (0, 2)
    world = _by_heads(120, 500, 300)
    cast(Any, world.registry[2].stats).kv_tokens_used = 240
    assert world.token()[0].run.strategy.attn == "ulysses", "nobody has room for all of it"


def test_a_group_of_one_gathers_where_all_kv_fits() -> None:
    world = DecodeWorld(500, 100)
    attempt = world.attempt
    attempt.runs, attempt.spread = [SpanTask(0, 100, (0, 1))], (0, 1)
    world.stays.enter(attempt, (1,), "decode")
    assert attempt.step is not None, "instance 1 has no room for all of it"
    world.wants(0)
    world.token()
    assert attempt.gathers
    assert world.registry.take(ReserveKv) == [(0, ReserveKv(attempt.wire, 101, list(attempt.room.values())[-1].serial))]


def test_a_decode_leaves_its_scheduler_to_continue_on_a_group() -> None:
    world = DecodeWorld(500, 500)
    attempt = world.attempt
    attempt.at, attempt.whole, attempt.wanted = 1, {1}, (1,)
    world.wants(1)
    assert not world.registry.take(PauseRequest), "it is where it is wanted"
    world.wants(0, 1)
    world.wants(0, 1)
    assert world.registry.take(PauseRequest) == [(1, PauseRequest(attempt.wire))]
    attempt.asked.told += [7, 7]
    world.stays.staged(attempt, 1)
    message = next(message for _, message in world.registry.told if isinstance(message, ComputeSpan))
    assert (message.run.start, message.run.group) == (102, (0, 1))
    assert (message.home, message.before) == (1, (SpanTask(0, 102, (1,)),))
    assert world.token()[0].home is None


def test_a_migrated_decode_stops_first_and_all_its_kv_is_sent() -> None:
    world = DecodeWorld(500, 500)
    attempt = world.attempt
    attempt.at, attempt.whole, attempt.wanted = 0, {0}, (0,)
    world.stays.leave(attempt)
    known = attempt.request.prompt_tokens + attempt.said
    world.moves.announced(attempt.controlled, 1, 0.0)
    piece = KvSlice(attempt.request.id, 0, 1, 0, known)
    assert not world.moves.ready(piece), "it goes on until it has stopped"
    world.stays.pump()
    assert [type(message) for _, message in world.registry.told] == [PauseRequest]
    attempt.asked.told += [7, 7, 7]
    world.stays.staged(attempt, 0)
    assert not world.moves.ready(piece)
    world.moves.reserved(attempt, 1, attempt.room[1].serial)
    assert world.moves.ready(piece)
    world.moves.send(piece, 0.0)
    (room,) = [message for _, message in world.registry.told if isinstance(message, ReserveKv)]
    ((source, send),) = world.registry.take(SendKv)
    assert (room.tokens, source, send.end) == (103, 0, 103)
    attempt.moving[send.piece].then()
    assert len(world.sent) == 1
    attempt.controlled.kv_at = {1}
    world.stays.enter(attempt, (1,), "decode")
    assert attempt.at == 1
    assert world.registry.take(AbortRequest) == [(0, AbortRequest(attempt.wire, for_good=False))]


def test_a_decode_that_ended_while_it_was_to_stop_has_nothing_to_send() -> None:
    world = DecodeWorld(500, 500)
    attempt = world.attempt
    attempt.at, attempt.whole, attempt.wanted = 0, {0}, (0,)
    world.stays.leave(attempt)
    piece = KvSlice(attempt.request.id, 0, 1, 0, 101)
    assert not world.moves.ready(piece)
    attempt.finished = True
    assert world.moves.ready(piece)
    world.moves.send(piece, 0.0)
    assert len(world.sent) == 1
    assert not world.registry.take(SendKv)


def test_a_prefill_that_moves_reserves_room_under_its_new_id() -> None:
    world = DecodeWorld(500, 500, 500)
    attempt = world.attempt
    attempt.asked.told.clear()
    attempt.controlled.phase = "prefill"
    world.stays.enter(attempt, (0,), "prefill")
    world.moves.reserve(attempt, 2)
    world.moves.reserved(attempt, 2, attempt.room[2].serial)
    before = attempt.wire
    world.stays.leave(attempt)
    world.stays.enter(attempt, (1,), "prefill")
    world.registry.take(AbortRequest)
    world.moves.reserve(attempt, 2)
    assert attempt.wire != before
    assert world.registry.take(ReserveKv) == [(2, ReserveKv(attempt.wire, 100, list(attempt.room.values())[-1].serial))]
    assert not attempt.room[2].granted, "what was kept under the old name is not there any more"


async def test_a_decode_restarts_when_its_instance_lacks_some_of_its_kv() -> None:
    fake = FakeCluster(run_s=0.002, token_s=0.002)
    async with running(fake, ("prefill", "decode"), "tetris", {"sizes": [1]}) as client:
        asked = asyncio.create_task(ask(client, "r", prompt(1, 60), 20))
        await eventually(lambda: fake.processes[1].scheduled)
        (name,) = fake.processes[1].scheduled
        fake.processes[1]._leave(name)
        fake.processes[1]._delta(
            OutputDelta(id=name, finish="error", error="KV of it has not all come", rejected="invalid", param="id")
        )
        assert await asyncio.wait_for(asked, 20) == answer(prompt(1, 60), 20)


async def test_answers_are_unchanged_when_groups_grow_during_decode() -> None:
    fake = FakeCluster(run_s=0.002, token_s=0.001, send_s=0.0005)
    async with running(fake, ("mixed",) * 3, "loongserve", {"decode_batch": 1}, True) as client:
        prompts = [prompt(seed, length) for seed, length in enumerate((60, 40, 300, 20, 90, 50))]
        asks = [asyncio.create_task(ask(client, f"r{i}", ids, 60)) for i, ids in enumerate(prompts)]
        answers = await asyncio.wait_for(asyncio.gather(*asks), 20)
        assert answers == [answer(ids, 60) for ids in prompts]
        report = client.report()
        assert report.decodes_moved
        assert report.groups_grown
        assert any(message.home is not None for message in fake.said(ComputeSpan))
