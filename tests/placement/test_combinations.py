"""A cluster file and a scenario of the same instances get the same answer: read, or refused in one sentence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from headway.core.errors import ConfigError
from headway.core.settings import resolve
from headway.policy.placement.registry import names
from headway.runtime.cluster.cluster_file import cluster_file
from headway.serving.serve_settings import ServeSettings, instance_configs
from headway.sim.scenario import parse_scenario

CUTS: list[dict[str, int]] = [{}, {"tp": 2}, {"stages": 2}, {"kvp": 2}, {"tp": 2, "stages": 2, "kvp": 2}]
FLAGS = {"tp": "tensor_parallel_size", "stages": "pipeline_parallel_size", "kvp": "kv_parallel_size"}
ROLES = [
    ("mixed",), ("mixed", "mixed"), ("prefill", "decode"), ("mixed", "decode"), ("prefill",), ("decode",),
]  # fmt: skip
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "fifo": [{"long_sp": 1}, {"long_sp": 2}],
    "priority": [{"long_sp": 1}],
    "reservation": [{"long_sp": 1, "reserved": 1}, {"reserved": 9}],
    "fixed-sp": [{"sp": 1}, {"sp": 8}],
    "tetris": [{"sizes": [1]}, {"sizes": [8, 16]}],
    "pecsched": [{"disaggregate": False}, {"disaggregate": False, "long_replicas": "fixed", "long_sp": 1}],
}


def answer(read: Any) -> str | None:
    """Return the sentence of a refusal; None: it was read."""
    try:
        read()
    except ConfigError as error:
        return str(error).removeprefix("file: ")
    return None


def live(placement: str, options: dict[str, Any], pools: list[dict[str, Any]]) -> str | None:
    """Return what `headway cluster` says, which starts nothing yet."""

    def read() -> None:
        file = cluster_file({"placement": placement, "options": options, "pools": pools}, "file")
        if not file.behind_http:
            settings = resolve(ServeSettings, file=file.serve, origin="file: serve")
            instance_configs(file, "file", "model", settings)

    return answer(read)


def simulated(placement: str, options: dict[str, Any], pools: list[dict[str, Any]], **fields: Any) -> str | None:
    """Return what `headway simulate` says."""
    cluster = {"placement": placement, "options": options, "pools": pools}
    return answer(
        lambda: parse_scenario({"cluster": cluster, "workload": {"preset": "sharegpt-like"}, **fields}, "file")
    )


@pytest.mark.parametrize("placement", names())
def test_a_scenario_is_read_where_a_cluster_file_is_and_refused_in_the_same_words(placement: str) -> None:
    answers = set()
    choices = [{}, *OPTIONS.get(placement, [])]
    for options, roles, first, rest in itertools.product(choices, ROLES, CUTS, CUTS):
        if len(roles) == 1 and rest:
            continue
        cuts = [first, *[rest] * (len(roles) - 1)]
        files, sections = [], []
        for role, cut in zip(roles, cuts, strict=True):
            files.append({"role": role, "count": 3, "serve": {FLAGS[name]: size for name, size in cut.items()}})
            sections.append({"role": role, "count": 3, **cut})
        found = live(placement, options, files)
        assert simulated(placement, options, sections) == found, sections
        answers.add(found)
    assert None in answers
    assert len(answers) > 2


SIMULATED = "`engine: vllm` is simulated without pools of role prefill"


@pytest.mark.parametrize("placement", names())
def test_a_cluster_of_vllm_servers_is_simulated_or_refused_in_the_same_words(placement: str) -> None:
    for options, roles in itertools.product([{}, *OPTIONS.get(placement, [])], [*ROLES, ("prefill", "mixed")]):
        servers = [
            {"backend": "vllm", "role": role, "urls": [f"http://{i}:{port}" for port in (1, 2, 3)]}
            for i, role in enumerate(roles)
        ]
        found = live(placement, options, servers)
        if found is None and "prefill" in roles:
            found = SIMULATED
        pools = [{"role": role, "count": 3, "tp": 2} for role in roles]
        assert simulated(placement, options, pools, engine="vllm") == found, roles
