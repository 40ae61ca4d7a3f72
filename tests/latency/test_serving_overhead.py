"""What a server adds to the iterations of a table: measured from a run and its client, applied by the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.latency_models import table

from headway.perf.latency import table as store
from headway.perf.latency.fitted import FRONT
from headway.perf.latency.table import ServingOverhead, TimeSpread, spread_at, spreads_of
from headway.planning.answer import latency_note
from headway.planning.question import parse_question
from headway.sim.build import instance_of, run_scenario, workload_of
from headway.sim.cluster.build import run_cluster
from headway.sim.metrics import RequestRecord, e2e_s, tbt_s, ttft_s
from headway.sim.scenario import parse_scenario

# An iteration takes 10 ms, whatever it holds.
BARE = table([(0, 0.01), (1, 0.01), (4096, 0.01)], [(0, 0.0, 0.0), (4096, 0.0, 0.0)], (0.0, 0.0, 0.0)).source
ADDED = ServingOverhead(request_s=0.007, idle_s=0.005, iteration_s=0.001)
SHAPE = {"layers": 1, "hidden": 64, "q_heads": 1, "kv_heads": 1, "head_dim": 64, "mlp": 64, "vocab": 64}


def described(
    folder: Path, serving: ServingOverhead | None, learns: bool = False, output: int = 3, **noise: object
) -> dict[str, Any]:
    """Two requests of three tokens, a second apart: both find an idle engine, the first one at its very start."""
    (folder / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n0,100,{output}\n{output},100,{output}\n")
    table = folder / "table.json"
    store.save(msgspec.structs.replace(BARE, serving=serving), table)
    return {
        "model": SHAPE,
        "cluster": {"accelerator": "a100-80gb"},
        "latency": {"source": "table", "file": str(table), "learns": learns},
        "memory": {"kv_tokens": 4096},
        "workload": {"trace": str(folder / "trace.csv")},
        "run": {"noise": noise},
    }


def served(
    folder: Path, serving: ServingOverhead | None, learns: bool = False, output: int = 3, **noise: object
) -> tuple[RequestRecord, ...]:
    data = described(folder, serving, learns, output, **noise)
    return run_scenario(parse_scenario(data, "test"), 0).sim.records


def in_a_cluster(data: dict[str, Any], roles: tuple[str, ...] = ("mixed",)) -> tuple[RequestRecord, ...]:
    pools = [{"role": role, "count": 1} for role in roles]
    data = data | {"cluster": data["cluster"] | {"placement": "jsq", "pools": pools}}
    return run_cluster(parse_scenario(data, "test"), 0).sim.records


@pytest.mark.parametrize("learns", [False, True])
def test_a_request_takes_what_the_server_adds_on_its_way_and_its_iterations(tmp_path: Path, learns: bool) -> None:
    bare, added = served(tmp_path, None, learns)[1], served(tmp_path, ADDED, learns)[1]
    assert ttft_s(bare) == pytest.approx(0.010)
    assert e2e_s(bare) == pytest.approx(0.030)
    assert tbt_s(bare) == pytest.approx([0.010] * 2)
    assert ttft_s(added) == pytest.approx(0.010 + 0.007 + 0.005 + 0.001)
    assert tbt_s(added) == pytest.approx([0.011] * 2)
    assert e2e_s(added) == pytest.approx(0.023 + 2 * 0.011)


def test_an_engine_at_work_need_not_wake(tmp_path: Path) -> None:
    first, second = served(tmp_path, ADDED)
    # At time zero nothing was idle yet.
    assert ttft_s(second) - ttft_s(first) == pytest.approx(ADDED.idle_s)


def test_requests_on_their_way_vary_as_the_measured_ones_did() -> None:
    measured = [(100, seconds) for seconds in [0.003] * 70 + [0.007] * 30]
    of = ServingOverhead.of(measured, [], [])
    drawn = [of.way_s(f"r{number}") for number in range(2000)]
    assert drawn == [of.way_s(f"r{number}") for number in range(2000)]
    assert of.request_s == 0.003
    assert sum(one < 0.0031 for one in drawn) / 2000 == pytest.approx(0.7, abs=0.05)
    assert max(drawn) == pytest.approx(0.007)
    assert "3.0 ms a request on its way in and out (one in ten over 7.0)" in of.words()
    assert ServingOverhead.of([(9, 0.004)] * 5, [], []).way_s("any") == 0.004


def test_medians_count_and_few_measurements_do_not() -> None:
    of = ServingOverhead.of([(9, s) for s in (0.004, 0.005, 0.006, 0.005, 0.9)], [0.003] * 5, [0.001] * 5)
    assert (of.request_s, of.iteration_s) == (0.005, 0.001)
    assert of.idle_s == pytest.approx(0.002)
    assert ServingOverhead.of([(9, 0.005)] * 4, [0.003] * 4, [0.001] * 4) == ServingOverhead()
    # An iteration after idling that was shorter than predicted gives no negative time.
    assert ServingOverhead.of([(9, -0.001)] * 5, [-0.003] * 5, []) == ServingOverhead()


@pytest.mark.parametrize(
    ("serving", "says"), [(ADDED, "7.0 ms a request on its way in and out"), (None, "without what a server adds")]
)
def test_the_plan_says_what_it_holds(tmp_path: Path, serving: ServingOverhead | None, says: str) -> None:
    table = tmp_path / "table.json"
    store.save(msgspec.structs.replace(BARE, serving=serving), table)
    question = parse_question(
        {
            "model": SHAPE,
            "accelerators": [{"name": "a100-80gb"}],
            "workload": {"preset": "sharegpt-like", "qps": 1.0},
            "demands": {"all": {"ttft_p50_s": 1.0}},
            "latency": {"source": "table", "file": str(table)},
            "memory": {"kv_tokens": 4096},
            "search": {"tp": [1], "stages": [1]},
        }
    )
    assert says in latency_note(question, None)


def test_iterations_vary_as_those_of_their_length_did() -> None:
    # Short iterations took up to twice as predicted, long ones at most a tenth more.
    short, long = [0.01] * 200, [0.1] * 200
    measured = [0.01 * (1 + i / 199) for i in range(200)] + [0.1 * (1 + 0.1 * i / 199) for i in range(200)]
    spreads = spreads_of(short + long, measured)
    assert [one.most_s for one in spreads] == [0.01, 0.1]
    assert spread_at(spreads, 0.002) is spreads[0]
    assert spread_at(spreads, 9.0) is spreads[-1]
    assert spreads[0].at(1.0) == pytest.approx(2.0)
    assert spreads[1].at(1.0) == pytest.approx(1.1)
    assert TimeSpread(1.0, (1.0, 2.0, 4.0)).at(0.75) == pytest.approx(3.0)


def test_too_few_iterations_have_no_spread() -> None:
    assert spreads_of([0.01] * 49, [0.02] * 49) == ()
    # Too few long ones for a class of their own.
    (only,) = spreads_of([0.01] * 50 + [1.0] * 49, [0.02] * 50 + [1.0] * 49)
    assert (only.most_s, only.at(0.0), only.at(1.0)) == (1.0, 1.0, 2.0)


def test_simulated_iterations_have_the_measured_spread_and_can_be_without(tmp_path: Path) -> None:
    factors = tuple(1.0 + i / 10 for i in range(11))
    spread = msgspec.structs.replace(ADDED, spread=(TimeSpread(0.01, factors),))
    gaps = tbt_s(served(tmp_path, spread, output=2000)[1])
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.011 * 1.5, rel=0.03)
    assert sorted(gaps)[int(0.99 * len(gaps))] == pytest.approx(0.011 * 1.99, rel=0.01)
    # Seeded: the same again.
    assert tbt_s(served(tmp_path, spread, output=2000)[1]) == gaps
    assert tbt_s(served(tmp_path, spread, output=20, measured=False)[1]) == pytest.approx([0.011] * 19)


def test_a_time_a_token_is_told_from_a_time_a_request_where_lengths_differ() -> None:
    measured = [(tokens, 0.002 + 1e-5 * tokens) for tokens in range(100, 2100, 100)]
    of = ServingOverhead.of(measured, [], [])
    assert of.token_s == pytest.approx(1e-5)
    assert of.request_s == pytest.approx(0.002)
    assert "10.0 µs a token of its prompt" in of.words()
    alike = ServingOverhead.of([(tokens, s) for tokens, s in measured if tokens > 1000], [], [])
    assert alike.token_s == 0.0, "noise would be taken for a slope"


def test_prompts_that_come_together_are_read_one_after_another(tmp_path: Path) -> None:
    serving, prompts = ServingOverhead(token_s=1e-3), ["arrival_s,prompt_tokens,output_tokens"]
    data = described(tmp_path, serving)
    (tmp_path / "trace.csv").write_text("\n".join([*prompts, *["0,100,3"] * 3, ""]))
    records = run_scenario(parse_scenario(data, "test"), 0).sim.records
    # An iteration of 10 ms begins when a prompt has been read, 100 ms after the one before.
    assert [ttft_s(each) for each in records] == pytest.approx([0.11, 0.21, 0.31])
    two = run_scenario(parse_scenario(data | {"cluster": {"replicas": 2}}, "test"), 0).sim.records
    assert [ttft_s(each) for each in two] == pytest.approx([0.11, 0.11, 0.21])
    left = run_scenario(parse_scenario(data | {"run": {"timeout_s": 0.25}}, "test"), 0).sim.records
    assert [each.error for each in left] == [None, None, "timeout"], "a client leaves while its prompt is read"


def test_a_fit_for_vllm_has_the_published_front_and_a_profile_replaces_it(tmp_path: Path) -> None:
    data = described(tmp_path, ServingOverhead(request_s=0.007, token_s=2e-6))
    file = data["latency"]["file"]

    def serving(**latency: object) -> ServingOverhead:
        scenario = parse_scenario(data | {"latency": {"source": "fitted", **latency}}, "test")
        return instance_of(scenario, workload_of(scenario, 0)).serving

    assert serving() == ServingOverhead()
    assert serving(engine="vllm") == FRONT
    assert serving(engine="vllm", front=file) == ServingOverhead(request_s=0.007, token_s=2e-6)


def test_words_name_the_tail() -> None:
    assert "in a hundred" not in ADDED.words()
    spread = msgspec.structs.replace(ADDED, spread=(TimeSpread(0.01, (1.0, 3.0)),))
    assert "one iteration in a hundred takes up to 3 times" in spread.words()


def test_instances_of_a_cluster_add_what_a_server_does(tmp_path: Path) -> None:
    data = described(tmp_path, ADDED)
    assert in_a_cluster(data) == served(tmp_path, ADDED)
    spread = ServingOverhead.of([(9, 0.0)] * 9, [0.0] * 9, [0.0] * 9)
    spread = msgspec.structs.replace(spread, spread=(TimeSpread(1.0, (0.5, 1.0, 3.0)),))
    gaps = tbt_s(in_a_cluster(described(tmp_path, spread, output=200))[1])
    assert len(set(gaps)) > 150
    assert min(gaps) < 0.006
    assert max(gaps) > 0.02
