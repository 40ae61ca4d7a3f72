"""How runs end that cannot be completed: an instance is killed or hangs, a request is forgotten.

Runs that wait for room: `test_rank_spans`, and `tests/engine/test_instance_agent.py`.
"""

from __future__ import annotations

import signal

from tests.helpers.polling import let_arrive
from tests.instance.instance_world import Part, World, runs
from tests.instance.span_answers import (
    GREEDY,
    SOON_S,
    Expected,
    check_forgotten,
    check_service,
    pause_at_once,
    prompt_of,
    resume_span,
    start_on_some,
)

from headway.runtime.engine.protocol import AbortRequest, ComputeSpan, SpanTaskLost


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
