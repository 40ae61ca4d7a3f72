"""`headway plan` as typed: tables, files, resuming, and what it says of bad questions."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.refusals import refusal

from headway.cli.main import main
from headway.core.settings import resolve
from headway.planning.answer import cluster_data, read_measures
from headway.planning.question import DeploymentCandidate, candidates_of, parse_question, question_data
from headway.runtime.cluster.cluster_file import cluster_file
from headway.runtime.embedded import model_path
from headway.serving.serve_settings import ServeSettings, instance_configs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "plan"
QUESTION: dict[str, Any] = {
    "model": "llama-3-8b",
    "accelerators": [{"name": "a100-80gb", "most": 2}],
    "workload": {"qps": 2, "requests": 30, "mix": [{"class": "chat", "prompt": "fixed:500", "output": "fixed:20"}]},
    "demands": {"chat": {"ttft_p99_s": 0.5, "tbt_p99_s": 0.1}},
    "latency": {"source": "roofline"},
    "search": {"tp": [1, 2], "stages": [1], "t_target_s": [0.05]},
}


def write(folder: Path, **changes: Any) -> str:
    path = folder / "question.yaml"
    path.write_text(yaml.safe_dump(QUESTION | changes, sort_keys=False))
    return str(path)


def test_plan_prints_the_cheapest_plan_and_its_margins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", write(tmp_path), "--jobs", "1"]) == 0
    shown = capsys.readouterr().out
    assert "Cheapest plan: 1 × tp1, ladder, 50 ms on 1 × a100-80gb (cost in accelerators: 1)" in " ".join(shown.split())
    assert "chat TTFT P99" in shown
    assert "not measured" in shown
    priced = write(tmp_path, accelerators=[{"name": "a100-80gb", "most": 2, "cost": 2.5}])
    assert main(["plan", priced, "--jobs", "1"]) == 0
    assert "(cost in accelerators × their cost: 2.5)" in " ".join(capsys.readouterr().out.split())


FLAGS = ["plan", "--model", "llama-3-8b", "--gpu", "h200", "--qps", "3"]


def test_flags_are_the_question_that_a_file_asks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "workload.requests=40", "--set", "search={tp: [1], stages: [1], t_target_s: [0.1]}", "--json"]
    mix = ["--mix", "chat:0.98,document:0.02", "--ttft-ms", "chat:2500,document:300000"]
    assert main([*FLAGS, *mix, *small, "--jobs", "1"]) == 0
    by_flags = json.loads(capsys.readouterr().out)
    assert by_flags["question"]["demands"] == {
        "chat": {"ttft_p90_s": 2.5, "tbt_p99_s": 0.2}, "document": {"ttft_p90_s": 300.0},
    }  # fmt: skip
    assert by_flags["cost_unit"] == "accelerators"
    assert by_flags["best"]["cost"] == by_flags["best"]["accelerators"]
    path = tmp_path / "question.yaml"
    path.write_text(yaml.safe_dump(question_data("llama-3-8b", "h200", "3", mix[1], mix[3]), sort_keys=False))
    assert main(["plan", str(path), *small, "--jobs", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == by_flags


def test_a_limit_without_a_kind_is_that_of_the_first() -> None:
    question = parse_question(question_data("llama-3-8b", "h200", "3", "document:0.1,chat:0.9", "60000"))
    assert question.demands == {"document": {"ttft_p90_s": 60.0}, "chat": {"ttft_p90_s": 1.0, "tbt_p99_s": 0.2}}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan"], "name a question file (such as examples/plan-chat-and-documents.yaml), or give --model, --gpu and"),
        ([*FLAGS[:-2]], "or give --model, --gpu and --qps"),
        (["plan", "q.yaml", "--qps", "2"], "q.yaml is a whole question: change it with --set"),
        (
            [*FLAGS, "--mix", "chats:1"],
            "--mix 'chats:1': write KIND:NUMBER,KIND:NUMBER, where KIND is chat or",
        ),
        ([*FLAGS, "--mix", "chat:1,chat:2"], "each once"),
        ([*FLAGS, "--mix", "chat:-1"], "--mix 'chat:-1': -1 is not above 0"),
        ([*FLAGS[:-1], "many"], "--qps: 'many' is not a number\n"),
        ([*FLAGS, "--ttft-ms", "soon"], "--ttft-ms 'soon': 'soon' is not a number\n"),
        (
            [*FLAGS, "--ttft-ms", "document:5"],
            "--ttft-ms 'document:5': write KIND:NUMBER,KIND:NUMBER, where KIND is chat,",
        ),
        (
            [*FLAGS, "--set", "workload.requests=many"],
            "workload.requests: 'many' is not a number of tokens such as 8192, 128K (131,072) or",
        ),
        ([*FLAGS[:4], "h1000", *FLAGS[5:]], "unknown accelerator 'h1000'"),
    ],
)
def test_faulty_flags_are_said_in_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(words, capsys)


@pytest.mark.parametrize(
    ("qps", "mix", "requests"),
    [("10", "chat:1", 800), ("3", "chat:0.95,document:0.05", 800), ("1", "chat:9,document:1", 480),
     ("0.1", "document:1", 48), ("0.01", "document:1", 40)],
)  # fmt: skip
def test_fewer_requests_are_drawn_where_they_have_enough_documents(qps: str, mix: str, requests: int) -> None:
    assert question_data("llama-3-8b", "h200", qps, mix, None)["workload"]["requests"] == requests


def test_a_load_that_nothing_keeps_up_with_says_what_can_be_kept_up_with(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--set", "workload.requests=80", "--set", "accelerators.0.most=1", "--jobs", "1"]
    assert main(["plan", "--model", "llama-3-8b", "--gpu", "a100", "--qps", "0.2", "--mix", "document:1", *small]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    share = re.search(r"No plan keeps up. The nearest is 1 × tp1, .* it keeps up with (\d+)% of what arrives", shown)
    assert share is not None
    assert 3 < int(share[1]) < 12


def test_plan_writes_a_scenario_that_gives_the_same_figures_and_a_script_that_a_shell_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(tmp_path), "--jobs", "1", "--out", str(tmp_path / "out")]) == 0
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    capsys.readouterr()
    assert main(["simulate", str(tmp_path / "out/scenario.yaml"), "--json", "-", "--jobs", "1"]) == 0
    simulated = json.loads(capsys.readouterr().out)["points"][0]["mean"]["classes"][0]
    ttft, tbt = (demand["worst_s"] for demand in plan["best"]["demands"])
    assert (simulated["ttft_s"]["p99"], simulated["tbt_s"]["p99"]) == (ttft, tbt)
    script = tmp_path / "out/serve.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)
    assert "--scheduler-cls headway.vllm.Scheduler" in script.read_text()


@pytest.mark.long
@pytest.mark.parametrize(("replicas", "decoders"), [(2, 0), (1, 1)])
def test_cluster_file_of_a_plan_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], replicas: int, decoders: int
) -> None:
    candidate = DeploymentCandidate("a100-80gb", 1, 1, 1, replicas, decoders, "lars", 0.05)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster_data(candidate)))
    assert main(["cluster", str(path), "--dry-run", "--kv-cache-memory", "64M", "--max-model-len", "4K"]) == 0
    assert ("2 x mixed" if not decoders else "decode") in capsys.readouterr().out


def test_cluster_file_of_instances_with_stages_is_read() -> None:
    whole = cluster_data(DeploymentCandidate("a100-80gb", 2, 2, 1, 3, 0, "lars", 0.05))
    file = cluster_file(whole, "cluster.yaml")
    settings = resolve(ServeSettings, file=file.serve, origin="cluster.yaml: serve")
    engines = instance_configs(file, "cluster.yaml", "a-model", settings)
    assert [engine.pipeline_parallel_size for engine in engines] == [2, 2, 2]


def test_impossible_demands_exit_with_one_and_name_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(tmp_path), "--set", "demands.chat.ttft_p99_s=0.001", "--jobs", "1"]) == 1
    assert "No plan meets all demands. The nearest is" in capsys.readouterr().out


def test_search_that_was_broken_off_goes_on_from_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question, kept = write(tmp_path), tmp_path / "kept.jsonl"
    assert main(["plan", question, "--jobs", "1", "--json", "--resume", str(kept)]) == 0
    whole, lines = capsys.readouterr().out, kept.read_text().splitlines()
    # the last line was cut off in its midst
    kept.write_text("\n".join([*lines[:-1], lines[-1][:20]]))
    assert len(read_measures(kept, parse_question(QUESTION))) == len(lines) - 2
    assert main(["plan", question, "--jobs", "1", "--json", "--resume", str(kept)]) == 0
    assert capsys.readouterr().out == whole
    assert kept.read_text().splitlines() == lines


def test_results_of_another_question_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.jsonl"
    assert main(["plan", write(tmp_path), "--jobs", "1", "--resume", str(kept)]) == 0
    assert main(["plan", write(tmp_path), "--set", "workload.qps=3", "--jobs", "1", "--resume", str(kept)]) == 2
    assert "results of another question" in capsys.readouterr().err
    kept.write_text("a list of mine")
    assert main(["plan", write(tmp_path), "--jobs", "1", "--resume", str(kept)]) == 2
    assert "line 1 is not JSON: not a file of `headway plan --resume`" in capsys.readouterr().err
    assert kept.read_text() == "a list of mine"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"demands": {}}, "`demands` is empty"),
        ({"demands": {"chat": {"ttft_s": 1}}}, "write METRIC_pNN_s"),
        ({"accelerators": [{"name": "h1000"}]}, "unknown accelerator 'h1000'"),
        ({"accelerators": []}, "accelerators must have at least 1 entry"),
        ({"latency": {"source": "table", "file": "t.json"}}, "a measured table holds for one layout"),
        ({"search": {"policies": []}}, "search.policies must have at least 1 entry"),
        ({"search": {"t_target_s": []}}, "search.t_target_s must have at least 1 entry"),
        ({"seeds": [-1]}, "seeds[0] must be at least 0, not -1"),
        ({"seeds": [1, 1]}, "seeds: give each seed once"),
        ({"search": {"tp": [64]}}, "no layout of `search` fits"),
        ({"replicas": 3}, "replicas is not a field"),
    ],
)
def test_bad_question_is_one_line_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert message in refusal(["plan", write(tmp_path, **changes), "--jobs", "1"], capsys)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_questions_are_answered(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(path), "--jobs", "1", "--json", "--set", "search.t_target_s=[0.1]"]
    # enough that a document is among them
    requests = 200 if "documents" in path.stem else 2
    assert main([*words, "--set", f"workload.requests={requests}", "--set", "search.kvp=[1]"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["demands"]


def test_shard_tokens_of_a_question_are_those_of_layouts_with_kv_groups() -> None:
    question = parse_question(QUESTION | {"search": {"tp": [1], "kvp": [1, 2], "shard_tokens": 4096}})
    layouts = [c.scenario(question).layout for c in candidates_of(question) if not c.decoders]
    assert {(each.kvp, each.shard_tokens) for each in layouts} == {(1, None), (2, 4096)}


def test_a_model_is_named_by_the_path_of_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(model_path())
    assert main(["plan", write(tmp_path, model=folder), "--jobs", "1"]) == 0
    by_folder = capsys.readouterr().out
    assert main(["plan", write(tmp_path, model=f"{folder}/config.json"), "--jobs", "1"]) == 0
    assert capsys.readouterr().out == by_folder
    (tmp_path / "broken.json").write_text("[")
    assert main(["plan", write(tmp_path, model=str(tmp_path / "broken.json")), "--jobs", "1"]) == 2
    assert "broken.json: cannot be read as JSON" in capsys.readouterr().err
