"""Two requests that cross between full instances wait for ever; when one lets go of its KV, the other goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.instance.hand_overs import arrived, end, params, rest, send
from tests.instance.instance_world import TOKEN_BYTES, Part, World
from tests.instance.span_answers import Expected, check_answer, prompt_of

from headway.runtime.engine.protocol import AbortRequest, ReserveKv


def test_crossing_reservations_cause_no_deadlock(checkpoint: Path, expected: Expected) -> None:
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
