"""`headway cluster` as its users meet it: real engines, one endpoint, one of them killed."""

from __future__ import annotations

import os
import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from http_probe import metric, token_ids
from test_serving import Reference, prompt_of
from test_serving_failures import children

from checkpoints import make_tiny
from headway.bench.server_process import ServerProcess
from headway.cli.main import main

CLUSTER = (sys.executable, "-m", "headway.cli.main", "cluster")
FILE = """
model: {model}
placement: {placement}
options: {options}
pools:
  - {{count: 2, serve: {{max_num_seqs: 8}}}}
serve: {{kv_cache_memory: 32M, latency_profile: quick}}
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("cluster-llama"), max_position_embeddings=4096)


PROMPTS = [prompt_of(seed, length) for seed, length in enumerate((1500, 20, 3, 700, 60, 333))]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    reference = Reference(llama)
    return [reference.tokens(prompt, 30) for prompt in PROMPTS]


def write(folder: Path, llama: Path, placement: str, options: str) -> str:
    path = folder / "cluster.yaml"
    path.write_text(FILE.format(model=os.path.relpath(llama, folder), placement=placement, options=options))
    return str(path)


@pytest.mark.parametrize(("placement", "options"), [("jsq", "{}"), ("fifo", "{long_tokens: 500}")])
def test_greedy_tokens_equal_transformers_though_an_engine_is_killed(
    tmp_path: Path, llama: Path, expected: list[list[int]], placement: str, options: str
) -> None:
    with ServerProcess([write(tmp_path, llama, placement, options)], command=CLUSTER) as running:
        assert running._process is not None
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            futures = [pool.submit(token_ids, running.url, p, 30, ignore_eos=True) for p in PROMPTS]
            os.kill(children(running._process.pid)[0], signal.SIGKILL)
            answers = [future.result() for future in futures]
        assert answers == expected
        assert metric(running.url, "headway_engine_restarts_total") >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools: []", "pools is empty"),
        ("pools: [{count: 0}]", r"pools\[0\].count must be between"),
        ("pools: [{role: prefill}]", "simulated only so far"),
        ("pools: [{}]\nplacement: tetris", "simulated only so far"),
        ("pools: [{}]\nplacement: nope", "unknown placement 'nope'"),
        ("pools: [{}]\nplacement: fifo\noptions: {long_sp: 4}", "must be 1"),
        ("pools: [{}]\nplacement: fifo\noptions: {colour: red}", "unknown field `colour`"),
        ("pools: [{serve: {portt: 1}}]", "unknown setting 'portt'"),
        ("pools: [{}]\nnodes: 3", "unknown field `nodes`"),
        ("pools: [{}]\nmodel: ./nowhere", "is not a folder"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    assert main(["cluster", str(path)]) == 2
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.count("\n") == 1


def test_a_dry_run_says_what_fits(tmp_path: Path, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", write(tmp_path, llama, "jsq", "{}"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "jsq, 2 instances" in out
    assert "longest context      4,096 tokens" in out
