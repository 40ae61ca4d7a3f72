"""What a router would say to have KV moved, and what it would hear."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from tests.instance.instance_world import World, frame
from tests.instance.span_answers import Expected, check_answer, prompt_of

from headway.core.request import Phase, SamplingParams
from headway.runtime.engine.protocol import KvArrived, OutputDelta, ReserveKv, SendKv, SpanTaskLost, SubmitRequest


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "logprobs": 0, **fields})


def submit(
    world: World, on: int, name: str, prompt: Sequence[int], phase: Phase, output: tuple[int, ...] = (), **fields: Any
) -> None:
    message = SubmitRequest(
        id=name,
        prompt_tokens=len(prompt),
        params=params(**fields),
        received_s=time.monotonic(),
        phase=phase,
        output=output,
    )
    world[on].tell(message, frame(prompt))


def reserve(world: World, on: int, name: str, tokens: int) -> None:
    """Ask for room, and wait until there is."""
    world[on].tell(ReserveKv(name, tokens))
    world[on].wait(ReserveKv, name)


def send(world: World, name: str, piece: int, sources: Iterable[int], start: int, end: int, to: int) -> None:
    for source in sources:
        world[source].tell(SendKv(id=name, piece=piece, start=start, end=end, to=to))


def _not_lost(world: World, name: str) -> None:
    """Raise AssertionError where an instance has told that something of a request is lost."""
    for one in world.instances:
        one.hear()
        lost = [word.why for word in one.said if isinstance(word, SpanTaskLost) and word.id == name]
        assert not lost, f"instance {one.number} says: {lost[0]}"


def arrived(world: World, name: str, to: int, pieces: Iterable[tuple[int, int]]) -> None:
    """All of these (piece, source) have come, in any order, and nothing else has."""
    left = set(pieces)
    while left:
        got = world[to].until(lambda: world[to].take(KvArrived, name) or _not_lost(world, name))
        assert got.began_s <= got.ended_s <= time.monotonic()
        left.remove((got.piece, got.source))


def first_token(world: World, on: int, name: str, prompt: Sequence[int], **fields: Any) -> OutputDelta:
    """Prefill only, by the scheduler of an instance."""
    submit(world, on, name, prompt, "prefill", **fields)
    assert world[on].wait(OutputDelta, name).staged == len(prompt)
    (delta,) = world[on].deltas[name]
    assert delta.finish is None
    return delta


def rest(
    world: World, on: int, name: str, prompt: Sequence[int], first: OutputDelta, **fields: Any
) -> list[OutputDelta]:
    """Decode with KV that has come."""
    submit(world, on, name, prompt, "decode", first.tokens, **fields)
    return [first, *world[on].answer(name)]


def move(world: World, name: str, sources: Sequence[int], tokens: int, to: int, piece: int = 1) -> None:
    """Room for the KV of a prompt at `to`, to which each of the sources sends what it has: all of it comes."""
    reserve(world, to, name, tokens)
    send(world, name, piece, sources, 0, tokens, to)
    arrived(world, name, to, [(piece, source) for source in sources])


def check_staged(
    world: World, expected: Expected, name: str, prompt: Sequence[int], source: int, to: int, count: int
) -> None:
    """Computed by the scheduler of `source`, kept, moved and decoded: `count` tokens as of one engine."""
    first = first_token(world, source, name, prompt, max_tokens=count)
    move(world, name, (source,), len(prompt), to)
    check_answer(rest(world, to, name, prompt, first, max_tokens=count), *expected(list(prompt), count))


def check_chunks(world: World, expected: Expected, name: str, source: int, to: int) -> None:
    """KV that is asked for before it is computed follows chunk by chunk: in two pieces, of which the second's end is
    not the prompt's edge of a chunk."""
    prompt = prompt_of(203, source)
    reserve(world, to, name, 203)
    submit(world, source, name, prompt, "prefill", max_tokens=9)
    send(world, name, 1, (source,), 0, 75, to)
    send(world, name, 2, (source,), 75, 203, to)
    arrived(world, name, to, [(1, source), (2, source)])
    world[source].wait(OutputDelta, name)
    (first,) = world[source].deltas[name]
    check_answer(rest(world, to, name, prompt, first, max_tokens=9), *expected(prompt, 9))
    end(world, name)


def end(world: World, *names: str) -> None:
    """Forget requests everywhere; nothing of them is left, and nothing was lost."""
    for name in names:
        world.forget(name)
    world.clean()
    words = [word for one in world.instances for word in one.said if isinstance(word, SpanTaskLost | KvArrived)]
    assert not [word for word in words if word.id in names]
