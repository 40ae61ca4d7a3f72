"""Small clusters whose spans and iterations take round numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from tests.helpers.unit_latency import small_machine

from headway.core.logs import EventSink
from headway.perf.hardware import LINKS, NetworkLink, model
from headway.perf.latency import eq1
from headway.perf.latency.groups import GroupShape
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.placement.contract import Action, ClusterInstance, ClusterLinks, ClusterSnapshot, Event
from headway.policy.placement.registry import PolicyContext
from headway.sim.cluster.simulation import ClusterSimulation
from headway.sim.cluster.state import ClusterSpec
from headway.sim.result import SimResult
from headway.sim.spec import InstanceSpec

TETRIS_CONTEXT = PolicyContext(latency=eq1.tetris_table1(), shape=model("llama-3-8b"))
TETRIS_LINKS = ClusterLinks(inside=LINKS["nvlink3"], across=LINKS["ib-200"])
"""What a policy is told of the A100s of Tetris's Table 1."""
LINK = NetworkLink(name="test", bytes_per_s=1e9, latency_s=0.0, source="test", efficiency=1.0)


def lines_into(lines: list[bytes]) -> EventSink:
    """Return a sink that appends each event's line to `lines`, as a log file has it."""
    return lambda kind, fields: lines.append(msgspec.json.encode({"event": kind, **fields}) + b"\n")


class PerToken:
    """`GroupLatency`: a millisecond a token, or another time, divided by the group's size, and a fixed time."""

    source = "test"

    def __init__(self, token_s: float = 1e-3, fixed_s: float = 0.0) -> None:
        self.token_s, self.fixed_s = token_s, fixed_s

    def prefill_s(self, past: int, tokens: int, group: GroupShape) -> float:
        return self.fixed_s + tokens * self.token_s / group.sp

    def solve_tokens(self, past: int, budget_s: float, group: GroupShape) -> int:
        return max(0, int((budget_s - self.fixed_s) / self.token_s * group.sp))


def cluster(
    count: int = 4,
    decode: int = 0,
    per_node: int = 2,
    backends: int = 4,
    balance: bool = False,
    pool: int = 64_000,
) -> ClusterSpec:
    """`count` mixed instances (prefill where there are decode ones), then decode instances on nodes of their own. pool:
    tokens of KV that each holds."""
    role = "prefill" if decode else "mixed"
    first = [ClusterInstance(id=i, node=i // per_node, role=role, capacity=pool) for i in range(count)]
    nodes = -(-count // per_node)
    rest = [ClusterInstance(id=count + i, node=nodes + i, role="decode", capacity=pool) for i in range(decode)]
    config = SchedulerConfig(
        policy="fcfs",
        chunking="whole",
    )

    def engine(group: Sequence[ClusterInstance]) -> InstanceSpec:
        return InstanceSpec(config=config, latency=small_machine(), kv_tokens=pool * len(group), block_tokens=16)

    return ClusterSpec(
        instances=(*first, *rest),
        engine=engine,
        spans=PerToken(),
        shape=model("llama-3-8b"),
        links=ClusterLinks(inside=LINK, across=LINK),
        backends=backends,
        balance=balance,
    )


def run_to_end(simulation: ClusterSimulation) -> SimResult:
    """The result of a whole run, after which no block is in use."""
    simulation.run_events()
    for engine in simulation.backend.engines.values():
        engine.replica.block_manager.check()
        assert engine.replica.block_manager.used_tokens == 0
    return simulation.result().sim


def scripted(**decide: Callable[[Any, ClusterSnapshot], Sequence[Action]]) -> Scripted:
    """A policy from a function for each kind of event that it acts on, by the event's class."""

    def decided(event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        one = decide.get(type(event).__name__)
        return [] if one is None else one(event, view)

    return Scripted(decided)


class Scripted:
    """A policy from a function; keeps the events that it was told, with their times."""

    def __init__(self, decide: Callable[[Event, ClusterSnapshot], Sequence[Action]]) -> None:
        self._decide = decide
        self.heard: list[tuple[float, Event]] = []
        self.wake_s: float | None = None

    def on_event(self, event: Event, view: ClusterSnapshot) -> Sequence[Action]:
        self.heard.append((view.now_s, event))
        return self._decide(event, view)

    def next_wakeup(self, now: float) -> float | None:
        return self.wake_s if self.wake_s is not None and self.wake_s > now else None

    def times(self, kind: type) -> list[float]:
        return [at for at, event in self.heard if type(event) is kind]
