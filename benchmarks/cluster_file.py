"""A convoy on a live cluster beside the simulation of its cluster file: `python -m benchmarks.cluster_file [--runs 3]`.

Two instances of the embedded model, one thread each, join-shortest-queue; a chat each second, and a document every
fifteen. Profiles the machine (`headway profile`) for the file's `latency_profile`, simulates the file as it stands,
then starts the cluster and sends it the same requests with `headway bench`, and prints served and simulated times. How
much of a difference is the machine's: several runs say that, and how many times its predictions each instance's
iterations took.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.plan_truth import drift
from headway.cli.main import main as headway
from headway.serving.load.machine import machine
from headway.serving.load.server_process import ServerProcess
from headway.sim.replay import read_log, replay

COMMAND = (sys.executable, "-m", "headway.cli.main")
ROWS = {"chat": (("ttft_s", ("p50", "p90", "p99")), ("tbt_s", ("p50", "p90"))),
        "document": (("ttft_s", ("p50",)), ("e2e_s", ("p50",)))}  # fmt: skip
CHAT, DOCUMENT, OUTPUT = 500, 30_000, 16
"""Tokens of prompts and outputs."""
EVERY_S = 15
"""Seconds from one document to the next; a chat comes each second."""


def write_file(folder: Path, table: Path) -> Path:
    """Write the cluster file, and return its path."""
    file = folder / "cluster.yaml"
    serve = {
        "max_model_len": "32k", "kv_cache_memory": "512M", "threads": 1, "prefix_cache": False,
        "latency_profile": str(table), "event_log": str(folder / "log"),
    }  # fmt: skip
    data = {"placement": "jsq", "pools": [{"count": 2}], "serve": serve, "workload": {"trace": "requests.jsonl"}}
    file.write_text(yaml.safe_dump(data))
    return file


def write_requests(path: Path, seconds: int) -> None:
    """Write the arrivals: a chat each second, a document in the midst of the first of every `EVERY_S` of them."""
    chats = [(float(at_s), CHAT, "chat") for at_s in range(seconds)]
    documents = [(at_s + 0.5, DOCUMENT, "document") for at_s in range(0, seconds, EVERY_S)]
    rows = (
        {"arrival_s": at_s, "prompt_tokens": tokens, "output_tokens": OUTPUT, "class": klass}
        for at_s, tokens, klass in sorted(chats + documents)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def simulated(file: Path) -> dict[str, Any]:
    """Return the simulation's result of each class."""
    command = (*COMMAND, "simulate", str(file), "--json", "-")
    data = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {block["class"]: block for block in data["points"][0]["runs"][0]["classes"]}


def served(file: Path, trace: Path, out: Path) -> dict[str, Any]:
    """Return what the clients of the live cluster measured, by class."""
    with ServerProcess([str(file)], command=(*COMMAND, "cluster")) as server:
        command = (*COMMAND, "bench", "--url", server.url, "--trace", str(trace), "--json", str(out))
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return {block["class"]: block for block in json.loads(out.read_text())["summary"]["classes"]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Served and simulated times of a convoy on one cluster file.")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=45, help="of arrivals")
    parser.add_argument("--budget", default="15", help="seconds of the profile")
    parser.add_argument("--serve-for", default="20", help="seconds of serving that the profile is corrected by")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep profile and logs there, and use what is there"
    )
    a = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = (a.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        table, trace = folder / "table.json", folder / "requests.jsonl"
        wanted = ["--budget", a.budget, "--serve-for", a.serve_for, "--threads", "1", "--out", str(table)]
        if not table.exists() and headway(["profile", *wanted]):
            return 1
        file = write_file(folder, table)
        write_requests(trace, a.seconds)
        ours = simulated(file)
        for number in range(a.runs):
            live = served(file, trace, folder / "live.json")
            for klass, metrics in ROWS.items():
                for metric, percentile in ((metric, each) for metric, percentiles in metrics for each in percentiles):
                    told, was = ours[klass][metric][percentile], live[klass][metric][percentile]
                    print(f"run {number}: {klass:<8} {metric:<6} {percentile} simulated {told * 1e3:8.1f} ms, "
                          f"served {was * 1e3:8.1f} ms ({told / was - 1:+.1%})")  # fmt: skip
            logs = [replay(read_log(folder / f"log.{instance}")) for instance in range(2)]
            print(f"run {number}: iterations over predictions: {'; '.join(map(drift, logs))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
