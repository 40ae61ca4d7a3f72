"""Cluster scenarios: what a file may say, what comes out, and what Tetris and its baselines do on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.cluster_worlds import cluster, lines_into

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.policy.placement.registry import make_placement
from headway.sim.build import layout_of, run_scenario
from headway.sim.cluster.build import cluster_of, run_cluster
from headway.sim.cluster.simulation import simulate_cluster
from headway.sim.metrics import ttft_s
from headway.sim.scenario import parse_scenario
from headway.sim.workload import TraceRequest
from headway_research.tetris.profile_rates import _trace_of
from headway_research.tetris.setting import TetrisPoint, run_point

RATES = ((0.5, 0.1), (1.5, 0.3), (3.0, 0.4), (3.5, 0.5), (4.5, 0.6))


def scenario(placement: str = "tetris", **changes: Any) -> dict[str, Any]:
    cluster = {
        "placement": placement,
        "pools": [{"role": "prefill", "count": 16}, {"role": "decode", "count": 2, "tp": 8}],
        "spans": {"source": "tetris-table1"},
    }
    workload = changes.pop("workload", {"preset": "tetris-medium", "qps": 3.0, "requests": 120})
    return {"cluster": cluster | changes.pop("cluster", {}), "workload": workload, **changes}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"placement": "tetra"}, "cluster: unknown placement 'tetra'; known are ladder"),
        ({"options": {"speed": 1}}, "options of tetris: speed is not a field; allowed here: mode, affinity, sizes"),
        ({"pools": []}, "cluster: a `placement` needs `pools`"),
        ({"placement": None, "pools": [], "options": {"rate": 0.5}}, "`options` need a `placement`"),
        ({"pools": [{"role": "prefil", "count": 1}]}, r"cluster.pools\[0\].role must be 'prefill', 'decode' or"),
        (
            {"pools": [{"count": 1, "size": 3}]},
            r"cluster.pools\[0\].size is not a field; allowed here: role, count",
        ),
        ({"spans": {"source": "eq1"}}, "`file` goes with `source: eq1`"),
        ({"backends": 0}, "cluster.backends must be at least 1, not 0"),
    ],
)
def test_bad_fields_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scenario(scenario(cluster=change))


def test_decode_pools_keep_to_the_scenario_s_number_of_requests() -> None:
    data = scenario(policy={"max_num_seqs": 3}, workload={"preset": "sharegpt-like", "qps": 40.0, "requests": 150})
    data["cluster"]["pools"][1]["count"] = 1
    spec = cluster_of(parse_scenario(data), [TraceRequest(0.0, 100, 100)])
    assert spec.engine(spec.instances[-1:]).config.max_num_seqs == 3
    bounded = run_cluster(parse_scenario(data), 0)
    assert all(record.ok for record in bounded.sim.records)
    free = run_cluster(parse_scenario({**data, "policy": {}}), 0)
    assert bounded.sim.duration_s > 1.2 * free.sim.duration_s, "the others wait for their turn to decode"


def test_transfers_wait_for_kv_room_unless_the_scenario_says_otherwise() -> None:
    data = scenario(workload={"preset": "tetris-medium", "qps": 3.0, "requests": 60})
    data["cluster"]["pools"][1] |= {"count": 1, "kv_tokens": 200_000}
    took_s = []
    for stated in ({}, {"kv_reservations": True}, {"kv_reservations": False}):
        result = run_cluster(parse_scenario(data | {"cluster": data["cluster"] | stated}), 0)
        assert all(record.ok for record in result.sim.records)
        took_s.append(result.sim.duration_s)
    assert took_s[0] == took_s[1] > took_s[2]


@pytest.mark.parametrize(
    ("placement", "options", "apart"),
    [
        ("tetris", {}, True),
        ("ladder", {}, True),
        ("fixed-sp", {}, True),
        ("context-parallel", {}, True),
        ("fifo", {}, False),  # shorts run wholly on instances
    ],
)
def test_every_request_gets_all_of_its_tokens_and_runs_repeat(
    placement: str, options: dict[str, float], apart: bool
) -> None:
    """apart: decode instances do nothing but the tokens after the first."""
    few = {"preset": "tetris-medium", "qps": 3.0, "requests": 40}
    data = parse_scenario(scenario(placement, cluster={"options": options}, workload=few))
    first, again = run_cluster(data, 0), run_cluster(data, 0)
    assert first.sim.records == again.sim.records
    assert all(record.ok for record in first.sim.records)
    assert all(len(record.token_s) == record.output_tokens for record in first.sim.records)
    assert all(list(record.token_s) == sorted(record.token_s) for record in first.sim.records)
    decodes = sum(use.decode_tokens + use.prefill_tokens for use in first.sim.replicas[16:])
    assert apart == (decodes == sum(record.output_tokens - 1 for record in first.sim.records))
    assert sum(record.output_tokens for record in first.sim.records) > 0
    assert run_cluster(data, 1).sim.records != first.sim.records


def test_a_lone_request_takes_the_fastest_prefill_and_noise_is_seeded() -> None:
    lone = scenario(workload={"qps": 0.01, "requests": 1, "mix": [{"prompt": "32768", "output": "3"}]})
    (record,) = run_scenario(parse_scenario(lone), 0).sim.records
    assert ttft_s(record) == pytest.approx(0.565, rel=0.05)  # SP 16 by Table 1
    noisy = lone | {"run": {"noise": {"kind": "lognormal", "amount": 0.3}}}
    waits = {seed: ttft_s(run_scenario(parse_scenario(noisy), seed).sim.records[0]) for seed in (0, 0, 1)}
    assert len(set(waits.values())) == 2


def test_capacity_order_and_tetris_with_noise() -> None:
    """A small version of `headway reproduce tetris.fig8` and `tetris.noise`: medium lengths near SP 8's knee."""

    def p50(system: str, noise: float = 0.0) -> float:
        rates = RATES if system.startswith("Tetris") else ()
        return run_point(TetrisPoint("8b", "medium", system, 3.0, 500, 0, noise, rates)).p50

    quiet = {name: p50(name) for name in ("Tetris", "Fixed-SP8", "Fixed-SP16")}
    assert list(quiet.values()) == sorted(quiet.values())
    assert p50("Tetris", 0.3) < p50("Fixed-SP8", 0.3)


def test_results_as_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(json.dumps(scenario()))
    out = [
        f"--{kind}={tmp_path / name}" for kind, name in (("json", "a.json"), ("csv", "a.csv"), ("requests", "r.csv"))
    ]
    sweep = "cluster.placement=fixed-sp,tetris"
    assert main(["simulate", str(file), *out, "--sweep", sweep, "--set", "workload.requests=20", "--jobs", "1"]) == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert data["schema"] == "headway.simulate/1"
    assert [point["at"]["cluster.placement"] for point in data["points"]] == ["fixed-sp", "tetris"]
    assert all(point["mean"]["total"]["ok"] == 20 for point in data["points"])
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 21
    assert "tetris" in capsys.readouterr().out


def test_eq1_fits_and_rates_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit, rates, file = tmp_path / "fit.json", tmp_path / "rates.json", tmp_path / "cluster.yaml"
    assert main(["profile", "fit-eq1", "table1", "--out", str(fit)]) == 0
    file.write_text(json.dumps(scenario(cluster={"spans": {"source": "eq1", "file": str(fit)}})))
    few = ["--requests", "12", "--loads", "1:2:1", "--seeds", "3"]
    arguments = ["profile", "rates", str(file), "--out", str(rates), *few]
    assert main(arguments) == 0
    assert [load for load, _ in json.loads(rates.read_text())["points"]] == [1.0, 2.0]
    # the lengths that a cluster has been sent: of a log, whose second attempt at a request counts once
    log, lines, ring = tmp_path / "log", list[bytes](), cluster(2)
    fifo = make_placement("fifo", ring.policy_context, {})
    simulate_cluster(ring, fifo, [TraceRequest(0.0, 777, 1)], record=lines_into(lines))
    arrival = next(line for line in lines if b'["RequestArrived"' in line)
    log.write_bytes(b"".join([lines[0], *(arrival.replace(b"r0", name) for name in (b"a#1", b"a#2", b"b#1"))]))
    assert _trace_of(log, tmp_path).read_text().split()[1:] == ["0,777,1", "0,777,1"]
    assert main([*arguments, "--lengths", str(log)]) == 0
    assert "lengths of log" in json.loads(rates.read_text())["source"]
    log.write_bytes(lines[0])
    assert main([*arguments, "--lengths", str(log)]) == 2
    capsys.readouterr()
    options = ["--set", f"cluster.options={{rates_file: {rates}}}", "--set", "workload.requests=5"]
    assert main(["simulate", str(file), *options]) == 0
    samples = tmp_path / "samples.csv"
    samples.write_text("sp,tokens,seconds\n1,100,0.1\n1,200,x\n")
    assert main(["profile", "fit-eq1", str(samples), "--out", str(fit)]) == 2
    samples.write_text("a,b\n1,2\n")
    assert main(["profile", "fit-eq1", str(samples), "--out", str(fit)]) == 2
    errors = capsys.readouterr().err
    assert "line 3" in errors
    assert "needs the columns" in errors


@pytest.mark.parametrize(
    ("pools", "layout"), [(["decode:8", "prefill:2"], (2, 1)), (["prefill:8"], (8, 1)), ([], (4, 2))]
)
def test_the_error_bars_of_a_cluster_are_of_the_pool_that_prefills(pools: list[str], layout: tuple[int, int]) -> None:
    sections = [{"role": role, "count": 1, "tp": int(tp)} for role, tp in (pool.split(":") for pool in pools)]
    cluster = {"placement": "tetris" if pools else None, "pools": sections} | ({} if pools else {"spans": {}})
    found = layout_of(parse_scenario(scenario(cluster=cluster, layout={"tp": 4, "stages": 2}), "test"))
    assert (found.tp, found.stages) == layout
