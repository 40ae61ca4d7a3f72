"""Join-shortest-queue: the measures of a queue's length, and LARS inside the replicas."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.helpers.cluster_worlds import TETRIS_CONTEXT, TETRIS_LINKS

from headway.core.request import Request
from headway.perf.hardware import LINKS
from headway.policy.placement.contract import (
    ClusterInstance,
    ClusterLinks,
    ClusterSnapshot,
    ClusterState,
    EnqueueRequest,
    RequestArrived,
)
from headway.policy.placement.registry import make_placement
from headway.sim.cluster.build import run_cluster
from headway.sim.metrics import ttft_s
from headway.sim.scenario import parse_scenario


def chosen(state: ClusterState, queue: str, cached: tuple[int, ...] = (), *, affinity: bool = False) -> int:
    policy = make_placement("jsq", TETRIS_CONTEXT, {"queue": queue, "affinity": affinity})
    request = Request(id="r0", arrival_s=5.0, prompt_tokens=1000, max_output_tokens=5)
    (action,) = policy.on_event(RequestArrived(request, cached), ClusterSnapshot(state, 5.0))
    assert isinstance(action, EnqueueRequest)
    assert (action.phase, action.concurrent, len(action.group)) == ("all", False, 1)
    return action.group[0]


def test_each_queue_measure_selects_its_own_replica() -> None:
    state = ClusterState([ClusterInstance(id=i, node=i) for i in range(4)], TETRIS_LINKS)
    rows = [(6.0, 100, 9), (5.5, 300, 5), (7.0, 50, 8), (8.0, 400, 2)]
    for i, (free_at_s, queued, running) in enumerate(rows):
        state.put(msgspec.structs.replace(state.instances[i], free_at_s=free_at_s, queued=queued, running=running))
    assert [chosen(state, queue) for queue in ("seconds", "tokens", "requests")] == [1, 2, 3]
    state.put(msgspec.structs.replace(state.instances[0], free_at_s=1.0))  # free since then
    assert chosen(state, "seconds") == 0
    state.put(msgspec.structs.replace(state.instances[3], free_at_s=2.0))  # equally free, with fewer requests
    assert chosen(state, "seconds") == 3


def test_affinity_weighs_what_is_cached_against_the_queue() -> None:
    state = ClusterState([ClusterInstance(id=i, node=i) for i in range(3)], TETRIS_LINKS)
    state.put(msgspec.structs.replace(state.instances[2], free_at_s=5.01, queued=300, running=1))
    for queue in ("seconds", "tokens"):
        assert chosen(state, queue, (0, 0, 960)) == 0
        # by seconds: the copy to an idle replica is faster than the wait at the one that has it
        assert chosen(state, queue, (0, 0, 960), affinity=True) == (2 if queue == "tokens" else 0)
        assert chosen(state, queue, (0, 960, 960), affinity=True) == 1
    slow = LINKS["ib-200"]
    state.links = ClusterLinks(
        inside=TETRIS_LINKS.inside, across=msgspec.structs.replace(slow, bytes_per_s=slow.bytes_per_s / 99)
    )
    assert chosen(state, "seconds", (0, 0, 960), affinity=True) == 2
    state.put(msgspec.structs.replace(state.instances[2], free_at_s=60.0, queued=5000))
    for queue in ("seconds", "tokens"):
        assert chosen(state, queue, (0, 0, 960), affinity=True) == 0


def run(policy: str) -> dict[str, list[float]]:
    data: dict[str, Any] = {
        "cluster": {"placement": "jsq", "pools": [{"count": 4}]},
        "policy": {"policy": policy},
        "workload": {
            "qps": 6.0,
            "requests": 120,
            "mix": [
                {"class": "chat", "share": 0.8, "prompt": "uniform:200-2000", "output": "uniform:2-40"},
                {"class": "document", "share": 0.2, "prompt": "uniform:20k-60k", "output": "uniform:2-40"},
            ],
        },
    }
    result = run_cluster(parse_scenario(data), 0)
    waits: dict[str, list[float]] = {"chat": [], "document": []}
    for record in result.sim.records:
        assert record.ok
        assert len(record.token_s) == record.output_tokens
        waits[record.klass].append(ttft_s(record) or 0.0)
    assert all(use.prefill_tokens > 0 for use in result.sim.replicas)
    return waits


def test_lars_in_replicas_shortens_waits_of_chats() -> None:
    lars, fcfs = run("lars"), run("fcfs")
    assert sorted(lars["chat"])[-6] < 0.7 * sorted(fcfs["chat"])[-6]
