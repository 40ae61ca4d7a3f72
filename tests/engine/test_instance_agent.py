"""Runs in an engine without a model: their order, their room, and every way in which they end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.engine_fixtures import frame, make_core, submit
from tests.helpers.fake_executor import FakeExecutor

from headway.core.batch import EmittedToken, ManualClock
from headway.core.errors import UnavailableError
from headway.core.request import SamplingParams, SpanTask
from headway.kv.staged_kv import span_kv_name
from headway.runtime.cluster.agent import InstanceAgent
from headway.runtime.engine.core import EngineCore
from headway.runtime.engine.protocol import (
    AbortRequest,
    ComputeSpan,
    FromInstance,
    PauseRequest,
    PeerLostError,
    ResumeSpan,
    SpanTaskDone,
    SpanTaskLost,
    SpanTaskPaused,
    SubmitRequest,
)
from headway.runtime.engine.service import EngineService
from headway.runtime.kv_transfer.peers import PeerNetwork

LAYERS = 4


@dataclass
class Computing:
    """`Computes` of four layers, which does what `at` says when it begins a layer: (request, layer) to anything."""

    at: dict[tuple[str, int], Callable[[], object]] = field(default_factory=dict)
    done: list[tuple[str, int]] = field(default_factory=list)
    layers: dict[str, int] = field(default_factory=dict)
    draws: dict[str, bool] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    slots: dict[str, list[Sequence[tuple[int, int]]]] = field(default_factory=dict)
    moves: bool = False

    def admit(self, name: str, prompt: memoryview, params: SamplingParams, output: tuple[int, ...]) -> None:
        self.slots[name] = []

    def begin(
        self,
        compute: ComputeSpan,
        allocate_slots: Callable[[int, bool], Sequence[tuple[int, int]]],
        look: Callable[[], None],
    ) -> None:
        name = compute.id
        self.layers[name], self.draws[name], self.tokens[name] = 0, compute.last, compute.run.end
        anew = self.moves and bool(self.slots[name])
        self.slots[name].append(allocate_slots(compute.run.end, anew))

    def go(self, name: str, pause: Callable[[], bool] | None, behind: Callable[[int], None]) -> bool:
        while self.layers[name] < LAYERS:
            self.at.get((name, self.layers[name]), lambda: None)()
            stops = pause is not None and pause()
            self.layers[name] += 1
            self.done.append((name, self.layers[name]))
            behind(self.layers[name])
            if stops and self.layers[name] < LAYERS:
                return False
        return True

    def finish(self, name: str) -> tuple[EmittedToken | None, bool]:
        return (EmittedToken(name, 7, None) if self.draws[name] else None), self.moves and len(self.slots[name]) > 1

    def saved(self, name: str, index: int) -> SpanTaskPaused:
        layer = self.layers[name]
        return SpanTaskPaused(id=name, index=index, layer=layer, kv_bytes=1, activation_bytes=2, kv_bytes_at_end=3)

    def whole_tokens(self, name: str) -> int:
        return self.tokens.get(name, 0)

    def check(self, name: str) -> None: ...

    def forget(self, name: str) -> None:
        self.slots.pop(name, None)

    def __contains__(self, name: str) -> bool:
        return name in self.slots


class Turning:
    """The loop: what `soon` holds is told at its next turn."""

    def __init__(self, core: EngineCore, member: InstanceAgent) -> None:
        self.core, self.member = core, member
        self.said: list[FromInstance] = []
        self.soon: list[Callable[[], object]] = []
        self.steps = 0

    def send(self, message: FromInstance, measured: bool = False) -> None:
        self.said.append(message)

    def turn(self, step: bool, wait_s: float = 0.0) -> None:
        clock = self.core._clock
        assert isinstance(clock, ManualClock)
        clock.advance(wait_s)
        while self.soon:
            self.soon.pop(0)()
        if step:
            self.steps += 1
            self.core.step()
        self.member.turn(self)

    def work(self) -> list[str]:
        """Until nothing is left; the words in short."""
        while not self.member.idle:
            self.member.work(self)
        self.core.scheduler.check()
        return [f"{type(word).__name__} {word.id}" for word in self.said]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[tuple[Computing, Turning]]:
    core, computing = make_core(FakeExecutor(blocks=8)), Computing()
    peers = PeerNetwork(0, 0, f"unix:{tmp_path}/p")
    member = InstanceAgent(core, computing, peers, core._clock, 1.0)
    yield computing, Turning(core, member)
    peers.close()


def admit(loop: Turning, name: str, tokens: int = 40) -> None:
    prompt = frame([5] * tokens)
    loop.member.take(
        SubmitRequest(id=name, prompt_tokens=tokens, params=SamplingParams(max_tokens=4), phase="spans"),
        prompt,
    )


def compute(loop: Turning, name: str, end: int = 40, index: int = 0, **fields: bool) -> None:
    run = SpanTask(0, end, (0,))
    loop.member.take(ComputeSpan(id=name, index=index, run=run, last=index == 0, **fields), None)


def used(loop: Turning) -> int:
    return loop.core.scheduler.block_managers[0].used_tokens


def test_spans_are_computed_in_the_order_of_their_messages(world: tuple[Computing, Turning]) -> None:
    _, loop = world
    for name in ("a", "b", "c"):
        admit(loop, name, 30)
        compute(loop, name, 30)
    assert loop.work() == ["SpanTaskDone a", "SpanTaskDone b", "SpanTaskDone c"]
    first = loop.said[0]
    assert isinstance(first, SpanTaskDone)
    assert first.delta is not None
    assert first.delta.tokens == (7,)
    assert used(loop) == 3 * 32
    for name in ("a", "b", "c"):
        loop.member.take(AbortRequest(name), None)
    assert used(loop) == 0


def test_a_paused_span_lets_others_pass(world: tuple[Computing, Turning]) -> None:
    computing, loop = world
    admit(loop, "a")
    admit(loop, "b")
    compute(loop, "a", preemptible=True)
    compute(loop, "b")
    computing.at["a", 1] = lambda: loop.member.take(PauseRequest("a"), None)
    assert loop.work() == ["SpanTaskPaused a", "SpanTaskDone b"]
    paused = loop.said[0]
    assert isinstance(paused, SpanTaskPaused)
    assert (paused.layer, paused.kv_bytes, paused.activation_bytes) == (2, 1, 2)
    loop.member.take(ResumeSpan("a"), None)
    assert loop.work()[2:] == ["SpanTaskDone a"]
    assert computing.done == [("a", 1), ("a", 2), *(("b", n) for n in (1, 2, 3, 4)), ("a", 3), ("a", 4)]
    computing.at.clear()
    loop.member.take(PauseRequest("a"), None)  # too late: it is no word about a later run
    compute(loop, "a", index=1, preemptible=True)
    assert loop.work()[3:] == ["SpanTaskDone a"]


@pytest.mark.parametrize("beside", [True, False])
def test_the_scheduler_steps_between_layers_where_it_may(world: tuple[Computing, Turning], beside: bool) -> None:
    _, loop = world
    admit(loop, "a")
    compute(loop, "a", beside=beside)
    loop.work()
    assert loop.steps == (LAYERS if beside else 0)


def test_a_forgotten_span_ends_after_its_layer_without_a_message(world: tuple[Computing, Turning]) -> None:
    computing, loop = world
    admit(loop, "a")
    compute(loop, "a")
    computing.at["a", 2] = lambda: loop.soon.append(lambda: loop.member.take(AbortRequest("a"), None))
    assert loop.work() == []
    assert computing.done[-1] == ("a", 3)
    assert used(loop) == 0
    compute(loop, "a")
    assert loop.work() == []  # nobody knows it


@pytest.mark.parametrize("error", [PeerLostError("instance 3 is gone"), ValueError("a shape is off")])
def test_a_failing_span_is_lost_and_nothing_else(world: tuple[Computing, Turning], error: Exception) -> None:
    computing, loop = world

    def fail() -> None:
        raise error

    admit(loop, "a")
    compute(loop, "a")
    computing.at["a", 1] = fail
    assert loop.work() == ["SpanTaskLost a"]
    word = loop.said[0]
    assert isinstance(word, SpanTaskLost)
    assert str(error) in word.why
    assert used(loop) == 0
    admit(loop, "b")
    compute(loop, "b")
    assert loop.work()[1:] == ["SpanTaskDone b"]


def test_the_scheduler_continues_while_a_span_waits_for_blocks(world: tuple[Computing, Turning]) -> None:
    _, loop = world
    for name in ("a", "b"):
        admit(loop, name, 100)
    compute(loop, "a", 100)
    assert loop.work() == ["SpanTaskDone a"]
    compute(loop, "b", 100)
    assert loop.work()[1:] == ["SpanTaskLost b"]  # a second has passed
    assert loop.steps > 100
    admit(loop, "c", 100)
    compute(loop, "c", 100)
    loop.soon.append(lambda: loop.soon.append(lambda: loop.member.take(AbortRequest("a"), None)))
    assert loop.work()[2:] == ["SpanTaskDone c"]
    admit(loop, "d", 1000)
    compute(loop, "d", 1000)
    assert loop.work()[3:] == ["SpanTaskLost d"]  # never
    stats = loop.core.stats()
    assert (stats.prefill_tokens_total, stats.run_tokens_total) == (200, 200), "what spans compute is counted"


def test_blocks_of_a_former_layout_are_freed(world: tuple[Computing, Turning]) -> None:
    computing, loop = world
    computing.moves = True
    admit(loop, "a")
    compute(loop, "a", 20, index=0)
    compute(loop, "a", 40, index=1)
    loop.work()
    assert [lease.request for lease in loop.core.scheduler.block_managers[0].leases()] == [span_kv_name("a", 1)]
    places = [np.concatenate([np.arange(f, f + n) for f, n in runs]) for runs in computing.slots["a"]]
    assert not np.intersect1d(*places).size  # type: ignore[call-overload]
    loop.member.take(AbortRequest("a"), None)
    assert used(loop) == 0


def test_a_decode_leaves_the_scheduler_for_a_group_that_takes_over_its_kv(world: tuple[Computing, Turning]) -> None:
    _, loop = world
    core = loop.core
    assert submit(core, "a", [5] * 40, max_tokens=20) is None
    while not core.scheduler.state.ready.members:  # type: ignore[attr-defined]
        core.step()
    loop.member.take(PauseRequest("a"), None)
    loop.member.take(PauseRequest("nobody"), None)
    while not core.staged:
        core.step()
    (staged,) = core.staged
    lease = core.scheduler.staged_kv.lease("a")
    assert lease is not None
    assert (staged.staged or 0) >= 40
    admit(loop, "a")
    run = SpanTask(staged.staged, staged.staged + 1, (0,), in_place=True)
    loop.member.take(ComputeSpan(id="a", index=1, run=run, home=0), None)
    assert loop.work() == ["SpanTaskDone a"]
    assert lease.request == span_kv_name("a"), "its KV is where it was"
    loop.member.take(
        ComputeSpan(id="a", index=2, run=SpanTask(staged.staged + 1, staged.staged + 2, (0,)), home=0), None
    )
    assert loop.work()[1:] == ["SpanTaskLost a"], "there is nothing to take up any more"
    assert used(loop) == 0


def test_a_request_forgotten_for_now_may_return(world: tuple[Computing, Turning], monkeypatch: Any) -> None:
    _, loop = world
    gone: list[str] = []
    monkeypatch.setattr(loop.member._peers, "forget", gone.append)
    for for_good in (False, True):
        admit(loop, "a")
        compute(loop, "a")
        loop.work()
        loop.member.take(AbortRequest("a", for_good=for_good), None)
        assert used(loop) == 0
        assert gone == (["a"] if for_good else [])


def test_a_run_ends_when_the_server_is_gone(tmp_path: Path) -> None:
    service = EngineService(f"ipc://{tmp_path}/e", ManualClock(), lambda: False)
    service._core, service._agent, service._executor_waits_on = make_core(), None, ()
    with pytest.raises(UnavailableError, match="the server is gone"):
        service.turn(False)
    service.close()
