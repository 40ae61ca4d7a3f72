"""Hand-over between instances of one and two processes: real ranks, tokens those of one engine alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.hand_overs import (
    check_chunks,
    check_staged,
    end,
    first_token,
    move,
    reserve,
    rest,
    send,
    submit,
)
from tests.instance.instance_world import TOKEN_BYTES, World
from tests.instance.span_answers import Expected, check_answer, prompt_of

ONE, TWO = 0, 1


pytestmark = pytest.mark.xdist_group("rank migrations")
"""All of them on one worker: they share `world`."""


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> Iterator[World]:
    """Instances of one and two ranks, with room for 800 tokens each. What a test kills it brings back."""
    own = [{"tensor_parallel_size": size, "kv_cache_bytes": 800 * TOKEN_BYTES} for size in (1, 2)]
    made = World(checkpoint, 2, own, scheduler={"max_num_batched_tokens": 32})
    for instance in made.instances:
        assert instance.info is not None
        assert instance.info.kv_tokens_total == 800
    yield made
    made.close()


@pytest.mark.parametrize(("source", "target"), [(TWO, ONE), (ONE, TWO)])
def test_kv_follows_chunk_by_chunk_to_any_number_of_ranks(
    world: World, expected: Expected, source: int, target: int
) -> None:
    check_chunks(world, expected, f"chunks {source} to {target}", source, target)


@pytest.mark.parametrize(("source", "target"), [(TWO, ONE), (ONE, TWO)])
def test_a_prefill_is_staged_and_handed_over_later(world: World, expected: Expected, source: int, target: int) -> None:
    """Other prompts are computed between; of what is left behind nothing stays."""
    prompt, name = prompt_of(150, target), f"staged {source} to {target}"
    first = first_token(world, source, name, prompt, max_tokens=12)
    world.ask(source, "between", prompt_of(64, 7), max_tokens=3, logprobs=0)
    check_answer(world[source].answer("between"), *expected(prompt_of(64, 7), 3))
    world[source].deltas.clear()
    move(world, name, (source,), 150, target)
    check_answer(rest(world, target, name, prompt, first, max_tokens=12), *expected(prompt, 12))
    end(world, name)


def test_a_prompt_that_is_dropped_on_the_way_leaves_nothing(world: World, expected: Expected) -> None:
    for source, target in ((TWO, ONE), (ONE, TWO)):
        name = f"dropped {source}"
        reserve(world, target, name, 400)
        submit(world, source, name, prompt_of(400, 6), "prefill")
        send(world, name, 1, (source,), 0, 400, target)
        let_arrive(0.05)
        world.forget(name)
        world.clean()
        world[source].deltas.clear()
        world[target].said.clear()


@pytest.mark.long
@pytest.mark.parametrize(("victim", "how"), [("source", signal.SIGKILL), ("target", signal.SIGSTOP)])
def test_a_lost_rank_takes_only_its_own_instance(
    world: World, expected: Expected, victim: str, how: signal.Signals
) -> None:
    """In the middle of a hand-over. The other side is told, and goes on with others."""
    lost, left = TWO, ONE
    source, target = (lost, left) if victim == "source" else (left, lost)
    name = f"lost {victim} {how}"
    reserve(world, target, name, 600)
    submit(world, source, name, prompt_of(600, 9), "prefill")
    send(world, name, 1, (source,), 0, 600, target)
    world[left].hear(0.02)
    os.kill(world.rank_pids(lost)[1], how)
    world[lost].process.join(10.0)
    assert not world[lost].process.is_alive()
    world[lost].hear()
    fatal = world[lost].fatal
    assert fatal is not None
    assert "worker 1" in fatal.error
    assert not fatal.final
    world.meet(without=(lost,))
    world.forget(name)
    world.clean(but=(lost,))
    world.again(lost)
    check_staged(world, expected, name + " again", prompt_of(77, 2), source, target, 4)
    world.forget(name + " again")
    for number in (ONE, TWO):
        world[number].said.clear()
        world[number].deltas.clear()
    world.clean()
