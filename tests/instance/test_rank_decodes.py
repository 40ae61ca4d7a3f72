"""Decodes that leave and come to instances of several processes: KV of every token is sent, none too few is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.instance.instance_world import Part, World, frame
from tests.instance.scaled_decode import ScaledDecode
from tests.instance.span_answers import Expected, prompt_of

from headway.core.request import SamplingParams
from headway.runtime.engine.protocol import (
    AbortRequest,
    KvArrived,
    OutputDelta,
    PauseRequest,
    ReserveKv,
    SendKv,
    SubmitRequest,
)

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("rank decodes")]
ONE = 2
"""The number of the instance of one process; the others have two."""


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> Iterator[World]:
    own = [{"tensor_parallel_size": size} for size in (2, 2, 1)]
    made = World(checkpoint, 3, own, kv_cache_bytes=1 << 21)
    yield made
    made.close()


def _said(world: World, on: int, name: str, least: int) -> None:
    """Wait until so much was said."""
    world[on].until(lambda: len(world[on].deltas.get(name, ())) >= least or None)


def _stops(world: World, on: int, name: str) -> int:
    """Tokens of the KV that a decode leaves there."""
    world[on].tell(PauseRequest(name))
    return world[on].wait(OutputDelta, name).staged


def _moves(world: World, name: str, on: int, to: int, tokens: int) -> None:
    world[to].tell(ReserveKv(name, tokens))
    world[to].wait(ReserveKv, name)
    world[on].tell(SendKv(id=name, piece=5, start=0, end=tokens, to=to))
    world[to].wait(KvArrived, name)


@pytest.mark.parametrize(("on", "to"), [(0, 1), (0, ONE), (ONE, 1)])
def test_the_output_of_a_halted_decode_continues_elsewhere(world: World, expected: Expected, on: int, to: int) -> None:
    prompt, count, name = prompt_of(70, 12), 60, f"halted {on} {to}"
    one = ScaledDecode(world, name, prompt, count, ())
    world.ask(on, name, prompt, max_tokens=count, logprobs=0)
    _said(world, on, name, 3)
    known = _stops(world, on, name)
    one.deltas = list(world[on].deltas.pop(name))
    assert known == len(prompt) + len(one.said) - 1
    world.admit(name, prompt, [to], one.params, one.said)
    _moves(world, name, on, to, known)
    one.deltas += world.decode(name, prompt, OutputDelta(id=name, tokens=one.said), to, logprobs=0, max_tokens=count)
    one.end(expected)


def test_kv_of_spans_extended_by_a_scheduler_is_sent(world: World, expected: Expected) -> None:
    prompt, count, name = prompt_of(70, 12), 60, "adopted"
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0, max_tokens=count)
    first = world.prefill(name, prompt, [Part(70, (0,))], logprobs=0, max_tokens=count)
    goes_on = SubmitRequest(
        id=name, prompt_tokens=70, params=params, received_s=time.monotonic(), phase="decode", output=first.tokens
    )
    world[0].tell(goes_on, frame(prompt))
    _said(world, 0, name, 3)
    known = _stops(world, 0, name)
    said = first.tokens + tuple(token for delta in world[0].deltas.pop(name) for token in delta.tokens)
    world.admit(name, prompt, [1], params, said)
    _moves(world, name, 0, 1, known)
    world.forget(name)
    world.clean()


def test_a_decode_does_not_begin_with_kv_of_fewer_tokens_than_it_has(world: World, expected: Expected) -> None:
    """Within the last block: what lies there is somebody's who had it before."""
    prompt, count, name = prompt_of(70, 12), 20, "fewer"
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0, max_tokens=count)
    tokens = tuple(expected(prompt, count)[0])
    world.ask(ONE, "before", prompt_of(400, 3), max_tokens=2)
    world[ONE].answer("before")
    first = world.prefill(name, prompt, [Part(70, (0,))], logprobs=0, max_tokens=count)
    world.admit(name, prompt, [ONE], params, first.tokens)
    _moves(world, name, 0, ONE, 70)
    further = SubmitRequest(
        id=name, prompt_tokens=70, params=params, received_s=time.monotonic(), phase="decode", output=tokens[:3]
    )
    world[ONE].tell(further, frame(prompt))
    (refused,) = world[ONE].answer(name)
    assert refused.error == f"KV of {name!r} has not all come"
    world.forget(name)
    world.clean()


def test_a_request_returns_to_an_instance_that_it_left(world: World, expected: Expected) -> None:
    """From instance 1 to 0 and to 1 again, under one name."""
    prompt, count, name = prompt_of(70, 12), 90, "back"
    one = ScaledDecode(world, name, prompt, count, ())
    world.ask(1, name, prompt, max_tokens=count, logprobs=0)
    on = 1
    for to in (0, 1):
        _said(world, on, name, 3)
        known = _stops(world, on, name)
        one.deltas += world[on].deltas.pop(name)
        world.admit(name, prompt, [to], one.params, one.said)
        _moves(world, name, on, to, known)
        world[on].tell(AbortRequest(name, for_good=False))
        goes_on = SubmitRequest(
            id=name, prompt_tokens=70, params=one.params, received_s=time.monotonic(), phase="decode", output=one.said
        )
        world[to].tell(goes_on, frame(prompt))
        for each in world.instances:
            each.said.clear()
        on = to
    one.deltas += world[on].answer(name)
    one.end(expected)
