"""Instances, links and the router of a live cluster fail at random: no accepted request is lost, no answer changes.

A run is a seed: which requests come when, and what is done to whom at which moment (a moment of the cluster's, so that
it is met on any machine; how threads and processes run beside each other is not in the seed's hands). Runs of one
policy share a cluster, and begin while what an earlier one has hurt is still starting again. One alone:
`-k "[pecsched-3]"`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.chaos_cluster import LENGTHS, MOST, Cluster, Plan, go
from tests.helpers.cluster_probe import APART, MIXED, write
from tests.helpers.greedy_reference import GreedyReference, prompt_of

from headway.cli.main import main

SHORT = {"long_tokens": 500, "long_sp": 2}
RINGS = {**SHORT, "long_replicas": "fixed"}
IN_PLACE = {"group_decode": "in-place", "kv_cache_memory": "1M"}
TWO = {"tensor_parallel_size": 2}
CLUSTERS: dict[str, tuple[str, object, object]] = {
    "pecsched": ("pecsched", RINGS, APART),
    "tetris": ("tetris", {}, APART),
    "ladder": ("ladder", {}, APART),
    "fixed-sp": ("fixed-sp", {"sp": 2}, APART),
    "loongserve": ("loongserve", {}, APART),
    "pecsched-mixed": ("pecsched", {**RINGS, "disaggregate": False}, MIXED),
    "loongserve-mixed": ("loongserve", {}, MIXED),
    "fifo-mixed": ("fifo", SHORT, MIXED),
    "jsq-mixed": ("jsq", {}, MIXED),
    "tetris-ranks": ("tetris", {"sizes": [1, 2]}, APART),
    "pecsched-ranks": ("pecsched", RINGS, APART),
    "loongserve-in-place": ("loongserve", {"decode_batch": 1}, MIXED),
}
ALONE = ("loongserve-mixed", "jsq-mixed")
"""Where an instance may do all that there is to do alone."""
NAMES = list(CLUSTERS)
TURNS = 3


PROMPTS = [prompt_of(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def wanted(reference: GreedyReference) -> list[list[int]]:
    return [reference.tokens(prompt, MOST) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, llama: Path) -> Iterator[Cluster]:
    placement, options, pools = CLUSTERS[request.param]
    folder = Path(tempfile.mkdtemp(prefix="hw-chaos-"))
    ranks, in_place = request.param.endswith("-ranks"), request.param.endswith("-in-place")
    settings = {**(TWO if ranks else {}), **(IN_PLACE if in_place else {})}
    file = write(folder, llama, placement, options, pools, worker_timeout="3", max_restarts=100, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        linked = request.param not in ALONE
        running = Cluster(folder, file, linked, hands_over=linked and not in_place, ranks=2 if ranks else 1)
        try:
            yield running
            running.end()
            print(running.struck)
            assert running.struck["sockets"] >= running.struck["cut"] or not running.linked
            for log in running.logs:
                assert main(["cluster", file, "--replay", str(log)]) == 0, "its log is decided otherwise"
        finally:
            running.stop()
            shutil.rmtree(folder, ignore_errors=True)


CASES = [
    pytest.param(
        name,
        turn,
        marks=[pytest.mark.xdist_group(name), pytest.mark.long],
        id=f"{name}-{turn}",
    )
    for name in NAMES
    for turn in range(TURNS)
]


@pytest.mark.parametrize(("cluster", "turn"), CASES, indirect=["cluster"])
def test_nothing_is_lost_and_no_answer_changes(
    cluster: Cluster, turn: int, wanted: list[list[int]], request: pytest.FixtureRequest
) -> None:
    plan = Plan.of(TURNS * NAMES.index(request.node.callspec.params["cluster"]) + turn)
    print(plan)
    go(cluster, plan, PROMPTS, wanted)
