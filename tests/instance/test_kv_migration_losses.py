"""Hand-overs whose other end is killed or hangs: told on both sides, nothing stays, engines serve on.

Connections that are cut or slow: `test_peers`, `tests/transfer` (`test_another_connection_has_other_memory`,
`test_a_receiver_that_hangs_delays_no_other`), and `tests/e2e/test_cluster_chaos.py`.
"""

from __future__ import annotations

import signal
import time

from tests.helpers.polling import let_arrive
from tests.instance.hand_overs import (
    check_staged,
    end,
    params,
    reserve,
    send,
    submit,
)
from tests.instance.instance_world import Part, World
from tests.instance.span_answers import Expected, check_answer, prompt_of

from headway.runtime.engine.protocol import (
    AbortRequest,
    OutputDelta,
    PauseRequest,
    ResumeSpan,
    SpanTaskLost,
    SpanTaskPaused,
)

SOON_S = 2.0


def half_way(world: World, name: str, source: int, to: int, tokens: int = 120) -> None:
    """A run at `source` is paused behind its first layer, which has been sent on; more waits."""
    part = Part(tokens, (source,))
    reserve(world, to, name, tokens)
    world.admit(name, prompt_of(tokens), (source,), params())
    with world[source].at_once():
        world.compute(name, [part], 0, preemptible=True)
        send(world, name, 1, (source,), 0, tokens, to)
        world[source].tell(PauseRequest(name))
    assert world[source].wait(SpanTaskPaused, name).layer == 1


def hands_over(world: World, expected: Expected, name: str, source: int, to: int, but: tuple[int, ...] = ()) -> None:
    """A hand-over works, and schedulers do."""
    prompt = prompt_of(77, 3)
    check_staged(world, expected, name, prompt, source, to, 5)
    world.ask(source, name + " alone", prompt, max_tokens=5, logprobs=0)
    check_answer(world[source].answer(name + " alone"), *expected(prompt, 5))
    if but:
        world.forget(name)
    else:
        end(world, name)


def test_kv_computed_before_a_pause_is_sent_and_the_rest_follows(trio: World, expected: Expected) -> None:
    half_way(trio, "p", 0, 2)
    let_arrive()
    paused_s = time.monotonic()
    trio[0].tell(ResumeSpan("p"))
    word = trio.done("p", Part(120, (0,)))
    got = trio[2].until(lambda: next((one for one in trio[2].said if one.id == "p"), None))
    trio[2].said.remove(got)
    assert got.began_s < paused_s < got.ended_s
    assert word.delta is not None
    prompt = prompt_of(120)
    submit(trio, 2, "p", prompt, "decode", word.delta.tokens, max_tokens=4)
    check_answer([word.delta, *trio[2].answer("p")], *expected(prompt, 4))
    end(trio, "p")


def test_a_sender_killed_half_way_is_reported_and_other_transfers_work(trio: World, expected: Expected) -> None:
    half_way(trio, "ks", 0, 2)
    let_arrive()
    trio[0].kill()
    assert "instance 0" in trio[2].wait(SpanTaskLost, "ks", SOON_S).why
    for number in (1, 2):
        trio[number].tell(AbortRequest("ks"))
    hands_over(trio, expected, "ks1", 1, 2, but=(0,))
    trio.again(0)
    hands_over(trio, expected, "ks2", 0, 2)


def test_a_receiver_that_is_killed_half_way(trio: World, expected: Expected) -> None:
    half_way(trio, "kr", 1, 2)
    trio[2].kill()
    trio[1].tell(ResumeSpan("kr"))
    assert "instance 2" in trio[1].wait(SpanTaskLost, "kr", SOON_S).why
    trio[1].said.clear()
    trio.forget("kr")
    trio.again(2)
    hands_over(trio, expected, "kr2", 1, 2)


def test_a_receiver_that_hangs_delays_no_other(trio: World, expected: Expected) -> None:
    prompt = prompt_of(77, 4)
    reserve(trio, 2, "h", 77)
    trio[2].signal(signal.SIGSTOP)
    submit(trio, 0, "h", prompt, "prefill")
    send(trio, "h", 1, (0,), 0, 77, 2)
    trio[0].wait(OutputDelta, "h", SOON_S)
    hands_over(trio, expected, "h1", 0, 1, but=(2,))
    trio.meet(without=(2,))
    assert "instance 2 has left the cluster" in trio[0].wait(SpanTaskLost, "h", SOON_S).why
    trio[2].kill()
    for number in (0, 1):
        trio[number].tell(AbortRequest("h"))
    trio.again(2)
    hands_over(trio, expected, "h2", 0, 2)
