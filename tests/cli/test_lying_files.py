"""Whatever scenario, cluster, trace and log files say, a command does its work or ends in one sentence and status 2.

Seeded changes of good files: values of another type, sign or size, fields that are left out or renamed, aliases, lines
that are cut off or repeated, rubbish. What a file asks for may take long; what precedes the simulation is bounded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.controller.test_cluster_replay import made
from tests.helpers.lies import TooMuchWorkError, bounded, changed, check_sentence, damaged
from tests.simulator_cluster.test_cluster_log import recorded

import headway.sim.build
import headway.sim.cluster.build
from headway.cli.main import main
from headway.control.log import replay
from headway.core.errors import ConfigError
from headway.core.files import read_lines

ENGINE: dict[str, Any] = {
    "name": "a", "model": "llama-3-8b", "cluster": {"accelerator": "a100-80gb", "replicas": 1},
    "layout": {"tp": 1, "stages": 1, "kvp": 1},
    "latency": {"source": "roofline", "roofline": {"linear": 0.7, "attention": 0.6, "bandwidth": 0.85}},
    "policy": {"policy": "ladder", "chunking": "adaptive", "t_target_s": 0.05, "max_num_seqs": 64},
    "workload": {
        "qps": 4.0, "requests": 12,
        "mix": [
            {"class": "chat", "share": 0.9, "prompt": "lognormal:median=600,p90=3000,max=8k", "output": "fixed:5"},
            {"class": "document", "share": 0.1, "prompt": "uniform:20k-30k", "output": "uniform:2-6"},
        ],
    },
    "slo": {"chat": {"ttft_s": 1.0, "tbt_s": 0.2}}, "run": {"window_s": 60, "seeds": [0]},
    "sweep": {"policy.policy": ["ladder"]},
}  # fmt: skip
CLUSTER: dict[str, Any] = {
    "model": "llama-3-8b", "latency": {"source": "fitted"}, "policy": {"policy": "fcfs", "chunking": "static:4096"},
    "cluster": {
        "accelerator": "a100-80gb", "placement": "pecsched", "options": {"long_replicas": "fixed", "long_sp": 2},
        "pools": [{"role": "prefill", "count": 2}, {"role": "decode", "count": 1, "kv_tokens": 400000}],
        "spans": {"source": "fast-sp"}, "backends": 4,
    },
    "workload": {"preset": "pecsched-short", "long_share": 0.1, "long_preset": "pecsched-long", "requests": 8},
    "run": {"seeds": [0]},
}  # fmt: skip
TRACED: dict[str, Any] = {
    "model": {"layers": 4, "hidden": 256, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "mlp": 512, "vocab": 1000},
    "workload": {"trace": "trace", "requests": 6, "sessions": None},
}
SERVED: dict[str, Any] = {
    "placement": "fifo", "options": {"long_tokens": 8192, "long_sp": 2}, "backends": 4,
    "pools": [{"count": 2, "role": "prefill", "serve": {"max_num_seqs": 8}}, {"count": 1, "role": "decode"}],
    "serve": {"max_model_len": "64K", "kv_cache_memory": "256M", "t_target_ms": 50},
}  # fmt: skip
TRACES: dict[str, list[dict[str, Any]]] = {
    "headway": [
        {"arrival_s": 0.5 * at, "prompt_tokens": 40 + at, "output_tokens": 3, "class": "x", "cached_tokens": 4,
         "session": "a", "think_s": 0.5} for at in range(5)
    ],
    "mooncake": [
        {"timestamp": 100 * at, "input_length": 700, "output_length": 3, "hash_ids": [0, at]} for at in range(5)
    ],
    "bailian": [
        {"chat_id": at, "parent_chat_id": -1, "timestamp": 1.5 * at, "input_length": 30, "output_length": 3,
         "type": "text", "turn": 1, "hash_ids": [1, at]} for at in range(5)
    ],
    "weka": [
        {"id": "s", "block_size": 64, "requests": [
            {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2]},
            {"t": 9.0, "type": "subagent", "agent_id": "a", "requests": [{"t": 0.5, "in": 64, "out": 2}]},
            {"t": 12.0, "type": "s", "in": 200, "out": 7, "hash_ids": [1, 2, 3], "think_time": 1.5},
        ]},
    ],
    "sharegpt": [
        {"id": "c", "conversations": [
            {"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 20}, {"from": "human", "value": "z"},
            {"from": "gpt", "value": "w" * 8},
        ]},
    ],
}  # fmt: skip


def worse(tree: Any, rng: random.Random) -> tuple[bytes, str]:
    """Return a YAML file of a tree with one or two changes, or other bytes."""
    tree, did = changed(tree, rng)
    if rng.random() < 0.3:
        tree, again = changed(tree, rng)
        did += f", {again}"
    if rng.random() < 0.1:
        # The dumper writes an alias for each repetition.
        tree["name"] = [tree] * 3 if rng.random() < 0.5 else [tree["workload"]] * 9 if "workload" in tree else [tree]
        did += ", aliases"
    data = yaml.dump(tree, sort_keys=False).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        data, again = damaged(data, rng)
        did += f", {again}"
    return data, did


def lines(rows: list[Any], rng: random.Random) -> tuple[bytes, str]:
    """Return JSON lines with some changed."""
    rows, told = list(rows), []
    for _ in range(rng.randint(0, 2)):
        at = rng.randrange(len(rows))
        rows[at], did = changed(rows[at], rng)
        told.append(f"line {at + 1}: {did}")
    draw = rng.random()
    if draw < 0.15:
        at = rng.randrange(len(rows))
        rows.insert(rng.randrange(len(rows)), rows[at])
        told.append(f"line {at + 1} again")
    elif draw < 0.3:
        at = rng.randrange(len(rows))
        del rows[at]
        told.append(f"without line {at + 1}")
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    if draw > 0.8:
        data, did = damaged(data, rng)
        told.append(did)
    return data, ", ".join(told)


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> bool:
    """Run a command; return whether it ended in one sentence."""
    status = main(words)
    said = capsys.readouterr().err.strip().splitlines()
    if status != 2:
        assert status in (0, 1)
        return False
    assert said[-1].startswith("headway: error: ")
    check_sentence(said[-1])
    return True


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Becomes non-empty when a simulation has begun, which may take as long as its file asks for."""
    found: list[bool] = []
    for module, name in ((headway.sim.build, "simulate"), (headway.sim.cluster.build, "simulate_cluster")):
        real = getattr(module, name)

        def noted(*given: Any, real: Callable[..., Any] = real, **named: Any) -> Any:
            found.append(True)
            return real(*given, **named)

        monkeypatch.setattr(module, name, noted)
    return found


def play(count: int, what: str, one: Callable[[random.Random], tuple[str, Callable[[], bool]]], least: float) -> None:
    """Try so many changes; at least a share of them has to be refused."""
    refused = 0
    for seed in range(count):
        did, go = one(random.Random(f"{what} {seed}"))
        try:
            with bounded():
                refused += go()
        except BaseException as error:
            error.add_note(f"{what} {seed}: {did}")
            raise
    assert refused >= least * count


@pytest.mark.parametrize("what", ["engine", "cluster", "traced"])
def test_scenarios(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, begun: list[bool]
) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"engine": ENGINE, "cluster": CLUSTER, "traced": TRACED}[what]
    file, trace = tmp_path / "scenario.yaml", tmp_path / "trace"

    def one(rng: random.Random) -> tuple[str, Callable[[], bool]]:
        begun.clear()
        rows = rng.choice([*TRACES.values()])
        trace.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        data, did = yaml.dump(tree).encode(), ""
        if what == "traced" and rng.random() < 0.7:
            changed_rows, did = lines(rows, rng)
            trace.write_bytes(changed_rows)
        else:
            data, did = worse(tree, rng)
        file.write_bytes(data)

        def go() -> bool:
            try:
                return run(["simulate", str(file), "--jobs", "1"], capsys)
            except TooMuchWorkError:
                assert begun
                return False

        return did, go

    play(60, what, one, 0.3)


def test_files_of_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"

    def one(rng: random.Random) -> tuple[str, Callable[[], bool]]:
        data, did = worse(SERVED, rng)
        file.write_bytes(data)
        return did, lambda: run(["cluster", str(file), "--replay", str(tmp_path / "missing")], capsys)

    play(80, "cluster file", one, 1.0)


def test_logs_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario, log = tmp_path / "scenario.yaml", tmp_path / "log"
    scenario.write_text(yaml.dump(ENGINE))
    assert main(["simulate", str(scenario), "--jobs", "1", "--event-log", str(log)]) == 0
    rows = [json.loads(line) for line in log.read_bytes().splitlines()]
    name = next(row["request"] for row in rows if row.get("event") == "add")
    scenario.write_text(yaml.dump({**TRACED, "workload": {"trace": str(log)}}))
    commands = (["trace", str(log), "--out", str(tmp_path / "out")], ["why", name, "--log", str(log)])

    def one(rng: random.Random) -> tuple[str, Callable[[], bool]]:
        data, did = lines(rows, rng)
        log.write_bytes(data)
        return did, lambda: min(*(run(list(words), capsys) for words in commands))

    play(50, "log", one, 0.1)


def test_logs_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    recorded("tetris", log)
    rows = [json.loads(line) for line in log.read_bytes().splitlines()]
    name = next(row["of"][1]["request"]["id"] for row in rows if row.get("of", "  ")[0] == "RequestArrived")
    commands = (["trace", str(log), "--out", str(tmp_path / "out")], ["why", name, "--log", str(log)])

    def again() -> bool:
        try:
            replay(read_lines(log), lambda about: made("tetris"))
        except ConfigError as error:
            check_sentence(str(error))
            return True
        return False

    def one(rng: random.Random) -> tuple[str, Callable[[], bool]]:
        data, did = lines(rows, rng)
        log.write_bytes(data)
        return did, lambda: min(again(), *(run(list(words), capsys) for words in commands))

    play(30, "cluster log", one, 0.1)
