"""Instances are killed, stopped and told to forget at random moments of runs: answers stay, nothing is left over."""

from __future__ import annotations

import random
import signal
import time

import pytest
from tests.helpers.polling import let_arrive
from tests.instance.instance_world import Part, World
from tests.instance.span_answers import GREEDY, Expected, check_answer, prompt_of

from headway.runtime.engine.protocol import (
    AbortRequest,
    OutputDelta,
    PauseRequest,
    ResumeSpan,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
)

EVENTS = ("none", "kill", "stop", "forget", "pause")


def parts_of(chance: random.Random) -> list[Part]:
    order = chance.sample(range(4), 4)
    sizes = sorted(chance.choices((1, 2, 4), k=chance.randint(1, 3)))
    attn = chance.choice(("ring", "striped", "ulysses"))
    return [Part(chance.randint(1, 160), tuple(order[:size]), attn, rows=chance.choice((0, 8, 30))) for size in sizes]


class Attempt:
    """One attempt at a prompt, with one event on the way."""

    def __init__(self, world: World, name: str, prompt: list[int], parts: list[Part], chance: random.Random) -> None:
        self.world, self.name, self.prompt, self.parts, self.chance = world, name, prompt, parts, chance

    def go(self, event: str) -> OutputDelta | None:
        """The first token; None when the attempt was lost. Whoever was hurt is there again afterwards."""
        world, chance = self.world, self.chance
        group = self.parts[-1].group
        victim = chance.choice(group)
        hurt = chance.randrange(len(self.parts))
        world.admit(self.name, self.prompt, group, GREEDY)
        for index, part in enumerate(self.parts):
            world.compute(self.name, self.parts, index, preemptible=True)
            struck = event != "none" and index == hurt and (event == "forget" or victim in part.group)
            if struck:
                let_arrive(chance.random() * 0.03)
                self.strike(event, victim, part)
                if event == "forget":
                    return None
            words = self.words(part, victim if event in ("kill", "stop") and struck else None)
            if words is None:
                return None
            (delta,) = [word.delta for word in words[:1]]
        return delta

    def strike(self, event: str, victim: int, part: Part) -> None:
        if event == "kill":
            self.world[victim].kill()
        elif event == "stop":
            self.world[victim].signal(signal.SIGSTOP)
        elif event == "forget":
            self.world.forget(self.name)
        else:
            self.world[part.group[0]].tell(PauseRequest(self.name))

    def words(self, part: Part, victim: int | None) -> list[SpanTaskDone] | None:
        """What all of the group say; None: the run is lost, and forgotten everywhere."""
        world, found = self.world, dict[int, SpanTaskDone | SpanTaskPaused]()
        end = time.monotonic() + 0.5
        while len(found) < len(part.group):
            for number in part.group:
                if number == victim:
                    continue
                one = world[number]
                one.hear(0.005)
                for word in [word for word in one.said if getattr(word, "id", None) == self.name]:
                    one.said.remove(word)
                    if isinstance(word, SpanTaskLost):
                        return self.give_up(victim)
                    found[number] = word
            if victim is not None and time.monotonic() > end:
                return self.give_up(victim)
            assert time.monotonic() < end + 10.0, (self.name, found)
        if any(isinstance(word, SpanTaskPaused) for word in found.values()):
            assert all(isinstance(word, SpanTaskPaused) for word in found.values())
            assert len({(word.tokens, word.layer) for word in found.values()}) == 1
            for number in part.group:
                world[number].tell(ResumeSpan(self.name))
            return self.words(part, victim)
        return [found[number] for number in part.group]

    def give_up(self, victim: int | None) -> None:
        world = self.world
        for one in world.instances:
            if one.number != victim:
                one.tell(AbortRequest(self.name))
        if victim is not None:
            world.meet(without=(victim,))
            if world[victim].process.is_alive():
                world[victim].kill()
            world.again(victim)


def soak(world: World, expected: Expected, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    for turn in range(rounds):
        parts = parts_of(chance)
        prompt = prompt_of(sum(part.tokens for part in parts), turn)
        for attempt in range(3):
            name = f"c{seed}.{turn}#{attempt}"
            delta = Attempt(world, name, prompt, parts, chance).go(chance.choice(EVENTS) if attempt < 2 else "none")
            world.forget(name)
            if delta is not None:
                check_answer([delta], *expected(prompt, 1))
                break
        else:
            pytest.fail(f"{name} was lost although nothing happened")
        for one in world.instances:
            one.hear()
            one.said.clear()
    world.clean()


def test_answers_are_unchanged_under_random_events(world: World, expected: Expected) -> None:
    soak(world, expected, 8, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_unchanged_under_many_random_events(world: World, expected: Expected, seed: int) -> None:
    soak(world, expected, 30, 100 + seed)
