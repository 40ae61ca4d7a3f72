"""What requests over several instances are checked with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.instance_world import Part, World, runs

from headway.core.request import SamplingParams
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    OutputDelta,
    PauseRequest,
    ResumeSpan,
    SpanTaskDone,
)

Expected = Callable[[list[int], int], tuple[list[int], list[float]]]


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, 128) for _ in range(tokens)]


def check_answer(deltas: Sequence[OutputDelta], tokens: list[int], chances: list[float]) -> None:
    assert [token for delta in deltas for token in delta.tokens] == tokens
    got = [one.logprob for delta in deltas for one in delta.logprobs or ()]
    assert got == pytest.approx(chances, abs=1e-4)


def check_end(world: World, expected: Expected, name: str, part: Part, prompt: list[int], clean: bool = True) -> None:
    """The last run is done by all of its group, with the first token of one process. clean: nothing is left then."""
    word = world.done(name, part)
    assert word.delta is not None
    check_answer([word.delta], *expected(prompt, 1))
    world.forget(name)
    if clean:
        world.clean()


def check_first_token(world: World, expected: Expected, name: str, parts: Sequence[Part]) -> None:
    """Runs of a prompt, one after the other, give the first token of one process, and nothing is left."""
    prompt = prompt_of(sum(part.tokens for part in parts), len(name))
    first = world.prefill(name, prompt, parts, logprobs=0)
    check_answer([first], *expected(prompt, 1))
    world.forget(name)
    world.clean()


def check_decode_in_place(
    world: World, expected: Expected, group: tuple[int, ...], attn: str, count: int, *, turning: bool
) -> None:
    """`count` tokens over the KV of a group, one run a token: queries travel, KV stays (LoongServe's decode in place).
    turning: each of the group draws in turn."""
    name, prompt = f"g-{attn}", prompt_of(70, 5)
    parts = [Part(30, group[:1], attn, rows=8), Part(40, group, attn, rows=4)]
    deltas = [world.prefill(name, prompt, parts, logprobs=0, max_tokens=count)]
    while deltas[-1].finish is None:
        if turning:
            group = (*group[1:], group[0])
        parts.append(Part(1, group, attn, in_place=True))
        world.compute(name, parts, len(parts) - 1, drawn=deltas[-1].tokens)
        word = world.done(name, parts[-1])
        assert word.delta is not None
        deltas.append(word.delta)
    assert deltas[-1].finish == "length"
    check_answer(deltas, *expected(prompt, count))
    world.forget(name)
    world.clean()


def check_drawn_token(world: World, name: str, alone: int, fields: dict[str, Any]) -> None:
    """The first token of a prompt over instances 1 and 2 is the one that the scheduler of `alone` draws."""
    prompt = prompt_of(45, 3)
    first = world.prefill("r" + name, prompt, [Part(20, (1,)), Part(25, (1, 2))], **fields)
    world.ask(alone, "s" + name, prompt, **fields)
    other = world[alone].answer("s" + name)[0]
    assert (first.tokens, first.finish, first.stop_token) == (other.tokens, other.finish, other.stop_token)
    assert first.first_scheduled_s is not None
    assert (first.logprobs is None) == (other.logprobs is None)
    for mine, theirs in zip(first.logprobs or (), other.logprobs or (), strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    world.forget("r" + name)
    world.clean()


def check_forgotten(world: World, expected: Expected) -> None:
    """Requests that are forgotten on some of their instances, and on all, in the midst of a run."""
    start_on_some(world, "f", Part(60, (0, 1)), (0,))
    world[0].tell(AbortRequest("f"))
    check_service(world, expected, "f", (0, 2))
    start_on_some(world, "f1", Part(60, (0, 1)), (0, 1))
    world.forget("f1")
    start_on_some(world, "f2", Part(60, (0, 1)), (1,))
    world.forget("f2")
    world.forget("unknown")
    check_service(world, expected, "f2", (0, 1))


def pause_at_once(world: World, name: str, prompt: list[int], parts: Sequence[Part]) -> None:
    """Compute all runs; the last of them is told to pause with its first layer."""
    group = parts[-1].group
    world.admit(name, prompt, group, GREEDY)
    for index, part in enumerate(parts[:-1]):
        world.compute(name, parts, index)
        world.done(name, part)
    with world[group[0]].at_once():
        world.compute(name, parts, len(parts) - 1, preemptible=True)
        world[group[0]].tell(PauseRequest(name))


LAYERS = 3


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0)


def resume_span(world: World, name: str, part: Part, pause: bool) -> None:
    with world[part.group[0]].at_once():
        for number in part.group:
            world[number].tell(ResumeSpan(name))
        if pause:
            world[part.group[0]].tell(PauseRequest(name))


def pauses_of(world: World, name: str, part: Part) -> list[tuple[int, int, int, int, int]] | None:
    """(tokens, layer, bytes of KV, of activations, of KV at the end) that each of the group says; None: it is done."""
    first = world[part.group[0]]
    said = first.until(lambda: next((one for one in first.said if getattr(one, "id", None) == name), None))
    if isinstance(said, SpanTaskDone):
        return None
    return [
        (word.tokens, word.layer, word.kv_bytes, word.activation_bytes, word.kv_bytes_at_end)
        for word in world.paused(name, part)
    ]


SOON_S = 5.0


def start_on_some(world: World, name: str, part: Part, tell: tuple[int, ...]) -> None:
    """A run of which only some of the group are told: they wait for the rest in its midst."""
    world.admit(name, prompt_of(part.tokens), part.group, GREEDY)
    for number in tell:
        world[number].tell(ComputeSpan(id=name, index=0, run=runs([part])[0], last=True, preemptible=True))
    let_arrive()


def check_service(world: World, expected: Expected, name: str, on: tuple[int, ...]) -> None:
    """Its schedulers and runs still do what they should, and nothing is left over."""
    prompt = prompt_of(37, 9)
    tokens, chances = expected(prompt, 3)
    for number in on:
        world.ask(number, f"{name}-s{number}", prompt, max_tokens=3, logprobs=0)
        check_answer(world[number].answer(f"{name}-s{number}"), tokens, chances)
    check_answer([world.prefill(f"{name}-r", prompt, [Part(37, on)], logprobs=0)], tokens[:1], chances[:1])
    world.forget(f"{name}-r")
