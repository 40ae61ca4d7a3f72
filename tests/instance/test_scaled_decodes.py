"""Groups that grow and shrink while they decode (LoongServe §4): exact, and nothing is left on those that have gone."""

from __future__ import annotations

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.hand_overs import move
from tests.instance.instance_world import Part, World
from tests.instance.scaled_decode import ScaledDecode
from tests.instance.span_answers import Expected, prompt_of

from headway.runtime.engine.protocol import OutputDelta, PauseRequest


def test_a_group_grows_and_shrinks_between_tokens(world: World, expected: Expected) -> None:
    """From three to two, on which both are masters in turn, over all four, to two others, one of which had left."""
    one = ScaledDecode(world, "scaled", prompt_of(90, 11), 16, [Part(50, (0, 1), rows=8), Part(40, (0, 1, 2), rows=8)])
    for group in (
        (0, 1),
        (1, 0),
        (0, 1, 3),
        (3, 0, 1),
        (3, 0, 1, 2),
        (2, 3),
        (3, 2),
        (3, 2),
        (3, 1),
        (1,),
        (1,),
        (1, 2),
    ):
        one.step(group)
    assert not one.used(0)
    assert not one.used(3)
    while one.deltas[-1].finish is None:
        one.step((2, 1))
    one.end(expected)


BY_HEADS = [Part(31, (1,), rows=8), Part(59, (1, 0), "ulysses", rows=8)]


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param([(1, 0), (0, 1), (0, 1)], id="another master"),
        pytest.param([(3, 0, 1), (3, 0, 1), (2, 0, 1, 3)], id="one joins"),
        pytest.param([(1,), (1,), (0, 1), (1, 0)], id="one leaves, and comes back"),
        pytest.param([(2, 0), (2, 0), (2, 3, 0)], id="one takes another's place"),
        pytest.param([(2, 3), (3, 2), (3,)], id="to two others"),
    ],
)
def test_kv_by_heads_is_laid_out_by_tokens_once_the_group_changes(
    world: World, expected: Expected, groups: list[tuple[int, ...]]
) -> None:
    """First it decodes as its prompt was computed."""
    one = ScaledDecode(world, f"heads-{groups}", prompt_of(90, 14), 12, BY_HEADS)
    for _ in range(3):
        one.step((1, 0), attn="ulysses")
    for group in groups:
        one.step(group)
    while one.deltas[-1].finish is None:
        one.step(groups[-1])
    one.end(expected)


def test_kv_by_heads_of_two_nodes_is_decoded_in_place_and_laid_out_by_tokens(world: World, expected: Expected) -> None:
    group = (2, 3, 0, 1)
    one = ScaledDecode(world, "nodes", prompt_of(90, 15), 12, [Part(90, group, "ulysses", node=2, rows=8)])
    for _ in range(4):
        one.parts.append(Part(1, group, "ulysses", node=2, in_place=True))
        world.compute(one.name, one.parts, len(one.parts) - 1, drawn=one.said)
        word = world.done(one.name, one.parts[-1])
        assert word.delta is not None
        one.deltas.append(word.delta)
    one.step((0, 1, 2))
    one.step((1, 0, 2, 3))
    while one.deltas[-1].finish is None:
        one.step((1, 2))
    one.end(expected)


def end_gathered(one: ScaledDecode, expected: Expected) -> None:
    """The KV of instances 0 and 1 goes to instance 2, which decodes the rest."""
    world, known = one.world, len(one.prompt) + len(one.said) - 1
    world.admit(one.name, one.prompt, [2], one.params, one.said)
    move(world, one.name, (0, 1), known, 2)
    before = OutputDelta(id=one.name, tokens=one.said)
    one.deltas += world.decode(one.name, one.prompt, before, 2, logprobs=0, max_tokens=one.count)
    one.end(expected)


@pytest.mark.parametrize("attn", ["ulysses", "ring"])
def test_kv_by_heads_decoded_by_a_group_is_gathered(world: World, expected: Expected, attn: str) -> None:
    count = 12
    one = ScaledDecode(world, f"back-{attn}", prompt_of(90, 16), count, BY_HEADS)
    one.step((1, 0), attn="ulysses")
    one.step((1, 0), attn=attn)
    one.step((1, 0), attn=attn)
    end_gathered(one, expected)


def test_a_decode_leaves_a_scheduler_for_a_group_and_comes_back_gathered(world: World, expected: Expected) -> None:
    prompt, count = prompt_of(70, 12), 60
    one = ScaledDecode(world, "taken-up", prompt, count, ())
    world.ask(2, one.name, prompt, max_tokens=count, logprobs=0)
    world[2].until(lambda: len(world[2].deltas.get(one.name, ())) >= 3 or None)
    world[2].tell(PauseRequest(one.name))
    staged = world[2].wait(OutputDelta, one.name)
    one.deltas = list(world[2].deltas.pop(one.name))
    assert 3 <= len(one.said) < count, "it was taken out while it decoded"
    assert staged.staged == len(prompt) + len(one.said) - 1
    one.parts, one.held = [Part(staged.staged, (2,))], {2}
    one.step((0, 2), home=2)
    for group in ((0, 2), (0, 1, 2), (1, 0)):
        one.step(group)
    end_gathered(one, expected)


def test_a_decode_that_ends_with_the_token_under_way_is_not_staged(world: World, expected: Expected) -> None:
    prompt = prompt_of(30, 13)
    world.ask(1, "short", prompt, max_tokens=2, logprobs=0)
    world[1].tell(PauseRequest("short"))
    world[1].tell(PauseRequest("nobody"))
    let_arrive()
    found = world[1].until(
        lambda: (
            (d := world[1].deltas.get("short"))
            and (d[-1].finish or any(isinstance(w, OutputDelta) for w in world[1].said))
        )
    )
    assert found
    if not world[1].deltas["short"][-1].finish:
        assert world[1].wait(OutputDelta, "short").staged == len(prompt)
    world.forget("short")
    world.clean()
