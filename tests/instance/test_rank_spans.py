"""Runs of instances that are two processes each: exact in every layout, paused, handed over, and lost."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.instance_world import Part, World, runs
from tests.instance.span_answers import (
    GREEDY,
    LAYERS,
    SOON_S,
    Expected,
    check_answer,
    check_decode_in_place,
    check_drawn_token,
    check_end,
    check_first_token,
    check_forgotten,
    check_service,
    pause_at_once,
    pauses_of,
    prompt_of,
    resume_span,
    start_on_some,
)

from headway.core.request import SamplingParams, cut
from headway.runtime.engine.protocol import (
    AbortRequest,
    KvArrived,
    ReserveKv,
    SendKv,
    SpanTaskDone,
    SpanTaskLost,
)

ONE = 3
"""The instance of one process; the others are of two."""


pytestmark = pytest.mark.xdist_group("rank spans")
"""All of them on one worker: they share `world`."""


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> Iterator[World]:
    """What a test kills it brings back."""
    own = [{"tensor_parallel_size": size} for size in (2, 2, 2, 1)]
    made = World(checkpoint, 4, own, kv_cache_bytes=1 << 21)
    yield made
    made.close()


ROUTES = {
    "one": [Part(50, (0,))],
    "one, in three runs": [Part(20, (2,)), Part(1, (2,)), Part(30, (2,))],
    "two": [Part(61, (0, 1)), Part(50, (0, 1))],
    "two, striped, the other way round": [Part(61, (2, 1), "striped")],
    "growing": [Part(41, (0,)), Part(50, (0, 1)), Part(47, (2, 0, 1))],
    "in pieces, growing": [Part(41, (0,), rows=16), Part(50, (0, 1), rows=8), Part(67, (0, 1, 2), rows=4)],
    "gathered weights": [Part(41, (0, 1), "ring", "ulysses"), Part(30, (0, 1), "megatron", "megatron")],
    "two nodes": [Part(64, (0, 1), node=1)],
    "fewer tokens than ranks": [Part(3, (0, 1, 2)), Part(1, (0, 1, 2)), Part(2, (0, 1, 2), "striped")],
}


@pytest.mark.parametrize("name", ROUTES)
def test_the_first_token_is_that_of_one_process(world: World, expected: Expected, name: str) -> None:
    check_first_token(world, expected, name, ROUTES[name])


@pytest.mark.parametrize("name", ["one, in three runs", "one"])
def test_an_instance_decodes_the_prompt_that_it_has_computed(world: World, expected: Expected, name: str) -> None:
    """Others are computed between, so that plans go on under way."""
    parts, prompt = ROUTES[name], prompt_of(sum(part.tokens for part in ROUTES[name]), 7)
    on = parts[-1].group[0]
    first = world.prefill("d" + name, prompt, parts, logprobs=0, max_tokens=12)
    world.ask(on, "beside " + name, prompt_of(100, 8), max_tokens=8, logprobs=0)
    rest = world.decode("d" + name, prompt, first, on, logprobs=0, max_tokens=12)
    check_answer([first, *rest], *expected(prompt, 12))
    check_answer(world[on].answer("beside " + name), *expected(prompt_of(100, 8), 8))
    world.clean()


def hand_over(world: World, name: str, prompt: list[int], parts: Sequence[Part], to: int, when: str) -> SpanTaskDone:
    """All runs of a prompt, whose KV goes on: as it is computed, or all at the end."""
    everybody = sorted({number for part in parts for number in part.group})
    world[to].tell(ReserveKv(name, len(prompt)))
    world[to].wait(ReserveKv, name)
    world.admit(name, prompt, everybody, SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0, max_tokens=6))
    edges = [(run.start, run.end, run.group) for run in runs(parts)]
    sent = 0
    for index, part in enumerate(parts):
        if when == "before":
            sent += send(world, name, index, edges[index], to)
        world.compute(name, parts, index)
        if when == "meanwhile":
            sent += send(world, name, index, edges[index], to)
        word = world.done(name, part)
    if when == "behind":
        sent = send(world, name, 9, (0, len(prompt), parts[-1].group), to)
    for _ in range(sent):
        world[to].wait(KvArrived, name)
    return word


def send(world: World, name: str, piece: int, edge: tuple[int, int, tuple[int, ...]], to: int) -> int:
    start, end, group = edge
    for source in group:
        world[source].tell(SendKv(id=name, piece=piece, start=start, end=end, to=to))
    return len(group)


HANDED = {
    "one": [Part(40, (1,)), Part(35, (1,))],
    "growing": [Part(60, (0,)), Part(70, (0, 1))],
    "in pieces": [Part(61, (1,), "striped", rows=16), Part(70, (1, 0), "striped", rows=8), Part(30, (1, 0), rows=5)],
}


@pytest.mark.parametrize("when", ["before", "meanwhile", "behind"])
@pytest.mark.parametrize(("name", "to"), [("one", 2), ("growing", ONE), ("in pieces", 2), ("in pieces", 1)])
def test_kv_of_a_group_goes_to_instances_of_any_size(
    world: World, expected: Expected, name: str, to: int, when: str
) -> None:
    """To another of two processes, to one of one, and to one of the group itself."""
    parts, request = HANDED[name], f"{name} to {to} {when}"
    prompt = prompt_of(sum(part.tokens for part in parts), len(request))
    word = hand_over(world, request, prompt, parts, to, when)
    assert word.delta is not None
    rest = world.decode(request, prompt, word.delta, to, logprobs=0, max_tokens=6)
    check_answer([word.delta, *rest], *expected(prompt, 6))
    world.forget(request)
    world.clean()


def test_an_instance_of_one_process_transfers_kv_to_one_of_two(world: World, expected: Expected) -> None:
    parts = [Part(40, (ONE,)), Part(35, (ONE,), rows=8)]
    word = hand_over(world, "up", prompt_of(75), parts, 0, "meanwhile")
    assert word.delta is not None
    rest = world.decode("up", prompt_of(75), word.delta, 0, logprobs=0, max_tokens=6)
    check_answer([word.delta, *rest], *expected(prompt_of(75), 6))
    world.forget("up")
    world.clean()


@pytest.mark.parametrize("group", [(0,), (1, 0, 2)])
def test_a_span_pauses_at_layers_of_its_pieces(world: World, expected: Expected, group: tuple[int, ...]) -> None:
    """Another prompt is computed by the group, and one by a scheduler, in each pause."""
    parts = [Part(21, group[:1], rows=8), Part(50, group, rows=-(-16 // len(group)))]
    prompt, name = prompt_of(71, 2), f"p{len(group)}"
    pieces = cut(21, 71, len(group), parts[1].rows)
    pause_at_once(world, name, prompt, parts)
    stops = [(start, layer) for start, _ in pieces for layer in range(LAYERS)]
    at = pauses = 0
    while (words := pauses_of(world, name, parts[1])) is not None:
        pauses += 1
        at = next(i for i, stop in enumerate(stops) if stop == words[0][:2] and i > at)
        assert {word[:2] for word in words} == {stops[at]}
        assert sum(word[4] for word in words) == 71 * LAYERS * 2 * 2 * 8 * 4
        if pauses % 3 == 1:
            world.ask(group[-1], f"{name}-s{at}", prompt_of(40, at), max_tokens=3, logprobs=0)
            first = world.prefill(f"{name}-{at}", prompt_of(20 + at, at), [Part(20 + at, group[::-1])], logprobs=0)
            check_answer([first], *expected(prompt_of(20 + at, at), 1))
            check_answer(world[group[-1]].answer(f"{name}-s{at}"), *expected(prompt_of(40, at), 3))
            world.forget(f"{name}-{at}")
        resume_span(world, name, parts[1], True)
    assert pauses > len(stops) // 3, "a pause may come layers late; it is said in time to many"
    check_end(world, expected, name, parts[1], prompt)


@pytest.mark.parametrize("beside", [True, False])
def test_schedulers_continue_during_a_span_where_that_is_allowed(
    world: World, expected: Expected, beside: bool
) -> None:
    prompt, part, name = prompt_of(600, 3), Part(600, (0, 1), rows=16), f"b{beside}"
    world.admit(name, prompt, part.group, GREEDY)
    world.ask(0, f"s{beside}", prompt_of(30), max_tokens=60)
    world[0].until(lambda: world[0].deltas.get(f"s{beside}"))
    world.compute(name, [part], 0, beside=beside)
    word = world.done(name, part)
    told = world[0].answer(f"s{beside}")
    during = [delta for delta in told if word.began_s < delta.emitted_s < word.ended_s]
    assert len(during) > 10 if beside else len(during) < 3  # one may have been under way
    assert [t for delta in told for t in delta.tokens] == expected(prompt_of(30), 60)[0]
    assert word.delta is not None
    check_answer([word.delta], *expected(prompt, 1))
    world.forget(name)
    world.clean()


@pytest.mark.parametrize("attn", ["ring", "striped"])
def test_a_group_decodes_over_the_kv_of_all(world: World, expected: Expected, attn: str) -> None:
    check_decode_in_place(world, expected, (0, 2, 1), attn, 8, turning=True)


def test_the_first_token_is_drawn_as_a_scheduler_draws_it(world: World) -> None:
    how = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.2, "max_tokens": 4}
    check_drawn_token(world, "draws", ONE, how)


# -- what ends otherwise ----------------------------------------------------------------------------------------------


def test_a_forgotten_span_ends_at_once(world: World, expected: Expected) -> None:
    check_forgotten(world, expected)
    start_on_some(world, "f3", Part(60, (0, 1)), (0,))
    with world[0].at_once():  # ranks hear of the next one together with the end of this one
        world[0].tell(AbortRequest("f3"))
        world.admit("f4", prompt_of(60), (0, 2), GREEDY)
        world.compute("f4", [Part(60, (0, 2))], 0)
    check_end(world, expected, "f4", Part(60, (0, 2)), prompt_of(60), clean=False)
    assert not [word for one in world.instances for word in one.said if isinstance(word, SpanTaskLost)]
    world.clear()


def test_a_span_waiting_for_room_continues_or_is_forgotten(world: World, expected: Expected) -> None:
    """The scheduler goes on meanwhile."""
    info = world[1].info
    assert info is not None
    most = info.kv_tokens_total - 100
    world[1].tell(ReserveKv("full", most))
    world.admit("full", prompt_of(40), (1,), GREEDY)
    world[1].tell(ReserveKv("full", most))
    world[1].wait(ReserveKv, "full")
    for name in ("w1", "w2"):
        world.admit(name, prompt_of(200), (0, 1), GREEDY)
        world.compute(name, [Part(200, (0, 1))], 0)
    world.ask(1, "ws", prompt_of(30), max_tokens=5)
    assert [t for delta in world[1].answer("ws") for t in delta.tokens] == expected(prompt_of(30), 5)[0]
    world.forget("w1")
    world[1].tell(AbortRequest("full"))
    check_end(world, expected, "w2", Part(200, (0, 1)), prompt_of(200), clean=False)
    world.clear()


def test_a_group_of_unequal_sizes_is_refused(world: World) -> None:
    world.admit("mixed", prompt_of(40), (0, ONE), GREEDY)
    world.compute("mixed", [Part(40, (0, ONE))], 0)
    assert "instance 3 is 1 processes, and this one is 2" in world[0].wait(SpanTaskLost, "mixed", SOON_S).why
    assert "instance 0 is 2 processes, and this one is 1" in world[ONE].wait(SpanTaskLost, "mixed", SOON_S).why
    world.forget("mixed")
    world.clean()


@pytest.mark.long
@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_lost_rank_ends_its_instance_and_the_span(
    world: World, expected: Expected, rank: int, how: signal.Signals
) -> None:
    name = f"k{rank}"
    start_on_some(world, name, Part(60, (0, 1, 2)), (0, 1))
    os.kill(world.rank_pids(1)[rank], how)
    world[1].process.join(10.0)
    assert not world[1].process.is_alive()
    if how == signal.SIGSTOP:
        world.meet(without=(1,))
    assert "instance 1" in world[0].wait(SpanTaskLost, name, 3.0).why
    world.forget(name)
    check_service(world, expected, name, (0, 2))
    world.again(1)
    check_service(world, expected, name + "again", (0, 1, 2))
    world.clear()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_random_spans_pauses_and_forgotten_requests_at_once(world: World, expected: Expected, seed: int) -> None:
    """Runs of overlapping groups, pauses, chats beside them, and requests that are forgotten in the midst."""
    chance = random.Random(seed)
    alive: dict[str, tuple[list[int], Part]] = {}
    for turn in range(20):
        name, group = f"c{seed}-{turn}", tuple(chance.sample(range(3), chance.randint(1, 3)))
        prompt = prompt_of(chance.randint(20, 160), chance.randrange(4))
        part = Part(len(prompt), group, chance.choice(["ring", "striped"]), rows=chance.choice([0, 4, 16]))
        world.admit(name, prompt, group, GREEDY)
        world.compute(name, [part], 0, preemptible=True, beside=chance.random() < 0.5)
        alive[name] = (prompt, part)
        if chance.random() < 0.3:
            let_arrive(0.02 * chance.random())
            for number in chance.sample(group, len(group)):
                world[number].tell(AbortRequest(name))
            del alive[name]
        elif chance.random() < 0.5:
            on = chance.randrange(3)
            world.ask(on, f"{name}-s", prompt_of(30), max_tokens=4)
            assert [t for d in world[on].answer(f"{name}-s") for t in d.tokens] == expected(prompt_of(30), 4)[0]
        if len(alive) > 2:
            settle(world, expected, alive)
    settle(world, expected, alive)
    for one in world.instances:
        assert not [word for word in one.said if isinstance(word, SpanTaskLost)]
        one.said.clear()
    world.clean()


def settle(world: World, expected: Expected, alive: dict[str, tuple[list[int], Part]]) -> None:
    for name, (prompt, part) in alive.items():
        check_end(world, expected, name, part, prompt, clean=False)
    alive.clear()
