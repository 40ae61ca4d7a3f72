"""Spans behind a cached prefix of one instance: copied from its cache, exact, and computed or lost where evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.instance.instance_world import Part, World, runs
from tests.instance.span_answers import GREEDY, Expected, check_answer, prompt_of

from headway.runtime.engine.protocol import ComputeSpan, EngineStats, OutputDelta, SpanTaskLost

BLOCK = 8
CACHED = 40


@pytest.fixture(scope="module")
def caches(checkpoint: Path) -> Iterator[World]:
    world = World(checkpoint, 3, kv_cache_bytes=1 << 18, prefix_cache=True)
    yield world
    world.close()


@pytest.fixture(scope="module")
def rank_caches(checkpoint: Path) -> Iterator[World]:
    world = World(checkpoint, 2, kv_cache_bytes=1 << 18, prefix_cache=True, tensor_parallel_size=2)
    yield world
    world.close()


def cache(world: World, name: str, prompt: Sequence[int]) -> None:
    """Let instance 1 cache a prompt's first tokens."""
    world.ask(1, name, prompt[:CACHED], max_tokens=2)
    world[1].answer(name)


def begin(world: World, name: str, prompt: Sequence[int], parts: Sequence[Part]) -> None:
    """Begin the first of the parts behind what instance 1 has cached; `parts[0]` stands for that."""
    everybody = sorted({number for part in parts for number in part.group})
    world.admit(name, prompt, everybody, GREEDY, prefix_cache=True)
    tasks = runs(parts)
    for number in parts[1].group:
        world[number].tell(
            ComputeSpan(id=name, index=0, run=tasks[1], before=(tasks[0],), last=len(parts) == 2, cached=True)
        )


def prefill(world: World, name: str, prompt: Sequence[int], parts: Sequence[Part]) -> tuple[OutputDelta, int]:
    """Return the first token, and the tokens that came from the cache."""
    begin(world, name, prompt, parts)
    done = world.done(name, parts[1])
    cached = done.cached_tokens
    assert (done.saved_s > 0) == (cached > 0)
    for index in range(2, len(parts)):
        world.compute(name, parts, index)
        done = world.done(name, parts[index])
    assert done.delta is not None
    return done.delta, cached


def hits(world: World) -> tuple[int, int]:
    """Return queried and hit tokens of instance 1."""
    world.ask(1, "stats", [5, 6, 7], max_tokens=1)
    world[1].answer("stats")
    del world[1].deltas["stats"]
    # The newest snapshot may be from before the question, where one turn computed all of it; the next one is not.
    world[1].stats = EngineStats()
    world[1].until(lambda: world[1].stats.kv_tokens_total or None)
    return world[1].stats.prefix_queries_total, world[1].stats.prefix_hits_total


HERE = Part(CACHED, (1,))
ROUTES = {
    "one": [HERE, Part(31, (1,))],
    "one, in pieces": [HERE, Part(31, (1,), rows=7)],
    "growing": [HERE, Part(21, (1,)), Part(30, (1, 2)), Part(30, (1, 2, 0))],
    "several at once": [HERE, Part(41, (0, 1, 2))],
    "ulysses": [HERE, Part(41, (1, 0), "ulysses")],
    "less than a block is new": [HERE, Part(2, (1, 2))],
}


@pytest.mark.parametrize("name", ROUTES)
def test_tokens_behind_a_cached_prefix_are_those_of_one_process(caches: World, expected: Expected, name: str) -> None:
    parts = ROUTES[name]
    prompt = prompt_of(sum(part.tokens for part in parts), len(name))
    cache(caches, f"{name}-a", prompt)
    queried, hit = hits(caches)
    for turn in ("b", "c"):
        # Twice: the first has written its own KV behind a copy, and left what is cached as it was.
        first, cached = prefill(caches, f"{name}-{turn}", prompt, parts)
        check_answer([first], *expected(prompt, 1))
        assert cached == CACHED
        caches.forget(f"{name}-{turn}")
    more = hits(caches)
    assert (more[0] - queried - 3, more[1] - hit) == (2 * len(prompt), 2 * CACHED)
    caches.clean()


def test_ranks_of_an_instance_copy_their_heads(rank_caches: World, expected: Expected) -> None:
    prompt = prompt_of(CACHED + 50, 3)
    cache(rank_caches, "ranks-a", prompt)
    first, cached = prefill(rank_caches, "ranks-b", prompt, [HERE, Part(21, (1,)), Part(29, (1, 0))])
    check_answer([first], *expected(prompt, 1))
    assert cached == CACHED
    rank_caches.forget("ranks-b")
    rank_caches.clean()


def test_an_answer_goes_on_where_its_prefix_was_cached(caches: World, expected: Expected) -> None:
    prompt = prompt_of(CACHED + 33, 11)
    cache(caches, "whole-a", prompt)
    first, _ = prefill(caches, "whole-b", prompt, [HERE, Part(33, (1,))])
    rest = caches.decode("whole-b", prompt, first, 1, logprobs=0, max_tokens=9)
    check_answer([first, *rest], *expected(prompt, 9))
    caches.clean()


def test_a_prefix_that_the_pool_cannot_hold_twice_is_not_used(caches: World, expected: Expected) -> None:
    tokens = 400
    prompt = prompt_of(tokens + 31, 14)
    caches.ask(1, "large-a", prompt[:tokens], max_tokens=1)
    caches[1].answer("large-a")
    assert 2 * tokens > caches[1].stats.kv_tokens_total
    held = Part(tokens, (1,))
    first, cached = prefill(caches, "large-b", prompt, [held, Part(31, (1,))])
    check_answer([first], *expected(prompt, 1))
    assert cached == 0
    caches.forget("large-b")
    caches.ask(1, "large-c", prompt[:tokens], max_tokens=1)
    caches[1].answer("large-c")
    begin(caches, "large-d", prompt, [held, Part(31, (1, 2))])
    assert "no room" in caches[1].wait(SpanTaskLost, "large-d").why
    caches.forget("large-d")
    caches.clean()


def test_evicted_tokens_are_computed_by_a_group_of_one_and_lost_with_several(caches: World, expected: Expected) -> None:
    prompt = prompt_of(CACHED + 31, 12)
    cache(caches, "gone-a", prompt[: CACHED // 2])  # two blocks of the five
    first, cached = prefill(caches, "gone-b", prompt, [HERE, Part(31, (1,))])
    check_answer([first], *expected(prompt, 1))
    assert cached == CACHED // 2 // BLOCK * BLOCK
    begin(caches, "gone-c", prompt, [HERE, Part(31, (1, 2))])
    lost = caches[1].wait(SpanTaskLost, "gone-c")
    assert lost.why == f"{CACHED - cached} of {CACHED} cached tokens are gone, or no room is beside them"
    assert lost.by is None
    caches.forget("gone-b")
    caches.forget("gone-c")
    caches.clean()
    # Nothing at all is cached: all of it is computed.
    other = prompt_of(CACHED + 31, 13)
    first, cached = prefill(caches, "gone-d", other, [HERE, Part(31, (1,))])
    check_answer([first], *expected(other, 1))
    assert cached == 0
    caches.forget("gone-d")
    caches.clean()


@pytest.mark.parametrize(
    ("fields", "hit"), [({"prefix_cache": True}, 64), ({}, 0), ({"prefix_cache": True, "cache_salt": "a"}, 0)]
)
def test_a_prompt_in_spans_of_one_instance_leaves_its_blocks(
    caches: World, expected: Expected, fields: dict[str, object], hit: int
) -> None:
    name, prompt = f"left-{len(fields)}-{hit}", prompt_of(70, 20 + len(fields) + hit)
    parts = [Part(40, (1,)), Part(30, (1,))]
    caches.admit(name, prompt, (1,), GREEDY, **fields)
    for index, part in enumerate(parts):
        caches.compute(name, parts, index)
        caches.done(name, part)
    caches.forget(name)
    caches.ask(1, f"{name}-b", prompt, max_tokens=3, logprobs=0)
    answer = caches[1].answer(f"{name}-b")
    check_answer(answer, *expected(prompt, 3))
    assert answer[0].cached_tokens == hit
    caches.clean()
