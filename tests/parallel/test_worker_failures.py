"""Ranks that are killed, hung or cut off at any moment: a pause, and then the very same tokens."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.checkpoints import make_tiny
from tests.helpers.greedy_reference import prompt_of
from tests.helpers.marks import quick_first
from tests.parallel.rank_processes import make_rank_config
from tests.parallel.rank_serving import Ask, greedy, make_core, serve

from headway.runtime.engine.config import RestartLimit
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.liveness import IterationDeadline
from headway.runtime.executor.multi_process import MultiProcessExecutor, ProcessTransport
from headway.runtime.executor.plans import RankConfig

BLOCKS, BLOCK = 128, 8
TIMEOUT_S = 1.5
_PIDFD_GETFD = 438


def rank_config(folder: Path, tp: int, stages: int, kvp: int = 1) -> RankConfig:
    return make_rank_config(folder, tp, stages, kvp=kvp, kv_blocks=BLOCKS, patience_s=30.0, timeout_s=TIMEOUT_S)


class World:
    """Ranks that start again when they are lost. `pids` are those of the newest."""

    def __init__(self, config: RankConfig) -> None:
        self.config = config
        self.wires: list[ProcessTransport] = []
        first = self.wire()
        first.start()
        deadline = IterationDeadline(config.timeout_s, 20.0)
        self.executor = MultiProcessExecutor(first, config.engine.layout, self.wire, deadline)

    def wire(self) -> ProcessTransport:
        wire = ProcessTransport(self.config)
        self.wires.append(wire)
        return wire

    @property
    def pids(self) -> list[int]:
        return [int(process.pid or 0) for process in self.wires[-1].processes]

    def core(self, **scheduler: Any) -> EngineCore:
        layout = self.config.engine.layout
        core = make_core(self.executor, BLOCKS, BLOCK, stages=layout.stages, kv_parallel=layout.kvp, **scheduler)
        # A scheduler numbers its groups of decodes anew, and the ranks remember those of the one before.
        for each in getattr(core.scheduler, "groups", (core.scheduler,)):
            assert each._epochs == 0
            each._epochs = self.executor.plans
        core._restarts = RestartLimit(100, "the workers")
        core.info = msgspec.structs.replace(core.info, max_model_len=BLOCKS * BLOCK)
        return core


@contextmanager
def world(config: RankConfig) -> Iterator[World]:
    made = World(config)
    try:
        yield made
    finally:
        made.executor.close()
        for wire in made.wires:
            assert all(process.ended for process in wire.processes)
            assert not Path(wire._directory).exists()


OnStep = Callable[[dict[str, list[int]]], None]


def serve_through(core: EngineCore, asks: list[Ask], on_step: OnStep) -> list[list[int]]:
    """All answers. `on_step` sees what has been told before every step, and may do harm."""
    return serve(core, asks, wait_s=1.0, on_step=on_step)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def hang(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def cut(pid: int) -> None:
    """End every connection of a process, to the engine and to other ranks: both sides see it closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(entry).startswith("socket:"):
                    copy = libc.syscall(_PIDFD_GETFD, process, int(entry.name), 0)
                    if copy < 0 and ctypes.get_errno() == 1:
                        pytest.skip("this system does not let a test take a child's sockets (pidfd_getfd: EPERM)")
                    if copy >= 0:
                        with socket.socket(fileno=copy) as taken:
                            taken.shutdown(socket.SHUT_RDWR)
    except FileNotFoundError:
        pass
    finally:
        os.close(process)


FAULTS = {"killed": kill, "hung": hang, "cut off": cut}


ASKS = [
    Ask(prompt_of(1, 400), 16),
    Ask(prompt_of(2, 20), 24, 2),
    Ask(prompt_of(3, 3), 24, 5),
    Ask(prompt_of(4, 50), 16, 0, {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.2, "logprobs": 2}),
]
LAYOUTS = [(2, 1, 1), (1, 2, 1)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


@pytest.fixture(scope="module")
def wanted(llama: Path) -> list[list[int]]:
    """Greedy by transformers; the one that samples by an undisturbed run."""
    with world(rank_config(llama, 1, 2)) as one:
        calm = serve_through(one.core(chunking="static:8"), ASKS, lambda told: None)
    assert calm[:3] == [greedy(llama, ask.prompt, ask.count) for ask in ASKS[:3]]
    return calm


class Harm:
    """Does one harm when a moment has come: `plans` sent, tokens `told`."""

    def __init__(self, one: World, fault: str, victim: int, moment: str) -> None:
        self.one, self.fault, self.victim, self.moment = one, FAULTS[fault], victim, moment
        self.done_s = 0.0
        self.began = one.executor.plans

    def __call__(self, told: dict[str, list[int]]) -> None:
        plans = self.one.executor.plans - self.began
        come = {
            "first plan": plans >= 1,
            "long prefill": plans >= 20,
            "decode": len(told["1"]) >= 6,
            "late decode": len(told["0"]) >= 8,
        }
        if not self.done_s and come[self.moment]:
            self.fault(self.one.pids[self.victim])
            self.done_s = time.monotonic()


MOMENTS = ("first plan", "long prefill", "decode", "late decode")
HALF = {"killed": MOMENTS, "hung": MOMENTS[1::2], "cut off": MOMENTS[::2]}


@pytest.mark.parametrize(
    ("tp", "stages", "kvp"),
    [pytest.param(*layout, marks=() if layout == (1, 2, 1) else pytest.mark.long) for layout in LAYOUTS],
)
@pytest.mark.parametrize("fault", quick_first(list(FAULTS)))
def test_every_answer_is_that_of_an_undisturbed_run(
    llama: Path, wanted: list[list[int]], tp: int, stages: int, kvp: int, fault: str
) -> None:
    with world(rank_config(llama, tp, stages, kvp)) as one:
        for number, moment in enumerate(HALF[fault]):
            core = one.core(chunking="static:8")
            harm = Harm(one, fault, number % 2, moment)
            before = len(one.wires)
            assert serve_through(core, ASKS, harm) == wanted, moment
            assert harm.done_s
            assert len(one.wires) == before + core.stats().recoveries_total
            if fault != "cut off":  # a connection to the engine alone comes back by itself
                assert core.stats().recoveries_total == 1, moment
                assert core.stats().lost_tokens_total > 0 or moment == "first plan"


@pytest.mark.parametrize(("tp", "stages"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long)])
def test_cached_prefixes_are_lost_with_the_ranks_and_computed_again(llama: Path, tp: int, stages: int) -> None:
    document = prompt_of(5, 300)
    asks = [Ask([*document, *prompt_of(20 + i, 4)], 12) for i in range(3)]
    wanted = [greedy(llama, ask.prompt, ask.count) for ask in asks]
    with world(rank_config(llama, tp, stages)) as one:
        core = one.core(cached=True, chunking="static:16")
        cache = core.scheduler.block_managers[0].cache
        assert cache is not None
        assert serve_through(core, asks[:1], lambda told: None) == wanted[:1]
        before = cache.hit_tokens
        harm = Harm(one, "killed", 1, "first plan")
        assert serve_through(core, asks, harm) == wanted
        assert harm.done_s
        assert core.stats().recoveries_total == 1
        # All three hit what the first had left; after the loss two of them at most what the third computes again.
        hits = cache.hit_tokens
        assert hits > before
        assert serve_through(core, asks, lambda told: None) == wanted
        assert cache.hit_tokens - hits == 3 * (300 // 8 * 8)


def noticed(core: EngineCore, within_s: float) -> float:
    began = time.monotonic()
    while not core.recovering:
        core.step(0.05)
        assert time.monotonic() - began < within_s
    return time.monotonic() - began


@pytest.mark.parametrize(("fault", "within_s"), [(kill, 1.0), (hang, TIMEOUT_S + 2.0)])
def test_an_idle_engine_notices_in_the_stated_time_and_serves_again(
    llama: Path, wanted: list[list[int]], fault: object, within_s: float
) -> None:
    with world(rank_config(llama, 1, 2)) as one:
        core = one.core()
        fault(one.pids[1])
        noticed(core, within_s)
        assert serve_through(core, ASKS[1:3], lambda told: None) == wanted[1:3]


def test_a_rank_that_pauses_for_less_is_waited_for(llama: Path, wanted: list[list[int]]) -> None:
    paused: list[int] = []

    def pause(told: dict[str, list[int]]) -> None:
        if not paused and len(told["0"]) >= 4:
            paused.append(one.pids[0])
            hang(paused[0])
            os.kill(os.getpid(), 0)
            time.sleep(TIMEOUT_S / 3)
            os.kill(paused[0], signal.SIGCONT)

    with world(rank_config(llama, 1, 2)) as one:
        core = one.core()
        assert serve_through(core, ASKS[1:3], pause) == wanted[1:3]
        assert paused
        assert core.stats().recoveries_total == 0


def test_a_rank_that_is_killed_while_it_starts_again_costs_another_restart(
    llama: Path, wanted: list[list[int]]
) -> None:
    killed: list[int] = []

    def harm(told: dict[str, list[int]]) -> None:
        if not killed and len(told["0"]) >= 4:
            killed.append(one.pids[1])
            kill(one.pids[1])
        elif core.recovering and len(killed) == 1 and len(one.wires) == 2 and len(one.wires[1].processes) == 2:
            killed.append(one.pids[0])
            kill(one.pids[0])

    with world(rank_config(llama, 1, 2)) as one:
        core = one.core()
        step = core.step
        core.step = lambda wait_s=None: step(0.001)  # type: ignore[method-assign]
        assert serve_through(core, ASKS[1:3], harm) == wanted[1:3]
        assert len(killed) == 2
        assert core.stats().recoveries_total == 2


@pytest.mark.long
@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 1, 2), (2, 2, 1)])
def test_ten_random_faults_in_each_layout_change_no_answer(
    llama: Path, wanted: list[list[int]], layout: tuple[int, int, int]
) -> None:
    """The same requests over and over, with random faults to random ranks at random moments."""
    rng, left = random.Random(sum(layout)), 10
    tp, stages, kvp = layout
    with world(rank_config(llama, tp, stages, kvp)) as one:
        shards = {"kv_shard_tokens": 128} if kvp > 1 else {}
        core = one.core(chunking="static:8", **shards)
        while left:
            at = {rng.randrange(1, 110) for _ in range(min(left, 3))}
            steps = 0

            def harm(told: dict[str, list[int]]) -> None:
                nonlocal steps, left
                steps += 1
                if steps in at and not core.recovering:  # noqa: B023
                    left -= 1
                    name = rng.choice([*FAULTS, "killed"])
                    FAULTS[name](rng.choice(one.pids))

            assert serve_through(core, ASKS, harm) == wanted, left
