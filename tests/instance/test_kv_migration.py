"""Prefill at one instance or a group, decode at another: real processes, tokens those of one engine alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.instance.hand_overs import (
    arrived,
    check_chunks,
    check_staged,
    end,
    first_token,
    move,
    params,
    reserve,
    rest,
    send,
    submit,
)
from tests.instance.instance_world import TOKEN_BYTES, Part, World
from tests.instance.span_answers import Expected, check_answer, prompt_of

from headway.runtime.engine.protocol import AbortRequest, KvArrived, OutputDelta, ReserveKv, SendKv, SpanTaskLost


def test_a_prefill_is_staged_and_handed_over(trio: World, expected: Expected) -> None:
    check_staged(trio, expected, "s", prompt_of(150), 0, 2, 12)
    end(trio, "s")
    for number in (0, 2):  # memory through which KV has gone from one to the other
        assert "memfd:headway-kv" in Path(f"/proc/{trio[number].process.pid}/maps").read_text()


def test_kv_follows_chunk_by_chunk_where_it_was_asked_for_before(trio: World, expected: Expected) -> None:
    check_chunks(trio, expected, "chunks", 1, 2)


@pytest.mark.parametrize("group", [(0,), (0, 1)])
def test_sampled_tokens_equal_those_of_one_engine(trio: World, group: tuple[int, ...]) -> None:
    """Seeded, with penalties that look at all that was said."""
    prompt, how = prompt_of(90, 2), {
        "temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11, "repetition_penalty": 1.2,
        "presence_penalty": 0.4, "frequency_penalty": 0.3, "max_tokens": 20,
    }  # fmt: skip
    name = f"draws {len(group)}"
    trio.ask(2, name + " alone", prompt, **how)
    alone = [token for delta in trio[2].answer(name + " alone") for token in delta.tokens]
    if len(group) == 1:
        first = first_token(trio, 0, name, prompt, **how)
    else:
        first = trio.prefill(name, prompt, [Part(90, group)], **how)
    move(trio, name, group, 90, 2)
    deltas = rest(trio, 2, name, prompt, first, **how)
    assert [token for delta in deltas for token in delta.tokens] == alone
    assert len(set(alone)) > 5
    end(trio, name)


ROUTES = {
    "one after the other": [Part(60, (0,)), Part(70, (0, 1))],
    "striped": [Part(61, (1,), "striped"), Part(70, (1, 0), "striped"), Part(30, (1, 0))],
    "ulysses": [Part(64, (0, 1), "ulysses", node=2), Part(33, (0, 1), "ulysses")],
    "ring, then ulysses": [Part(50, (0, 1)), Part(40, (0, 1), "ulysses")],
    "of one": [Part(40, (1,)), Part(35, (1,))],
    "in pieces": [Part(61, (1,), rows=16), Part(70, (1, 0), rows=8), Part(30, (1, 0), rows=5)],
    "in pieces, ulysses": [Part(64, (0, 1), "ulysses", rows=8), Part(33, (0, 1), "ulysses", rows=8)],
}


@pytest.mark.parametrize("when", ["as it is computed", "late", "at the end"])
@pytest.mark.parametrize("name", ROUTES)
def test_spans_of_groups_are_gathered_where_they_are_decoded(
    trio: World, expected: Expected, name: str, when: str
) -> None:
    """Each span's piece while it is computed, or only behind a later, larger group's run, or all KV at the end."""
    parts = ROUTES[name]
    request, tokens = f"{name} {when}", sum(part.tokens for part in parts)
    prompt = prompt_of(tokens, len(name))
    everybody = sorted({number for part in parts for number in part.group})
    reserve(trio, 2, request, tokens)
    trio.admit(request, prompt, everybody, params(max_tokens=6))
    pieces, at = [], 0
    for index, part in enumerate(parts):
        trio.compute(request, parts, index)
        if when == "as it is computed":
            send(trio, request, index, part.group, at, at + part.tokens, 2)
            pieces += [(index, source) for source in part.group]
        word = trio.done(request, part)
        at += part.tokens
    last = parts[-1].group
    if when == "late":
        at = 0
        for index, part in enumerate(parts):
            send(trio, request, index, last, at, at + part.tokens, 2)
            pieces += [(index, source) for source in last]
            at += part.tokens
    elif when == "at the end":
        send(trio, request, 9, last, 0, tokens, 2)
        pieces = [(9, source) for source in last]
    arrived(trio, request, 2, pieces)
    assert word.delta is not None
    check_answer(rest(trio, 2, request, prompt, word.delta, max_tokens=6), *expected(prompt, 6))
    end(trio, request)


@pytest.mark.parametrize("attn", ["ring", "striped", "ulysses"])
def test_kv_of_a_group_is_gathered_on_one_of_its_instances(trio: World, expected: Expected, attn: str) -> None:
    prompt, name = prompt_of(120, 5), f"home {attn}"
    part = Part(120, (0, 1), attn)
    first = trio.prefill(name, prompt, [part], max_tokens=8, logprobs=0)
    move(trio, name, (0, 1), 120, 1)
    check_answer(rest(trio, 1, name, prompt, first, max_tokens=8), *expected(prompt, 8))
    end(trio, name)


def test_received_kv_can_be_sent_on_to_another_instance(trio: World, expected: Expected) -> None:
    prompt = prompt_of(80, 6)
    first = first_token(trio, 0, "on", prompt, max_tokens=7)
    for piece, (source, to) in enumerate(((0, 1), (1, 2))):
        move(trio, "on", (source,), 80, to, piece)
    check_answer(rest(trio, 2, "on", prompt, first, max_tokens=7), *expected(prompt, 7))
    end(trio, "on")


def test_the_first_reservation_is_granted_first_and_completely(trio: World, expected: Expected) -> None:
    """Room for 800: 600, then 300 that wait, then 100 that would fit and do not overtake."""
    prompt = prompt_of(300, 7)
    first = first_token(trio, 0, "second", prompt, max_tokens=5)
    reserve(trio, 2, "first", 600)
    for name, tokens in (("second", 300), ("third", 100)):
        trio[2].tell(ReserveKv(name, tokens))
    trio.ask(2, "bystander", prompt_of(20, 8), max_tokens=30)
    trio[2].answer("bystander")
    assert not [word for word in trio[2].said if isinstance(word, ReserveKv)]
    trio[2].tell(ReserveKv("never", 801))
    assert "801 tokens do not fit the KV cache of 800" in trio[2].wait(SpanTaskLost, "never").why
    trio.forget("first")
    for name in ("second", "third"):
        trio[2].wait(ReserveKv, name)
    send(trio, "second", 1, (0,), 0, 300, 2)
    arrived(trio, "second", 2, [(1, 0)])
    check_answer(rest(trio, 2, "second", prompt, first, max_tokens=5), *expected(prompt, 5))
    end(trio, "second", "third", "first", "never")


def test_a_decode_waits_for_all_of_its_kv(trio: World) -> None:
    prompt = prompt_of(80, 9)
    first = first_token(trio, 0, "early", prompt, max_tokens=7)
    reserve(trio, 2, "early", 80)
    send(trio, "early", 1, (0,), 0, 79, 2)
    arrived(trio, "early", 2, [(1, 0)])
    submit(trio, 2, "early", prompt, "decode", first.tokens)
    (delta,) = trio[2].answer("early")
    assert (delta.finish, delta.error) == ("error", "KV of 'early' has not all come")
    end(trio, "early")


def test_a_first_token_that_ends_the_request_ends_it(trio: World) -> None:
    submit(trio, 0, "one", prompt_of(40, 3), "prefill", max_tokens=1)
    send(trio, "one", 1, (0,), 0, 40, 2)
    (delta,) = trio[0].answer("one")
    assert delta.finish == "length"
    end(trio, "one")
    assert not [word for word in trio[0].said if isinstance(word, OutputDelta)]


def test_a_request_forgotten_during_its_transfer_leaves_nothing(trio: World, expected: Expected) -> None:
    """At every moment: before there is room, with room, while it is computed and sent, when it is there."""
    prompt = prompt_of(200, 4)
    for moment in range(5):
        name = f"forgotten {moment}"
        trio[2].tell(ReserveKv(name, 200))
        if moment >= 1:
            trio[2].wait(ReserveKv, name)
            submit(trio, 0, name, prompt, "prefill")
        if moment >= 2:
            send(trio, name, 1, (0,), 0, 200, 2)
        if moment >= 3:
            trio[0].wait(OutputDelta, name)
        if moment >= 4:
            arrived(trio, name, 2, [(1, 0)])
        trio.forget(name)
        trio.clean()
    for one in trio.instances:
        one.hear(0.1)
        one.said.clear()
    check_staged(trio, expected, "after", prompt, 0, 2, 4)
    end(trio, "after")


def test_many_migrations_run_at_once(trio: World, expected: Expected) -> None:
    """From both prefill instances, more than the decode instance has room for at a time."""
    names = {f"m{i}": prompt_of(90 + 13 * i, 20 + i) for i in range(10)}
    firsts: dict[str, OutputDelta] = {}
    for i, (name, prompt) in enumerate(names.items()):
        submit(trio, i % 2, name, prompt, "prefill", max_tokens=6)
        trio[2].tell(ReserveKv(name, len(prompt)))
    waiting = list(names)
    while waiting:
        for name in list(waiting):
            source = int(name[1:]) % 2
            for word in [word for word in trio[2].said if word.id == name]:
                trio[2].said.remove(word)
                if isinstance(word, ReserveKv):
                    trio[source].tell(SendKv(id=name, piece=1, start=0, end=len(names[name]), to=2))
                elif isinstance(word, KvArrived):
                    trio[source].wait(OutputDelta, name)
                    firsts[name] = trio[source].deltas[name][0]
                    submit(trio, 2, name, names[name], "decode", firsts[name].tokens, max_tokens=6)
            if trio[2].deltas.get(name) and trio[2].deltas[name][-1].finish is not None:
                waiting.remove(name)
                trio.forget(name)
        trio[2].hear(0.05)
    for name, prompt in names.items():
        check_answer([firsts[name], *trio[2].deltas[name]], *expected(prompt, 6))
    end(trio)


def test_crossing_reservations_cause_no_deadlock(checkpoint: Path, expected: Expected) -> None:
    """They wait for ever; when one lets go of its KV, the other goes on."""
    world = World(checkpoint, 2, kv_cache_bytes=128 * TOKEN_BYTES, max_model_len=128)
    try:
        prompts, firsts = {name: prompt_of(90, seed) for seed, name in enumerate("ab")}, {}
        for at, (name, prompt) in enumerate(prompts.items()):
            part = Part(90, (at,))
            world.admit(name, prompt, (0, 1), params(max_tokens=5))
            world.compute(name, [part], 0)
            firsts[name] = world.done(name, part).delta
        world[1].tell(ReserveKv("a", 90))
        world[0].tell(ReserveKv("b", 90))
        with pytest.raises(AssertionError, match="has said"):
            world[1].wait(ReserveKv, "a", 1.0)
        with pytest.raises(AssertionError, match="has said"):
            world[0].wait(ReserveKv, "b", 0.2)
        for one in world.instances:
            one.tell(AbortRequest("b"))
        world[1].wait(ReserveKv, "a")
        send(world, "a", 1, (0,), 0, 90, 1)
        arrived(world, "a", 1, [(1, 0)])
        first = firsts["a"]
        assert first is not None
        check_answer(rest(world, 1, "a", prompts["a"], first, max_tokens=5), *expected(prompts["a"], 5))
        end(world, "a")
    finally:
        world.close()
