"""Policies of a user's own, named by dotted path: in the simulator, the engine, a cluster file; and wrong paths."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, simulate
from headway.core.errors import ConfigError
from headway.core.settings import resolve
from headway.policy.iteration.config import SchedulerConfig
from headway.policy.iteration.ordering import make_policy
from headway.policy.placement.registry import check_options
from headway.runtime.cluster.cluster_file import cluster_file
from headway.serving.serve_settings import ServeSettings

ROOT = Path(__file__).resolve().parents[2]
SMALLEST, ROUND_ROBIN = "examples.own_policy.SmallestFirst", "examples.own_policy.RoundRobin"


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is found in the current folder, as with the `headway` command."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each and Path(each).resolve() != ROOT])


def scenario(**policy: Any) -> dict[str, Any]:
    mix = [
        {"class": "chat", "share": 20, "prompt": "fixed:200", "output": "fixed:5"},
        {"class": "document", "share": 1, "prompt": "fixed:60000", "output": "fixed:5"},
    ]
    return {"workload": {"mix": mix, "qps": 4.0, "requests": 80}, "policy": {**policy}}


def test_an_order_of_one_s_own_decides_in_the_simulator() -> None:
    waits = {
        policy: simulate(scenario(policy=policy)).summary()["chat"]["ttft_s"]["p99"]
        for policy in ("fcfs", "srpt", SMALLEST)
    }
    # Chats never wait for a document, as with the shortest remaining time first, and unlike first come, first served.
    assert waits[SMALLEST] == pytest.approx(waits["srpt"], rel=0.5)
    assert waits[SMALLEST] < waits["fcfs"] / 2


def test_a_placement_of_one_s_own_decides_in_the_simulator() -> None:
    cluster = {"placement": ROUND_ROBIN, "options": {"stride": 1}, "pools": [{"count": 3}]}
    result = simulate({**scenario(policy="fcfs"), "cluster": cluster})
    rows = result.rows()
    assert len(rows) == 80
    assert all(row["ttft_s"] is not None for row in rows)
    one = simulate({**scenario(policy="fcfs"), "cluster": {**cluster, "options": {"stride": 3}}})
    # With a stride of three all requests queue on one of three instances.
    assert one.summary()["chat"]["ttft_s"]["p99"] > result.summary()["chat"]["ttft_s"]["p99"]


def test_an_order_of_one_s_own_decides_in_the_engine() -> None:
    settings = resolve(ServeSettings, flags={"scheduling_policy": SMALLEST})
    assert settings.engine_config("m").scheduler == {"policy": SMALLEST}
    with LLM(policy=SMALLEST, max_model_len=4096) as model:
        completion = model.generate(["The passkey is 417. What is the passkey?"])[0]
    assert completion.token_ids


def test_a_cluster_file_may_name_a_placement_of_one_s_own() -> None:
    file = cluster_file({"placement": ROUND_ROBIN, "options": {"stride": 2}, "pools": [{"count": 2}]}, "c.yaml")
    assert file.placement == ROUND_ROBIN
    with pytest.raises(ConfigError, match=r"c.yaml: options of examples.own_policy.RoundRobin: .*stride"):
        cluster_file({"placement": ROUND_ROBIN, "options": {"strides": 2}, "pools": [{"count": 2}]}, "c.yaml")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module.Policy", r"there is no module 'no_such_module' on Python's path or in"),
        ("examples.own_policy.Missing", r"the module 'examples.own_policy' has no 'Missing'"),
        ("examples.own_policy.RoundRobinOptions", r"must be a class with"),
        ("headway.core.errors.ConfigError", r"must be a class with"),
    ],
)
def test_a_path_that_leads_to_no_policy_is_one_sentence(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(path)
    with pytest.raises(ConfigError, match=message):
        check_options(path, {})
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(policy=path)


def test_an_error_inside_the_module_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        make_policy("needs_more.Policy")
