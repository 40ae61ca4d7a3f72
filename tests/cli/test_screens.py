"""What commands print on a terminal of 80 columns, in UTF-8 and in ASCII: a sentence first, and no wide line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from tests.cli.test_command_line import headway

from headway.cli.command_parser import fitting

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = """
name: two lengths
model: llama-3-8b
cluster: {accelerator: a100-80gb}
latency: {source: roofline}
workload:
  qps: 1.0
  mix:
    - {class: chat, share: 0.9, prompt: "uniform:500-700", output: "uniform:10-20"}
    - {class: document, share: 0.1, prompt: "uniform:20K-30K", output: "uniform:10-20"}
slo: {chat: {ttft_s: 0.2}}
run: {window_s: 60, seeds: [0, 1]}
"""
SENTENCES = {
    ("simulate", "FILE"): r"two lengths: time to first token, median: chat \d+ ms \(P99 .*\), document .* of chat",
    ("simulate", "FILE", "--sweep", "policy.policy=fcfs,ladder"): r"[\d.]+% of chat in their SLO with policy \w+, ",
    ("simulate", "FILE", "--sweep", "workload.qps=0.5,1"): r"highest goodput: [\d.]+ requests/s, at qps 1",
    ("compare", "FILE", "--set", "run.window_s=20"): r"[\d.]+% of chat in their SLO with policy \w+, ",
    ("reproduce", "medha.worked-example"): r"\d+ of \d+ rows hold, ",
    ("reproduce", "medha"): r"\d+ claims, each once: \d+ hold",
    ("reproduce", "--list"): "id +cost",
    ("accel", "stage"): r"[\d.]+ ms an iteration with prefetch, [\d.]+ ms packed without",
    (
        "accel",
        "serve",
        "--qps",
        "2",
        "--set",
        "serve.requests=40",
    ): "2 requests a second are served within ",
    ("accel", "sweep", "--axis", "stage.kv_tokens=32K,64K", "--axis", "machine.prefetch_buffer=0,64M"): "fastest with ",
    (
        "accel",
        "capacity",
        "--set",
        "serve.requests=40",
        "--ratio",
        "1.2",
    ): r"within the limits: [\d.]+ requests ",
    ("doctor",): ". headway ",
    ("serve", "--dry-run"): "model +headway-embedded",
    ("examples",): "accel/paper.yaml +Case study 1",
}


@pytest.mark.parametrize(
    ("words", "encoding"),
    [*((words, "ascii") for words in SENTENCES), (("simulate", "FILE"), "utf-8"), (("doctor",), "utf-8")],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_a_command_begins_with_what_was_asked_and_fits_80_columns(
    tmp_path: Path, words: tuple[str, ...], encoding: str
) -> None:
    file = tmp_path / "two-lengths.yaml"
    file.write_text(SCENARIO)
    given = [str(file) if word == "FILE" else word for word in words]
    given += ["--jobs", "1"] * (words[0] in ("simulate", "compare"))
    done = headway(*given, COLUMNS="80", PYTHONIOENCODING=encoding, NO_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.replace(str(file), "FILE").splitlines()
    assert re.match(SENTENCES[words], " ".join(lines[:2]))
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in done.stdout
    assert done.stdout.isascii() or encoding == "utf-8"


def test_a_file_s_own_sweep_runs_unless_its_field_is_set_or_another_is_swept(tmp_path: Path) -> None:
    file = tmp_path / "two-lengths.yaml"
    file.write_text(SCENARIO + "sweep: {policy.policy: [ladder, fcfs]}\n")
    rows = {
        (): ["ladder", "fcfs"],
        ("--set", "policy.policy=lars"): [],
        ("--sweep", "policy.policy=lars,edf"): ["lars", "edf"],
    }
    for words, policies in rows.items():
        given = ("simulate", str(file), "--set", "run.window_s=9", "--jobs", "1", *words)
        lines = headway(*given, COLUMNS="80").stdout.splitlines()
        assert [line.split()[0] for line in lines if " chat  " in line and line.split()[0] != "chat"] == policies


def test_the_slowest_request_comes_last_with_the_command_that_explains_it(tmp_path: Path) -> None:
    file, log = tmp_path / "two-lengths.yaml", tmp_path / "events.jsonl"
    file.write_text(SCENARIO)
    said = " ".join(headway("simulate", str(file), "--event-log", str(log), COLUMNS="80").stdout.split())
    found = re.search(
        r"slowest: (\w+) (\w+), .* prompt tokens: first token after .* headway (why \w+ --log \S+)$", said
    )
    assert found is not None
    assert found[1] == "document"
    told = headway(*found[3].split(), COLUMNS="80")
    assert told.returncode == 0
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert told.stdout.startswith(f"{found[2]}: prompt of ")


def test_lines_of_a_terminal_go_on_below_their_last_column_and_piped_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "KV cache      2 GiB for two million tokens, in blocks\nwarning: instances take turns on two cores here"
    monkeypatch.setenv("COLUMNS", "40")
    assert fitting(text).splitlines() == [
        "KV cache      2 GiB for two million",
        "              tokens, in blocks",
        "warning: instances take turns on two",
        "cores here",
    ]
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("shutil.get_terminal_size", lambda fallback: os.terminal_size(fallback))
    assert fitting(text) == text
