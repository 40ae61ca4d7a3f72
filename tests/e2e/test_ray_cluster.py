"""A cluster on nodes of Ray, all of them on this machine: a node is lost in the midst of a prompt, and comes back."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cluster_probe import CLUSTER, instances, pid_of, write
from tests.helpers.cluster_streams import ANSWER_TOKENS, ClientStream, all_ready, computing
from tests.helpers.greedy_reference import GreedyReference, prompt_of
from tests.helpers.http_probe import metric
from tests.helpers.polling import until
from tests.helpers.process_tree import ends_soon, is_running
from tests.helpers.ray_nodes import RayNodes, ray_nodes

from headway.serving.load.convoy import ServerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]

PROMPT = prompt_of(5, 3900)
OTHER = prompt_of(6, 300)
WAIT_S = 120.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as made:
        yield made


PLACES: list[tuple[str, object, Any]] = [
    ("a ring over both hosts", {"sp": 2}, [{"count": 1}, {"count": 1, "host": 1}]),
    ("prefill there, decode here", {"sp": 1}, [{"role": "decode"}, {"role": "prefill", "host": 1}]),
]


@pytest.mark.parametrize(("options", "pools"), [case[1:] for case in PLACES], ids=[case[0] for case in PLACES])
def test_a_node_killed_in_the_midst_of_a_long_prefill_changes_no_answer(
    nodes: RayNodes, tmp_path: Path, llama: Path, reference: GreedyReference, options: object, pools: Any
) -> None:
    path = write(tmp_path, llama, "fixed-sp", options, pools, ray_address=nodes.address, chunking="static:16")
    with ServerProcess([path], command=CLUSTER, environment=nodes.variables) as server:
        assert [each["host"] for each in instances(server.url)] == [pool.get("host", 0) for pool in pools]
        engine = pid_of(server.url, 1)
        assert is_running(engine)
        one, other = ClientStream(server.url, PROMPT), ClientStream(server.url, OTHER)
        until(lambda: computing(1)(server.url, one), WAIT_S)
        nodes.kill()
        assert ends_soon(engine)
        until(lambda: "lost" in [each["state"] for each in instances(server.url)], WAIT_S)
        assert not one.told
        nodes.add()
        assert one.answer() == reference.tokens(PROMPT, ANSWER_TOKENS)
        assert other.answer() == reference.tokens(OTHER, ANSWER_TOKENS)
        until(lambda: all_ready(server.url), WAIT_S)
        assert metric(server.url, "headway_instance_restarts_total") == 1
        again = pid_of(server.url, 1)
        assert again != engine
    assert ends_soon(again, WAIT_S)


def test_without_the_token_no_host_can_be_used(nodes: RayNodes, tmp_path: Path, llama: Path) -> None:
    path = write(tmp_path, llama, "jsq", {}, [{}, {"host": 1}], ray_address=nodes.address)
    variables = {**nodes.variables, "RAY_AUTH_TOKEN": "another-token-of-tests"}
    done = subprocess.run([*CLUSTER, path], env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert f"no Ray cluster can be joined at ray-address {nodes.address}" in done.stderr
