"""Prompts that several instances compute: exact in every layout, with decode where the KV is."""

from __future__ import annotations

import pytest
from tests.instance.instance_world import Part, World
from tests.instance.span_answers import Expected, check_answer, check_decode_in_place, check_first_token, prompt_of

ROUTES = {
    "one": [Part(50, (0,))],
    "one, in three runs": [Part(20, (2,)), Part(1, (2,)), Part(30, (2,))],
    "two, zigzag": [Part(61, (0, 1)), Part(50, (0, 1))],
    "contiguous": [Part(41, (1, 2), "contiguous"), Part(30, (1, 2, 0), "contiguous")],
    "zigzag, growing": [Part(41, (0,)), Part(50, (0, 1)), Part(47, (0, 1, 2, 3))],
    "striped, growing": [Part(41, (3,), "striped"), Part(50, (3, 1), "striped"), Part(47, (3, 1, 0, 2), "striped")],
    "ulysses, growing": [Part(41, (0,), "ulysses"), Part(50, (0, 1), "ulysses"), Part(47, (0, 1, 2, 3), "ulysses")],
    "ulysses in two nodes": [Part(41, (0, 1, 2, 3), "ulysses", node=2), Part(3, (0, 1, 2, 3), "ulysses", node=2)],
    "megatron": [Part(41, (0, 1), "megatron", "megatron"), Part(30, (0, 1, 2), "megatron", "megatron")],
    "ring, then ulysses": [Part(41, (0, 1)), Part(30, (0, 1), "ulysses"), Part(29, (0, 1, 2, 3))],
    "pieces of one": [Part(50, (0,), rows=8), Part(31, (0,), rows=16)],
    "pieces, growing": [Part(41, (0,), rows=16), Part(50, (0, 1), rows=8), Part(67, (0, 1, 2, 3), rows=4)],
    "pieces, striped": [Part(41, (1,), "striped", rows=7), Part(71, (1, 2), "striped", rows=1)],
    "pieces, ulysses": [Part(41, (2,), "ulysses", rows=9), Part(71, (2, 3), "ulysses", rows=8)],
    "pieces, ulysses in two nodes": [Part(90, (0, 1, 2, 3), "ulysses", node=2, rows=5)],
    "pieces here and there": [Part(41, (0, 1), rows=8), Part(30, (0, 1)), Part(50, (0, 1, 3), rows=8)],
    "fewer tokens than instances": [Part(3, (0, 1, 2, 3)), Part(1, (0, 1, 2, 3)), Part(2, (0, 1, 2, 3), "striped")],
}


@pytest.mark.parametrize("name", ROUTES)
def test_the_first_token_is_that_of_one_process(world: World, expected: Expected, name: str) -> None:
    check_first_token(world, expected, name, ROUTES[name])


def test_a_stats_snapshot_precedes_span_done(world: World) -> None:
    """Else a decode is gathered where its own KV leaves no room for all of it."""
    names = [f"held-{number}" for number in range(6)]
    for count, name in enumerate(names, start=1):
        world.prefill(name, prompt_of(80), [Part(40, (0,)), Part(40, (0, 1))])
        held = [world[number].held for number in (0, 1)]
        assert held[0][name, 0] >= 40 * count, "a part of 40, and as much of each before"
        assert min(one[name, 1] for one in held) >= 40 * count
    for name in names:
        world.forget(name)
    world.clean()


@pytest.mark.parametrize("name", ["one", "one, in three runs", "pieces of one"])
def test_an_instance_decodes_the_prompt_that_it_has_computed(world: World, expected: Expected, name: str) -> None:
    parts = ROUTES[name]
    prompt = prompt_of(sum(part.tokens for part in parts), 7)
    first = world.prefill("d" + name, prompt, parts, logprobs=0, max_tokens=12)
    rest = world.decode("d" + name, prompt, first, parts[-1].group[0], logprobs=0, max_tokens=12)
    check_answer([first, *rest], *expected(prompt, 12))
    world.clean()


@pytest.mark.parametrize(("group", "attn"), [((0, 1), "ring"), ((2, 0, 1, 3), "striped"), ((1, 3), "ulysses")])
def test_a_group_decodes_over_the_kv_of_all(
    world: World, expected: Expected, group: tuple[int, ...], attn: str
) -> None:
    # With ulysses each has heads of its own, by its place.
    check_decode_in_place(world, expected, group, attn, 12, turning=attn != "ulysses")
