"""Hand-overs whose other end is killed, hangs, or is cut off: told on both sides, nothing stays, engines serve on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.helpers.polling import let_arrive
from tests.instance.hand_overs import (
    KvLostError,
    Relay,
    arrived,
    check_staged,
    end,
    params,
    reserve,
    rest,
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
    hands_over(trio, expected, "ks1", 1, 2)
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


@pytest.fixture
def relay(trio: World, tmp_path: Path) -> Iterator[Relay]:
    """What 0 sends to 2 passes here."""
    trio[2].kill()
    trio.again(2)
    between = Relay(tmp_path, trio[2].peer.address)
    assert trio[2].info is not None
    trio[2].info = msgspec.structs.replace(trio[2].info, peer_address=between.address)
    trio[0].kill()
    trio.again(0)
    yield between
    between.close()
    trio[2].kill()
    trio.again(2)


def test_a_socket_that_is_cut_half_way(trio: World, expected: Expected, relay: Relay) -> None:
    hands_over(trio, expected, "c0", 0, 2)
    assert relay.passed > 0
    half_way(trio, "c", 0, 2)
    let_arrive()
    relay.cut()
    assert "instance 0" in trio[2].wait(SpanTaskLost, "c", SOON_S).why
    trio[0].tell(ResumeSpan("c"))
    assert "instance 2" in trio[0].wait(SpanTaskLost, "c", SOON_S).why
    trio[0].said.clear()
    trio.forget("c")
    try:
        hands_over(trio, expected, "c1", 0, 2)
    except KvLostError:
        # The new connection was not there yet, or went down too: a router hears of it and begins again.
        trio.forget("c1")
        trio[0].said.clear()
        hands_over(trio, expected, "c2", 0, 2)


def test_a_slow_socket_delays_and_loses_nothing(trio: World, expected: Expected, relay: Relay) -> None:
    prompt = prompt_of(150, 8)
    reserve(trio, 2, "slow", 150)
    relay.hold.clear()
    submit(trio, 0, "slow", prompt, "prefill", max_tokens=5)
    send(trio, "slow", 1, (0,), 0, 150, 2)
    trio[0].wait(OutputDelta, "slow")
    hands_over(trio, expected, "beside", 0, 1, but=(2,))
    trio[2].hear(0.1)
    assert trio[2].said == []
    relay.hold.set()
    arrived(trio, "slow", 2, [(1, 0)])
    check_answer(rest(trio, 2, "slow", prompt, trio[0].deltas["slow"][0], max_tokens=5), *expected(prompt, 5))
    end(trio, "slow")
