"""Hand-over between any numbers of ranks, as threads: answers are those of one engine, whatever plan gets lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.helpers.hand_overs import prompt_of
from tests.helpers.virtual_instances import Pair, VirtualInstance

from headway.runtime.engine.protocol import AbortRequest, SpanTaskLost

Expected = Callable[[list[int], int], tuple[list[int], list[float]]]
Make = Callable[[int, int], Pair]


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Iterator[Make]:
    made: list[Pair] = []

    def make(sources: int, targets: int) -> Pair:
        source, target = (
            VirtualInstance(number, checkpoint, tmp_path, tp, max_num_batched_tokens=24)
            for number, tp in enumerate((sources, targets))
        )
        made.append(Pair(source, target))
        return made[0]

    yield make
    for pair in made:
        pair.close()


@pytest.mark.parametrize(("sources", "targets"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2), (8, 4), (4, 1), (1, 8)])
def test_answers_are_those_of_one_engine(make: Make, expected: Expected, sources: int, targets: int) -> None:
    """Two KV heads: from four ranks on a head is had several times."""
    pair = make(sources, targets)
    for seed, tokens in enumerate((97, 5, 130)):
        prompt = prompt_of(tokens, seed)
        edges = [(0, tokens // 3), (tokens // 3, tokens)]
        assert pair.hand_over(f"r{seed}", prompt, 7, edges) == expected(prompt, 7)[0]
    pair.empty()


def test_a_request_is_decoded_where_it_was_staged(make: Make, expected: Expected) -> None:
    """Under the number that its blocks have, which plans that are under way say to forget."""
    pair = make(2, 1)
    prompt, other = prompt_of(60), prompt_of(200, 1)
    pair.source.submit("home", prompt, 6, "prefill")
    pair.until(lambda: pair.source.words)
    first = tuple(pair.source.tokens("home"))
    pair.source.submit("other", other, 4, "all")
    pair.source.turn()
    pair.source.submit("home", prompt, 6, "decode", first)
    pair.until(lambda: pair.source.core.idle)
    assert pair.source.tokens("home") == expected(prompt, 6)[0]
    assert pair.source.tokens("other") == expected(other, 4)[0]
    pair.empty()


def test_received_kv_can_be_sent_on_to_a_third_instance(
    make: Make, expected: Expected, checkpoint: Path, tmp_path: Path
) -> None:
    pair = make(1, 4)
    third = VirtualInstance(2, checkpoint, tmp_path, 2, max_num_batched_tokens=24)
    prompt = prompt_of(70, 5)
    pair.reserve("r", prompt)
    pair.source.submit("r", prompt, 5, "prefill")
    pair.send("r", [(0, 70)])
    pair.arrived("r", [0])
    on = Pair(pair.target, third)
    on.reserve("r", prompt)
    on.send("r", [(0, 20), (20, 70)])
    on.arrived("r", [0, 1])
    first = tuple(pair.source.tokens("r"))
    third.submit("r", prompt, 5, "decode", first)
    on.until(lambda: third.core.idle)
    assert [*first, *third.tokens("r")] == expected(prompt, 5)[0]
    third.close()


def test_both_sides_forget_while_kv_is_on_its_way(make: Make) -> None:
    pair = make(2, 2)
    for turns in range(12):
        name, prompt = f"r{turns}", prompt_of(150, turns)
        pair.reserve(name, prompt)
        pair.source.submit(name, prompt, 5, "prefill")
        pair.send(name, [(0, 150)])
        for _ in range(turns):
            pair.source.turn()
        for one in (pair.source, pair.target) if turns % 2 else (pair.target, pair.source):
            one.member.take(AbortRequest(name), None)
        pair.empty()
    assert not [word for one in (pair.source, pair.target) for word in one.words if isinstance(word, SpanTaskLost)]


def test_a_rank_that_is_cut_off_is_reported(make: Make) -> None:
    """Its part of a piece will not come; the other ranks' parts are not taken for the piece."""
    pair = make(2, 1)
    prompt = prompt_of(100)
    pair.reserve("r", prompt)
    pair.source.submit("r", prompt, 5, "prefill")
    pair.send("r", [(0, 40), (40, 100)])
    pair.source.turn()
    pair.source.world.kvs[1]._peers.close()
    pair.hear(pair.source, SpanTaskLost, "r")
    for one in (pair.source, pair.target):
        one.member.take(AbortRequest("r"), None)
    pair.empty()
