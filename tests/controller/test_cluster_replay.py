"""Replay of a decision log gives the same decisions, or names the first one that differs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.cluster_worlds import PerToken, cluster, lines_into
from tests.helpers.controller_chaos import LAYERS, Chaos, Restless

from headway.control.log import RecordingController, replay
from headway.core.errors import ConfigError
from headway.policy.placement.contract import (
    Action,
    ClusterSnapshot,
    EnqueueRequest,
    Event,
    InstanceJoined,
    PlacementPolicy,
    RatesReplaced,
    RateTable,
    RequestArrived,
)
from headway.policy.placement.registry import PolicyContext, make_placement
from headway.runtime.cluster.membership import PlacementChain
from headway.sim.cluster.simulation import ClusterSimulation, simulate_cluster
from headway.sim.spec import NoiseSpec, RunSpec
from headway.sim.workload import TraceRequest

OPTIONS: dict[str, dict[str, object]] = {
    "fifo": {"long_tokens": 8000, "long_sp": 2},
    "jsq": {},
    "priority": {"long_tokens": 8000, "long_sp": 2},
    "reservation": {"long_tokens": 8000, "long_sp": 1, "reserved": 1},
    "tetris": {},
    "fixed-sp": {},
    "ladder": {},
    "loongserve": {},
    "pecsched": {"long_tokens": 8000, "long_sp": 2},
}
TRAFFIC = [TraceRequest(0.11 * i, 16_000 if i % 9 == 3 else 150 + 37 * (i % 7), 3 + i % 5) for i in range(60)]

SCHEMA = "headway.cluster.log/6"


def made(name: str) -> PlacementPolicy:
    spec = cluster()
    return make_placement(name, PolicyContext(latency=PerToken(), shape=spec.shape), OPTIONS[name])


def recorded(name: str, policy: PlacementPolicy) -> list[bytes]:
    lines: list[bytes] = []
    decode = 0 if name == "jsq" else 2
    run = RunSpec(noise=NoiseSpec(kind="lognormal", amount=0.3), seed=5, patience_s=20.0)
    simulate_cluster(cluster(4, decode), policy, TRAFFIC, run, record=lines_into(lines))
    return lines


@cache
def fifo_log() -> list[bytes]:
    return recorded("fifo", made("fifo"))


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_simulation_replays_exactly(name: str) -> None:
    lines = recorded(name, made(name))
    decisions, difference = replay(lines, lambda about: made(name))
    assert difference is None
    assert decisions > 2 * len(TRAFFIC)


class Contrary:
    """A policy that decides differently for one request."""

    def __init__(self, policy: PlacementPolicy, name: str) -> None:
        self.policy, self.name = policy, name

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        actions = self.policy.on_event(event, view)
        if isinstance(event, RequestArrived) and event.request.id == self.name:
            return [EnqueueRequest(self.name, (0,))]
        return actions

    def next_wakeup(self, now: float) -> float | None:
        return self.policy.next_wakeup(now)


def test_rates_that_were_replaced_while_serving_are_replaced_in_the_replay() -> None:
    """In the middle of the run; a policy that is made afterwards, as instances come and go, has them too."""
    table = RateTable(points=((0.0, 0.9),))
    lines, replaced = list[bytes](), list[bool]()
    chain = PlacementChain(lambda: made("tetris"))

    class Replaced(ClusterSimulation):
        def on_instant_end(self) -> None:
            if self.now > 3.0 and len(replaced) == 0:
                replaced.append(chain.has_rates)
                self.controller.woken(self.now, RatesReplaced(table))
                self.controller.woken(self.now, InstanceJoined(0))
            super().on_instant_end()

    Replaced(cluster(4, 2), chain, TRAFFIC, RunSpec(seed=5), record=lines_into(lines)).run_events()
    assert replaced == [True]
    for others in ([], [b"RatesReplaced"]):
        kept = [line for line in lines if not any(other in line for other in others)]
        _, difference = replay(kept, lambda about: PlacementChain(lambda: made("tetris")))
        assert (difference is None) == (not others)
    assert not PlacementChain(lambda: made("jsq")).has_rates


def test_first_different_decision_is_reported() -> None:
    lines = fifo_log()
    decisions, difference = replay(lines, lambda about: Contrary(made("fifo"), "r30"))
    assert decisions > 30
    assert difference is not None
    assert difference.at_s == pytest.approx(TRAFFIC[30].arrival_s)
    (kind, fields), actions = difference.replayed
    assert (kind, fields["request"]["id"]) == ("RequestArrived", "r30")  # type: ignore[has-type]
    assert actions[0][0] == "EnqueueRequest"  # type: ignore[has-type]


def test_other_predictions_in_the_log_change_decisions() -> None:
    """With other predicted times in the log, the replay follows the log and reports that decisions differ."""
    lines = recorded("tetris", made("tetris"))
    later = [msgspec.json.decode(line) for line in lines]
    for line in later:
        if line["event"] == "instance":
            line["instance"]["free_at_s"] = 3.0 * line["instance"].get("free_at_s", 0.0)
    _, difference = replay([msgspec.json.encode(line) for line in later], lambda about: made("tetris"))
    assert difference is not None


def test_truncated_log_replays_up_to_its_end() -> None:
    lines = fifo_log()
    assert replay([*lines[:-1], lines[-1][:5]], lambda about: made("fifo"))[1] is None
    for others in (lines[1:], [b"torn", *lines[1:]], [lines[0].replace(b"log/6", b"log/5"), *lines[1:]], []):
        with pytest.raises(ConfigError, match="its first line should name the schema headway"):
            replay(others, lambda about: made("fifo"))


@pytest.mark.parametrize("garbage", [b"GARBAGE\n", b'{"do":"arr\n', b"\0" * 99 + b"\n", b"[1]\n", b"\xff\n", b"\n"])
def test_log_damaged_before_its_end_is_refused_with_the_line(garbage: bytes) -> None:
    lines = fifo_log()
    with pytest.raises(ConfigError, match="line 41 of the log cannot be read, and others follow"):
        replay([*lines[:40], garbage, *lines[41:]], lambda about: made("fifo"))
    # the same as a last line is a torn write, and left out
    assert replay([*lines, garbage], lambda about: made("fifo"))[1] is None


@pytest.mark.parametrize(
    ("number", "line", "why"),
    [
        (1, {"event": "start", "schema": SCHEMA, "links": {}}, "line 1 of the log cannot be replayed: no 'about'"),
        (
            1,
            {"event": "start", "schema": SCHEMA, "about": 1, "links": 1},
            "line 1 of the log cannot be replayed: Expected",
        ),
        (3, {"x": 1}, "line 3 of the log is not of a cluster's log"),
        (41, {"event": "instance", "instance": 1}, "line 41 of the log cannot be replayed: "),
        (
            41,
            {"event": "decided", "of": ["RequestArrived", {}], "at_s": 0.0},
            "line 41 of the log cannot be replayed: ",
        ),
        (41, {"event": "instance", "instance": {"id": 99, "node": 0}}, "line 41 of the log cannot be replayed: "),
    ],
)
def test_a_line_that_is_incomplete_or_of_another_kind_is_refused_with_its_number(
    number: int, line: dict[str, object], why: str
) -> None:
    lines = [*fifo_log()]
    lines[number - 1] = msgspec.json.encode(line) + b"\n"
    with pytest.raises(ConfigError, match=why):
        replay(lines, lambda about: made("fifo"))


@settings(max_examples=25)
@given(st.integers(0, 1 << 30))
def test_losses_closings_and_joins_replay_exactly(seed: int) -> None:
    lines: list[bytes] = []
    chaos = Chaos(seed)
    policy = chaos.policy
    chaos.controller = RecordingController(
        chaos.controller.cluster,
        chaos,
        policy,
        layers=LAYERS,
        receive_backends=2,
        sink=lines_into(lines),
        about={"seed": seed},
    )
    for _ in range(150):
        chaos.step()
    decisions, difference = replay(lines, lambda about: Restless(about["seed"]))
    assert difference is None
    assert decisions > 150
