"""Scenario files: what they say is what is run, faults in them are named, and the same file gives the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.refusals import refusal

from headway.cli.main import main
from headway.core.errors import ConfigError
from headway.policy.iteration.medha import MedhaConfig
from headway.sim.build import config_of, requests_of, run_scenario
from headway.sim.scenario import Scenario, parse_scenario
from headway.sim.sweep import parse_points, parse_sweep, run_points, with_field

SMALL: dict[str, Any] = {
    "name": "small",
    "workload": {"qps": 4.0, "mix": [{"class": "chat", "prompt": "uniform:50-500", "output": "fixed:20"}]},
    "run": {"window_s": 20, "seeds": [0]},
}
FILES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
# others are of `headway cluster` and of `headway plan`
EXAMPLES = [f for f in FILES if "\nworkload:" in f.read_text() and "\ndemands:" not in f.read_text()]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("clutser", {}, "clutser is not a field; allowed here: name, about, cluster"),
        ("policy.polcy", "lars", "policy.polcy is not a field; allowed here: policy, chunking"),
        ("policy.policy", "sjf", "choose one of ladder, fcfs, edf, lrs, srpt, lars"),
        ("layout.tp", 0, "layout.tp must be at least 1, not 0"),
        ("workload.mix.0.prmpt", "fixed:3", "workload.mix[0].prmpt is not a field; allowed here: share, class"),
        ("workload.preset", "medha-mix", "exactly one of preset, trace and mix"),
        ("slo.chta", {"ttft_s": 1}, "slo.chta: the workload has no such class; it has chat$"),
        ("slo.all", {"ttft_s": 1}, "slo.all: the workload has no such class; it has chat$"),
        ("run.seeds", [-1], "^scenario: run.seeds[0] must be at least 0, not -1$"),
        ("run.seeds", [1, 2, 1], "^scenario: run.seeds: give each seed once"),
        ("workload", {"trace": []}, "`trace` is empty: fill it in"),
        ("workload", {"mix": []}, "`mix` is empty: fill it in"),
        ("slo.chat", {"tfft_s": 1}, "slo.chat.tfft_s is not a field; allowed here: ttft_s"),
        ("model", "llama-9", "model: unknown model 'llama-9'"),
        ("model", {"layers": 2}, "model.hidden is missing"),
        ("cluster.accelerator", "a1000", "cluster.accelerator: unknown accelerator 'a1000'"),
        ("run.noise.kind", "pink", "run.noise.kind must be 'none', 'lognormal' or 'uniform', not 'pink'"),
        ("run.refuse_late", True, "refuse_late needs a class with a ttft_s in its SLO"),
        ("latency.source", "table", "`file` goes with `source: table`"),
    ],
)
def test_invalid_fields_are_named_with_the_allowed_values(path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match="(?s)" + words.replace("[", r"\[").replace("(", r"\(").replace("|", r"\|")):
        run_scenario(parse_scenario(with_field(SMALL, path, value)), 0)


@pytest.mark.parametrize(
    ("workload", "klass"),
    [
        ({"mix": [{"class": "chat", "share": 1e6, "prompt": "fixed:9", "output": "fixed:2"},
                  {"class": "document", "share": 1, "prompt": "fixed:9", "output": "fixed:2"}]}, "document"),
        ({"mix": [{"prompt": "fixed:9", "output": "fixed:2"}]}, "long"),
        ({"mix": SMALL["workload"]["mix"], "long_share": 0.0}, "long"),
        ({"preset": "azure-code-2024-documents", "requests": 1}, "long"),
    ],
)  # fmt: skip
def test_an_slo_of_a_class_that_no_request_happens_to_have_is_accepted(workload: dict[str, Any], klass: str) -> None:
    data = {"workload": {"requests": 5, **workload}, "slo": {klass: {"ttft_s": 1.0}}}
    assert klass not in {record.klass for record in run_scenario(parse_scenario(data), 0).sim.records}


def test_classes_of_a_trace_are_those_of_all_of_it(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,class\n0,9,2,chat\n1,9,2,document\n")
    data = {"workload": {"trace": str(trace), "slice": "0:1"}, "slo": {"document": {"ttft_s": 1.0}}}
    assert len(run_scenario(parse_scenario(data), 0).sim.records) == 1
    with pytest.raises(ConfigError, match=r"slo\.chta: the workload has no such class; it has chat, document"):
        run_scenario(parse_scenario(with_field(data, "slo.chta.ttft_s", 1.0)), 0)


def test_seeds_of_the_command_are_whole_numbers_each_given_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    rates = ("profile", "rates", str(FILES[0].parent / "cluster-tetris.yaml"), "--out", str(tmp_path / "r.json"))
    for words in (("simulate", str(file)), rates, ("reproduce", "medha.fig13")):
        assert "--seeds '-1': write whole numbers from 0, such as 0,1,2" in refusal([*words, "--seeds", "-1"], capsys)
        assert "--seeds '1,1': give each seed once" in refusal([*words, "--seeds", "1,1"], capsys)
    with pytest.raises(ConfigError, match="seed -1: seeds are whole numbers from 0"):
        run_scenario(parse_scenario(SMALL), -1)


def test_policy_fields_are_the_schedulers_own() -> None:
    config = config_of(
        parse_scenario({**SMALL, "policy": {"mode": "paper", "medha": {"long_tokens": 9}}, "layout": {"stages": 2}})
    )
    assert (config.mode, config.policy, config.stages) == ("paper", "lars", 2)
    assert config.medha == MedhaConfig(mode="paper", long_tokens=9)


def test_whole_prompts_that_do_not_fit_are_an_infeasible_point() -> None:
    long = {"mix": [{"prompt": "fixed:300k", "output": "fixed:5"}], "requests": 1}
    data = {"workload": long, "layout": {"tp": 4}, "cluster": {"accelerator": "a100-80gb"}}
    points = run_points(parse_points(data, [parse_sweep("policy.chunking=adaptive,whole")]), 1).points
    assert [point["feasible"] for point in points] == [True, True]
    points = run_points(
        parse_points({**data, "layout": {"tp": 1}}, [parse_sweep("policy.chunking=adaptive,whole")]), 1
    ).points
    assert [point["feasible"] for point in points] == [True, False]
    assert "activations of 300,000 rows" in points[1]["why"]


def test_a_value_that_does_not_suit_is_a_row_with_the_reason_and_a_placement_keeps_the_options_that_it_knows() -> None:
    cluster = {
        "placement": "fifo",
        "options": {"long_sp": 2},
        "pools": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 1}],
    }
    data = {**SMALL, "cluster": cluster, "workload": {**SMALL["workload"], "requests": 5}}
    points = parse_points(data, [("cluster.placement", ["fifo", "tetris", "nothing", "jsq"])])
    assert [getattr(point, "why", "") for point in points][:2] == ["", ""]
    assert [point.scenario.cluster.options for point in points[:2]] == [{"long_sp": 2}, {}]
    assert "unknown placement 'nothing'" in points[2].why
    found = run_points(points, 1).points
    assert [point["feasible"] for point in found] == [True, True, False, False]
    assert "role mixed" in found[3]["why"]
    with pytest.raises(ConfigError, match="unknown placement"):
        parse_points(data, [("cluster.placement", ["nothing"])])


def test_sweeps_include_both_ends_and_keep_whole_numbers_whole() -> None:
    assert parse_sweep("workload.qps=0.25:1.75:0.5") == ("workload.qps", [0.25, 0.75, 1.25, 1.75])
    assert parse_sweep("layout.tp=1:4:1") == ("layout.tp", [1, 2, 3, 4])
    assert parse_sweep("policy.policy=fcfs,lars") == ("policy.policy", ["fcfs", "lars"])
    for text in ("qps", "qps=", "qps=1:0:1", "qps=0:1:0", "mix=[{prompt: 1}", "mix={a: b: c}"):
        with pytest.raises(ConfigError):
            parse_sweep(text)


def test_a_sweep_of_too_many_values_or_of_one_field_twice_is_refused() -> None:
    assert len(parse_sweep("qps=1:1000:1")[1]) == 1000
    for text in ("qps=0.1:1:1e-9", "qps=0:1000:1", "qps=0:inf:1"):
        with pytest.raises(ConfigError, match="gives more than 1,000 values: take a larger step"):
            parse_sweep(text)
    with pytest.raises(ConfigError, match="the step must be above 0"):
        parse_sweep("qps=nan:1:1")
    with pytest.raises(ConfigError, match=r"workload\.qps is swept twice: give all of its values at once"):
        parse_points(SMALL, [parse_sweep("workload.qps=1,2"), parse_sweep("workload.qps=3")])


def test_an_error_names_the_option_that_was_typed() -> None:
    with pytest.raises(ConfigError, match=r"^--sweep 'layout\.tp': write FIELD=START:STOP:STEP"):
        parse_sweep("layout.tp")
    with pytest.raises(ConfigError, match=r"^--set 'layout\.tp': write FIELD=VALUE$"):
        parse_sweep("layout.tp", "--set")


def test_a_value_in_brackets_is_one_value() -> None:
    assert parse_sweep("search.tp=[4, 8]") == ("search.tp", [[4, 8]])
    assert parse_sweep("search.tp=[4, 8], [2]") == ("search.tp", [[4, 8], [2]])
    assert parse_sweep("workload.mix=[{prompt: 'fixed:1m', output: 'fixed:9'}]") == (
        "workload.mix",
        [[{"prompt": "fixed:1m", "output": "fixed:9"}]],
    )


def test_an_element_that_a_list_lacks_is_named() -> None:
    data = {"mix": [{"prompt": "fixed:1"}]}
    assert with_field(data, "mix.0.prompt", "fixed:2") == {"mix": [{"prompt": "fixed:2"}]}
    for path in ("mix.1.prompt", "mix.first.prompt", "mix.1"):
        with pytest.raises(ConfigError, match="is not an element of a list of 1: write 0 to 0"):
            with_field(data, path, "fixed:2")


def test_the_command_writes_the_same_bytes_twice_and_with_other_processes(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    written = []
    for name, jobs in (("a", "1"), ("b", "1"), ("c", "2")):
        out = tmp_path / name
        kinds = ("json", "csv", "trace", "requests")
        outputs = [f"--{kind}={out}.{kind}" for kind in kinds]
        assert main(["simulate", str(file), "--seeds", "0,1", "--jobs", jobs, *outputs]) == 0
        written.append([Path(f"{out}.{kind}").read_bytes() for kind in kinds])
    assert written[0] == written[1] == written[2]
    data = json.loads(written[0][0])
    assert data["schema"] == "headway.simulate/1"
    (point,) = data["points"]
    assert [run["seed"] for run in point["runs"]] == [0, 1]
    medians = [run["total"]["ttft_s"]["p50"] for run in point["runs"]]
    assert point["mean"]["total"]["ttft_s"]["p50"] == pytest.approx(sum(medians) / 2)
    assert point["ci95"]["total"]["ttft_s"]["p50"] > 0
    events = json.loads(written[0][2])["traceEvents"]
    assert {event["ph"] for event in events} >= {"M", "X", "b", "e"}


def test_schema_is_json_and_an_error_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Scenario"
    file = tmp_path / "s.yaml"
    file.write_text("workload: {qps: 1}\n")
    assert "exactly one of preset, trace and mix" in refusal(["simulate", str(file)], capsys)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_valid_and_run(file: Path) -> None:
    data = with_field(yaml.safe_load(file.read_text()), "run.window_s", 30)
    scenario = parse_scenario(data, str(file))
    assert isinstance(scenario, Scenario)
    assert run_scenario(scenario, 0).sim.records


def test_an_event_log_is_a_workload(tmp_path: Path) -> None:
    """Of the requests as they came and were answered, for a simulation with other settings or a plan."""
    file, log = tmp_path / "s.yaml", tmp_path / "run.jsonl"
    mix = [{"class": "chat", "prompt": "uniform:50-500", "output": "fixed:20"}]
    data = {"workload": {"qps": 4.0, "requests": 30, "mix": mix}}
    file.write_text(yaml.safe_dump(data))
    words = [sys.executable, "-m", "headway.cli.main", "simulate", str(file), "--jobs", "1", "--event-log", str(log)]
    subprocess.run(words, check=True, capture_output=True)
    drawn = requests_of(parse_scenario(data).workload, None, 0)
    first_s = drawn[0].arrival_s
    recorded = requests_of(parse_scenario({"workload": {"trace": str(log)}}).workload, None, 0)
    assert [(one.prompt_tokens, one.output_tokens) for one in recorded] == [
        (one.prompt_tokens, one.output_tokens) for one in drawn
    ]
    assert [one.arrival_s for one in recorded] == pytest.approx([one.arrival_s - first_s for one in drawn])
    log.write_bytes(log.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(ConfigError, match="no request of this event log was answered"):
        requests_of(parse_scenario({"workload": {"trace": str(log)}}).workload, None, 0)


def test_a_bare_number_is_a_length() -> None:
    def requests(output: object) -> object:
        scenario = {**SMALL, "workload": {"qps": 4.0, "mix": [{"prompt": "uniform:50-500", "output": output}]}}
        return parse_scenario(scenario).workload.mix

    assert requests(20) == requests("20")
