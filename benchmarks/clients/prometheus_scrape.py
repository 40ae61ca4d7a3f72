"""Prometheus itself scrapes /metrics, and answers each question that the Grafana dashboards ask."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from checks import MODEL, SCRATCH, URL, check, free_port, run_tool

ROOT = Path(__file__).resolve().parents[2]
OURS = json.loads((ROOT / "examples" / "grafana" / "headway.json").read_text())
THEIRS = json.loads((ROOT / "tests" / "server" / "vllm_dashboard.json").read_text())
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: headway
    static_configs: [{{targets: ["{target}"]}}]
"""


def ask(server: str, path: str, **parameters: str) -> dict:
    with urllib.request.urlopen(f"{server}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
        return json.load(answer)["data"]


def complete(**fields: object) -> int:
    """Send one request and return the answer's status: without traffic rates have nothing to show."""
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 8, "slo": {"ttft_ms": 1000}, **fields}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def scraped(server: str, target: str) -> bool:
    """Whether two scrapes were good: a rate needs two points."""
    try:
        up = ask(server, "query", query=f'sum_over_time(up{{instance="{target}"}}[1m])')["result"]
    except OSError:
        return False
    return bool(up) and float(up[0]["value"][1]) >= 3


target = URL.removeprefix("http://")
with urllib.request.urlopen(f"{URL}/metrics", timeout=10) as metrics:
    exposition = metrics.read()
lint = subprocess.run(
    [Path(sys.executable).parent / "promtool", "check", "metrics"], input=exposition, capture_output=True, check=False
)
# Status 3: advice on names, which vLLM's do not follow; 1: text that cannot be read.
check("promtool check metrics reads it", lint.returncode in (0, 3), f"{len(exposition.splitlines())} lines")

(SCRATCH / "prometheus.yml").write_text(CONFIG.format(target=target))
run_tool("promtool", "check", "config", str(SCRATCH / "prometheus.yml"))
port = free_port()
server = f"http://127.0.0.1:{port}"
process = subprocess.Popen(
    [
        Path(sys.executable).parent / "prometheus", f"--config.file={SCRATCH / 'prometheus.yml'}",
        f"--storage.tsdb.path={SCRATCH / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
    ],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)  # fmt: skip
try:
    until = time.monotonic() + 60
    while not scraped(server, target):
        assert process.poll() is None, "prometheus ended"
        assert time.monotonic() < until, "prometheus had not scraped the server after 60 s"
        complete()
        complete(temperature=9)
        time.sleep(0.5)
    check("the target is up", True, ask(server, "targets")["activeTargets"][0]["health"])

    asked = [target["expr"] for panel in OURS["panels"] for target in panel["targets"]]
    fill = {"$__rate_interval": "1m", "$model": MODEL}
    empty = []
    for question in asked:
        for name, value in fill.items():
            question = question.replace(name, value)
        if not ask(server, "query", query=question)["result"]:
            empty.append(question)
    check("every question of our dashboard has an answer", not empty, empty or f"{len(asked)} questions")

    there = set(ask(server, "label/__name__/values"))
    missing = {re.sub(r"_(bucket|sum|count)$", "", name) for name in set(THEIRS["metrics"]) - there}
    check(
        "metrics of vLLM's dashboard are there, but those absent from today's vLLM too",
        missing <= set(THEIRS["absent"]), f"{len(THEIRS['metrics']) - len(missing)} of {len(THEIRS['metrics'])}",
    )  # fmt: skip
finally:
    process.terminate()
    process.wait(20)
