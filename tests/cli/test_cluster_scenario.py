"""A file of `headway cluster` simulates as it stands, by the policy that serves and the times of loaded instances."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import yaml
from tests.helpers.engine_fixtures import INFO as FAKE
from tests.helpers.latency_models import table

from headway import load_scenario, simulate
from headway.api.cluster_scenario import ClusterScenarios
from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.policy.iteration.config import SchedulerConfig
from headway.sim.build import run_scenario
from headway.sim.cluster.build import placement_of

EXAMPLES = Path(__file__).parents[2] / "examples"
TABLE = table([(0, 1e-3), (1000, 11e-3)], [(0, 0.0, 0.0), (1000, 5e-4, 1e-6)], (1e-5, 0.0, 0.0))
INFO = msgspec.structs.replace(
    FAKE, max_model_len=4096, context_tokens=4096, kv_tokens_total=16384, kv_block_tokens=64, t_target_s=0.05
)
FEW = {"mix": [{"prompt": "fixed:500", "output": "fixed:4"}], "qps": 2.0, "requests": 10}


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations of which an engine is loaded; none is."""
    loaded: list[Any] = []

    def load(config: Any) -> Any:
        loaded.append(config)
        info = msgspec.structs.replace(INFO, context_tokens=config.max_model_len or INFO.context_tokens)
        return SimpleNamespace(info=info, scheduler=SimpleNamespace(config=SchedulerConfig(), latency=TABLE))

    monkeypatch.setattr("headway.runtime.assembly.dry_run.loaded", load)
    return loaded


def test_the_example_simulates_as_it_stands_and_swept(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["simulate", str(EXAMPLES / "cluster.yaml"), "--set", "workload.requests=20", "--set", "workload.qps=0.5"]
    assert main([*words, "--sweep", "placement=fifo,jsq", "--sweep", "options={}", "--json", str(out)]) == 0
    points = json.loads(out.read_text())["points"]
    assert [point["at"]["placement"] for point in points] == ["fifo", "jsq"]
    assert all(point["mean"]["total"]["ok"] == 20 for point in points)
    # Shares of what an instance measured of this machine at its start.
    assert all(0 < point["mean"]["use"][share] < 2 for point in points for share in ("mfu", "mbu"))


def test_an_engine_is_loaded_once_for_equal_pools_and_points(tmp_path: Path, loads: list[Any]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "placement: tetris\noptions: {sizes: [1, 2]}\nserve: {threads: 1, max_model_len: 4K}\n"
        "pools: [{count: 2, role: prefill}, {role: decode}]\n"
    )
    rows, out = tmp_path / "rows.csv", tmp_path / "out.json"
    words = ["simulate", str(path), "--set", "workload.requests=30", "--requests", str(rows), "--json", str(out)]
    assert main([*words, "--sweep", "workload.qps=1,2", "--jobs", "1"]) == 0
    assert len(loads) == 1
    assert len(rows.read_text().splitlines()) == 31
    scenario = json.loads(out.read_text())["scenario"]
    # What was measured is there, and no hardware that a scenario would have by default.
    assert [pool["kv_tokens"] for pool in scenario["cluster"]["pools"]] == [16384, 16384]
    assert "accelerator" not in scenario["cluster"]
    assert "latency" not in scenario
    # The dry run's prompts: 1/64 and 1/4 of the longest length.
    assert [part["prompt"] for part in scenario["workload"]["mix"]] == ["fixed:64", "fixed:1024"]


def test_a_lone_request_takes_the_time_of_the_loaded_instance(tmp_path: Path, loads: list[Any]) -> None:
    traffic = {**FEW, "requests": 1}
    scenario, cluster = ClusterScenarios(tmp_path / "c.yaml", {}).parse({"pools": [{}], "workload": traffic}, "c.yaml")
    assert cluster is not None
    (record,) = run_scenario(scenario, 0, measured=cluster).sim.records
    assert record.token_s[0] - record.arrival_s == pytest.approx(TABLE.rows_s(500), rel=0.2)
    assert len(loads) == 1


def test_python_simulates_a_cluster_file_and_its_contents(tmp_path: Path, loads: list[Any]) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump({"pools": [{"count": 2}], "workload": FEW}))
    of_file, of_contents = simulate(path, seed=3), simulate(yaml.safe_load(path.read_text()), seed=3)
    assert of_file.records == of_contents.records
    assert len(simulate(path, fields={"workload.requests": 4}).rows()) == 4
    assert loads
    with pytest.raises(ConfigError, match=r"give it to simulate\(\)"):
        load_scenario(path)


def test_the_simulated_policy_decides_by_what_the_live_one_gets(tmp_path: Path, loads: list[Any]) -> None:
    data = {"pools": [{"count": 2}], "placement": "fifo", "options": {"long_tokens": 400, "long_sp": 2}}
    scenario, cluster = ClusterScenarios(tmp_path / "c.yaml", {}).parse({**data, "workload": FEW}, "c.yaml")
    assert cluster is not None
    # Another process simulates the same from a copy.
    copy = pickle.loads(pickle.dumps(cluster))
    results = [run_scenario(scenario, 0, measured=each).sim.records for each in (cluster, copy)]
    assert results[0] == results[1]
    assert not cluster.policy_context.pads_heads
    assert (cluster.rows, cluster.backends, cluster.sends_layers) == (512, 16, False)
    assert type(placement_of(scenario, cluster)).__name__ == "FifoPlacement"


def test_prefix_caches_are_simulated_as_served(tmp_path: Path, loads: list[Any]) -> None:
    def run(serve: dict[str, Any], placement: str = "jsq", **options: Any) -> tuple[dict[str, int] | None, list[int]]:
        pools = [{"count": 2}]
        workload = {"trace": str(trace)}
        data = {"pools": pools, "serve": serve, "placement": placement, "options": options, "workload": workload}
        scenario, cluster = ClusterScenarios(tmp_path / "c.yaml", {}).parse(data, "c.yaml")
        assert cluster is not None
        assert not cluster.policy_context.copies_prefixes
        sim = run_scenario(scenario, 0, measured=cluster).sim
        assert all(record.ok for record in sim.records)
        # What a trace counts as cached does not count beside a simulated cache.
        assert (scenario.prefix_cache is None) == (sim.use_json().get("prefix_cache") is None)
        return sim.use_json().get("prefix_cache"), [record.cached_tokens for record in sim.records]

    # Two texts by turns, each twice as long as the block of keys that its prompts share.
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * i, "input_length": 1100, "output_length": 4, "hash_ids": [i % 2, 2 + i % 2, 10 + i]}
            for i in range(8)]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))

    # On by default, as in `headway cluster`; its size is the pool's.
    use, cached = run({}, affinity=True)
    assert use is not None
    assert use["hit_tokens"] == sum(cached) > 0
    assert cached == [0, 0] + [1024] * 6
    # Plans of spans see hits too.
    spans, cached = run({}, "tetris", affinity=True, sizes=[1])
    assert spans is not None
    assert spans["hit_tokens"] == sum(cached) > 0
    assert run({}, "tetris", sizes=[1])[1] == [0] * len(cached)
    assert run({"prefix_cache": False}) == (None, [0] * len(cached))
    assert run({"kv_parallel_size": 2}) == (None, [0] * len(cached))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"pools": [{"backend": "vllm"}]}, "c.yaml: pools of backend vllm have their own engines"),
        ({"pools": [{}], "workload": {"presett": "x"}}, "c.yaml: workload: presett is not a field"),
        ({"pools": [{}], "placement": "pecsched"}, "c.yaml: pecsched decodes elsewhere than it prefills"),
        ({"pools": [{}], "run": {"seed": 1}}, "c.yaml: run.seed is not a field"),
    ],
)
def test_a_faulty_file_gets_one_sentence(tmp_path: Path, loads: list[Any], data: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ClusterScenarios(tmp_path / "c.yaml", {}).parse(data, "c.yaml")
    assert str(raised.value).startswith(words)


def test_requests_longer_than_the_instances_serve_are_named(
    tmp_path: Path, loads: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("pools: [{}]\nworkload: {mix: [{prompt: 'fixed:5000', output: 'fixed:5'}], requests: 3}\n")
    assert main(["simulate", str(path)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "the longest request has 5,005 tokens, and the instances serve up to 4,096" in said
