"""What instances hold of the system after many hand-overs and restarts: what they held after the first few."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.instance.hand_overs import move, params, rest
from tests.instance.instance_world import Part, World
from tests.instance.span_answers import prompt_of

TURNS, RESTARTS = 40, 2
WARM = 20
"""Turns after which everything that is made once has been made."""
_MORE_BYTES = 16 << 20
"""By how much memory may differ: what an allocator keeps, not a prompt's KV a turn."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


class Held(NamedTuple):
    """Of a process. files: descriptors by what they are (socket, memfd, ...); maps: of shared memory."""

    files: Counter[str]
    threads: int
    maps: int
    resident: int


def held(pid: int) -> Held:
    files: Counter[str] = Counter()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(each)
        except FileNotFoundError:
            continue
        files["memfd" if "memfd:" in target else target.partition(":")[0] if ":" in target else "file"] += 1
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = Path(f"/proc/{pid}/maps").read_text().count("memfd:")
    return Held(files, int(status["Threads"]), maps, 1024 * int(status["VmRSS"].split()[0]))


def family(pid: int) -> list[int]:
    """A process and those that it has started, and theirs."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += [int(each) for each in (task / "children").read_text().split()]
    return found


def all_held(world: World) -> list[list[Held]]:
    pids = [instance.process.pid for instance in world.instances]
    return [[held(each) for each in family(pid)] for pid in pids if pid is not None]


def turn(world: World, number: int) -> None:
    """A prompt over a group, its KV to another instance, which decodes it; nothing of it is left."""
    name, prompt = f"q{number}", prompt_of(90, number % 7)
    last = len(world.instances) - 1
    parts = [Part(60, (0,)), Part(30, (0, 1))] if last == 2 else [Part(90, (0,))]
    sources = parts[-1].group
    world.admit(name, prompt, (*sources, last), params(max_tokens=5))
    for index, part in enumerate(parts):
        world.compute(name, parts, index, preemptible=True)
        word = world.done(name, part)
    assert word.delta is not None
    move(world, name, sources, len(prompt), last)
    rest(world, last, name, prompt, word.delta, max_tokens=5)
    world.forget(name)
    for instance in world.instances:
        instance.hear()
        instance.said.clear()
        instance.deltas.clear()


def compare(now: list[list[Held]], before: list[list[Held]]) -> None:
    for instance, (many, few) in enumerate(zip(now, before, strict=True)):
        for process, (one, other) in enumerate(zip(many, few, strict=True)):
            assert one[:3] == other[:3], f"instance {instance}, process {process}"
            assert one.resident < other.resident + _MORE_BYTES, f"instance {instance}, process {process}"


@pytest.mark.parametrize(("instances", "ranks"), [(3, 1), (2, 2)], ids=["one process each", "two processes each"])
def test_many_migrations_and_restarts_leak_nothing(checkpoint: Path, instances: int, ranks: int) -> None:
    world = World(checkpoint, instances, kv_cache_bytes=4 << 20, tensor_parallel_size=ranks)
    last = instances - 1
    try:
        for number in range(WARM):
            turn(world, number)
        world.clean()
        before = all_held(world)
        for number in range(WARM, WARM + TURNS):
            turn(world, number)
        world.clean()
        compare(all_held(world), before)
        for number in range(RESTARTS):
            world[last].kill()
            world.again(last)
            for more in range(WARM):
                turn(world, 10_000 + WARM * number + more)
            world.clean()
        compare(all_held(world), before)
    finally:
        world.close()
