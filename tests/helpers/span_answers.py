"""What requests over several instances are checked with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
from tests.helpers.instance_world import Part, World, runs
from tests.helpers.polling import let_arrive

from headway.core.request import SamplingParams
from headway.runtime.engine.protocol import ComputeSpan, OutputDelta, PauseRequest, ResumeSpan, SpanTaskDone

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
