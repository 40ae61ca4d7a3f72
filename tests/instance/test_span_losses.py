"""How runs end that cannot be completed: an instance is killed or hangs, a request is forgotten, the pool is full."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.instance_world import Part, World, runs
from tests.instance.span_answers import (
    GREEDY,
    SOON_S,
    Expected,
    check_answer,
    check_forgotten,
    check_service,
    pause_at_once,
    prompt_of,
    resume_span,
    start_on_some,
)

from headway.runtime.engine.protocol import AbortRequest, ComputeSpan, SpanTaskDone, SpanTaskLost


def test_a_span_ends_when_an_instance_is_killed(world: World, expected: Expected) -> None:
    start_on_some(world, "k", Part(60, (0, 1, 2)), (0, 2))
    world[1].kill()
    for number in (0, 2):
        assert "instance 1" in world[number].wait(SpanTaskLost, "k", SOON_S).why
    check_service(world, expected, "k", (0, 2))
    world.again(1)
    check_service(world, expected, "k2", (0, 1, 2))
    world.clean()


def test_a_paused_span_of_a_lost_group_is_lost_when_it_resumes(world: World, expected: Expected) -> None:
    part = Part(60, (0, 3))
    pause_at_once(world, "kp", prompt_of(60), [part])
    world.paused("kp", part)
    world[3].kill()
    resume_span(world, "kp", Part(60, (0,)), False)
    assert "instance 3" in world[0].wait(SpanTaskLost, "kp", SOON_S).why
    world.again(3)
    check_service(world, expected, "kp", (0, 3))
    world.clean()


def test_a_span_ends_when_a_hanging_instance_leaves_the_peers(world: World, expected: Expected) -> None:
    part = Part(60, (0, 1))
    world[1].signal(signal.SIGSTOP)
    world.admit("h", prompt_of(60), part.group, GREEDY)
    world.compute("h", [part], 0)
    let_arrive(1.0)
    world[0].hear()
    assert world[0].said == []
    assert world[0].beats() >= 4  # a run that waits is no silence
    world.meet(without=(1,))
    assert "left the cluster" in world[0].wait(SpanTaskLost, "h", SOON_S).why
    world[0].tell(AbortRequest("h"))
    check_service(world, expected, "h", (0, 2))
    world[1].kill()
    world.again(1)
    check_service(world, expected, "h2", (1, 0))
    world.clean()


def test_a_forgotten_span_ends_at_once(world: World, expected: Expected) -> None:
    check_forgotten(world, expected)
    assert not [word for one in world.instances for word in one.said if isinstance(word, SpanTaskLost)]
    world.clear()


def test_a_span_that_does_not_fit_the_model_or_group_is_lost_with_a_reason(world: World, expected: Expected) -> None:
    world.admit("bad", prompt_of(20), (0, 1, 2), GREEDY)
    world.compute("bad", [Part(20, (0, 1, 2), "ulysses")], 0)  # 8 query heads over three
    assert "ulysses over 3 ranks" in world[0].wait(SpanTaskLost, "bad", SOON_S).why
    world.forget("bad")
    world.admit("strange", prompt_of(20), (0,), GREEDY)
    world[0].tell(ComputeSpan(id="strange", index=0, run=runs([Part(20, (0, 9))])[0], last=True))
    assert "instance 9 is not here" in world[0].wait(SpanTaskLost, "strange", SOON_S).why
    world[0].tell(ComputeSpan(id="nobody", index=0, run=runs([Part(20, (0,))])[0], last=True))
    check_service(world, expected, "bad", (0, 1))
    world.clear()


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Iterator[World]:
    """One instance with room for 600 tokens."""
    one = World(checkpoint, 1, kv_cache_bytes=600 * 384, room_s=0.5)
    yield one
    one.close()


def test_the_scheduler_continues_while_a_span_waits_for_room(narrow: World, expected: Expected) -> None:
    part = Part(400, (0,))
    narrow.prefill("a", prompt_of(400), [part])
    narrow.admit("b", prompt_of(400), (0,), GREEDY)
    narrow.compute("b", [part], 0)
    narrow.ask(0, "s", prompt_of(30), max_tokens=5)
    assert [t for delta in narrow[0].answer("s") for t in delta.tokens] == expected(prompt_of(30), 5)[0]
    assert narrow[0].said == []
    narrow.forget("a")
    word = narrow[0].wait(SpanTaskDone, "b", 0.4)
    assert word.delta is not None
    check_answer([word.delta], *expected(prompt_of(400), 1))
    narrow.admit("c", prompt_of(400), (0,), GREEDY)
    narrow.compute("c", [part], 0)
    assert "no room for 400 tokens" in narrow[0].wait(SpanTaskLost, "c", 1.5).why
    narrow[0].until(lambda: narrow[0].stats.prefill_tokens_total == 830 or None)  # runs and iterations alike
    narrow.forget("b")
    narrow.clean()


def test_a_span_waiting_for_room_may_be_forgotten(narrow: World) -> None:
    part = Part(400, (0,))
    narrow.prefill("d", prompt_of(400), [part])
    narrow.admit("e", prompt_of(400), (0,), GREEDY)
    narrow.compute("e", [part], 0)
    let_arrive()
    narrow.forget("e")
    narrow.forget("d")
    narrow.prefill("g", prompt_of(400), [part])
    narrow.forget("g")
    narrow.clean()
    assert narrow[0].said == []
