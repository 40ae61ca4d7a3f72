"""Runs that are paused between layers, what else goes on meanwhile, and how a first token may end a request."""

from __future__ import annotations

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.instance_world import Part, World, runs
from tests.instance.span_answers import (
    GREEDY,
    LAYERS,
    Expected,
    check_answer,
    check_drawn_token,
    check_end,
    pause_at_once,
    pauses_of,
    prompt_of,
    resume_span,
    start_on_some,
)

from headway.core.request import cut
from headway.runtime.engine.protocol import ComputeSpan, PauseRequest


@pytest.mark.parametrize("attn", ["ring", "striped", "ulysses"])
@pytest.mark.parametrize(("group", "count"), [((0,), 4), ((0, 1), 4), ((1, 0, 2, 3), 4), ((1, 0), 1)])
def test_a_span_pauses_at_every_layer_of_every_piece(
    world: World, expected: Expected, attn: str, group: tuple[int, ...], count: int
) -> None:
    """And between pieces, where nothing is kept but KV. Another prompt is computed in each pause."""
    parts = [Part(21, group[:1], attn, rows=8), Part(50, group, attn, rows=-(-16 // len(group)) if count > 1 else 0)]
    prompt, name = prompt_of(71, 2), f"pp-{attn}-{len(group)}-{count}"
    pieces = cut(21, 71, len(group), parts[1].rows)
    assert len(pieces) == count
    copies = 2 if (attn, len(group)) == ("ulysses", 4) else 1  # four ranks for two KV heads
    pause_at_once(world, name, prompt, parts)
    stops = [(piece, layer) for piece in pieces for layer in range(LAYERS)]
    at, pauses = 0, 0
    while (words := pauses_of(world, name, parts[1])) is not None:
        pauses += 1
        at = next(i for i, ((start, _), layer) in enumerate(stops) if (start, layer) == words[0][:2] and i > at)
        (start, end), layer = stops[at]
        assert [word[:2] for word in words] == [(start, layer)] * len(words)
        kv, activations, kv_at_end = (sum(column) for column in list(zip(*words, strict=True))[2:])
        assert kv_at_end == 71 * LAYERS * copies * 2 * 2 * 8 * 4
        assert activations == ((end - start) * 32 * 4 if layer else 0)
        if attn == "ring" and start > 21:  # KV of the run before is where it stays
            assert kv == (start * LAYERS + (end - start) * layer) * 2 * 2 * 8 * 4
        if pauses % 4 == 1:
            other = [Part(20 + at, tuple(reversed(group)))]
            first = world.prefill(f"{name}-{at}", prompt_of(20 + at, at), other, logprobs=0)
            check_answer([first], *expected(prompt_of(20 + at, at), 1))
            world.forget(f"{name}-{at}")
        resume_span(world, name, parts[1], True)
    assert pauses >= len(stops) // 2, "a pause may come a layer late; it is said in time to most"
    check_end(world, expected, name, parts[1], prompt)


def test_a_pause_during_a_wait_for_peers_takes_effect(world: World) -> None:
    part = Part(40, (2, 3))
    for name in ("late", "later", "latest"):
        start_on_some(world, name, part, (2,))
        world[2].tell(PauseRequest(name))
        let_arrive()
        world[3].tell(ComputeSpan(id=name, index=0, run=runs([part])[0], last=True, preemptible=True))
        pauses = pauses_of(world, name, part)
        world.forget(name)
        world.clear()
        # none: on a machine that does much else the pause may be taken in when all is computed
        if pauses is not None:
            break
    # behind the layer that waits, or the one before it where the pause arrives before the wait
    assert pauses is not None
    assert [layer for _, layer, *_ in pauses] in ([1, 1], [2, 2])


def test_a_pause_of_a_paused_span_is_cleared_by_its_resumption(world: World, expected: Expected) -> None:
    part, prompt = Part(40, (2, 3)), prompt_of(40)
    pause_at_once(world, "twice", prompt, [part])
    world.paused("twice", part)
    world[2].tell(PauseRequest("twice"))
    resume_span(world, "twice", part, False)
    check_end(world, expected, "twice", part, prompt)


def test_a_span_that_is_not_preemptible_continues(world: World, expected: Expected) -> None:
    part, prompt = Part(40, (0, 1)), prompt_of(40)
    world.admit("not", prompt, part.group, GREEDY)
    world.compute("not", [part], 0)
    world[0].tell(PauseRequest("not"))
    check_end(world, expected, "not", part, prompt)


@pytest.mark.parametrize("beside", [True, False])
def test_iterations_continue_between_layers_where_the_span_allows(
    world: World, expected: Expected, beside: bool
) -> None:
    name, prompt, part = f"b{beside}", prompt_of(300), Part(300, (0, 1))
    world.ask(0, f"d{beside}", prompt_of(30), max_tokens=400)
    world[0].until(lambda: world[0].deltas.get(f"d{beside}"))
    world.admit(name, prompt, part.group, GREEDY)
    world.compute(name, [part], 0, beside=beside)
    word = world.done(name, part)
    told = world[0].answer(f"d{beside}")
    during = [delta for delta in told if word.began_s < delta.emitted_s < word.ended_s]
    assert len(during) == (LAYERS if beside else 0)
    assert [t for delta in told for t in delta.tokens][:20] == expected(prompt_of(30), 20)[0]
    assert word.delta is not None
    check_answer([word.delta], *expected(prompt, 1))
    world.forget(name)
    world.clean()


def test_spans_of_overlapping_groups_wait_for_each_other(world: World, expected: Expected) -> None:
    parts = {f"o{i}": Part(30 + i, group) for i, group in enumerate([(0, 1), (1, 2), (2, 0), (3, 1, 0), (0,), (2, 3)])}
    for name, part in parts.items():
        world.admit(name, prompt_of(part.tokens), part.group, GREEDY)
    for name, part in parts.items():
        world.compute(name, [part], 0)
    for name, part in parts.items():
        check_end(world, expected, name, part, prompt_of(part.tokens), clean=False)
    world.clean()


SAMPLED = {
    "seed": {"temperature": 1.0, "seed": 5, "logprobs": 2},
    "top": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 11},
    "penalties": {"repetition_penalty": 3.0, "presence_penalty": 1.5, "frequency_penalty": 1.0, "logprobs": 0},
    "bias": {"logit_bias": {5: 50.0}, "logprobs": 1},
    "length": {"max_tokens": 1},
    "ends withheld": {"min_tokens": 1, "stop_token_ids": tuple(range(3, 90)), "ignore_eos": False},
    "ends": {"stop_token_ids": tuple(range(128))},
}


@pytest.mark.parametrize("name", SAMPLED)
def test_the_first_token_is_drawn_as_a_scheduler_draws_it(world: World, name: str) -> None:
    check_drawn_token(world, name, 3, {"max_tokens": 4, **SAMPLED[name]})


def test_an_answer_continues_after_the_output_so_far(world: World, expected: Expected) -> None:
    """After a loss: prompt and output so far are computed again, and the next token is drawn."""
    prompt, part = prompt_of(33, 4), Part(33 + 3, (0, 3))
    tokens, chances = expected(prompt, 4)
    world.admit("again", prompt, part.group, GREEDY, tuple(tokens[:3]))
    world.compute("again", [part], 0)
    word = world.done("again", part)
    assert word.delta is not None
    check_answer([word.delta], tokens[3:], chances[3:])
    world.forget("again")
    world.clean()
