"""What one server does on this machine: start-up, memory, a short alone, and the share of time spent on scheduling.

python -m benchmarks.serving --model out/reference
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headway.serving.load.convoy import ServerProcess


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


def first_token_s(url: str, body: dict[str, Any]) -> float:
    """Seconds until the first data event of a stream."""
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    begun = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        while not answer.readline().startswith(b"data: "):
            pass
        seconds = time.perf_counter() - begun
        answer.read()
    return seconds


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


def resident_mib(pid: int) -> float:
    """Memory of a process and all below it; pages that they share count once (PSS)."""
    sizes = dict(line.split()[:2] for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(sizes["Pss:"]) / 1024 + sum(resident_mib(int(child)) for child in children)


def start_to_first_token(model: list[str], prompt: list[int]) -> float:
    """Seconds from starting the command to the first token of a first request."""
    begun = time.perf_counter()
    with ServerProcess(model) as server:
        post(server.url, {"model": name_of(server.url), "prompt": prompt, "max_tokens": 1, "ignore_eos": True})
        return time.perf_counter() - begun


def name_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


def main() -> int:
    parser = argparse.ArgumentParser(description="Start-up, memory, a short alone, scheduling share.")
    parser.add_argument("--model", default="out/reference")
    parser.add_argument("--repeat", type=int, default=20)
    a = parser.parse_args()
    if not Path(a.model).is_dir():
        subprocess.run([sys.executable, "scripts/make_checkpoint.py", "--out", a.model], check=True)
    starts = [start_to_first_token([], [5, 6, 7]) for _ in range(3)]
    print(f"start to first token, embedded model: median {statistics.median(starts):.2f} s of {len(starts)}")
    with ServerProcess([a.model, "--max-model-len", "64K"]) as server:
        url, name = server.url, name_of(server.url)
        short = {"model": name, "prompt": [2 + i * 37 % 4000 for i in range(200)], "ignore_eos": True, "max_tokens": 16}
        one = {**short, "max_tokens": 1}
        iterations0, busy0 = metric(url, "headway_iterations_total"), metric(url, "headway_busy_seconds_total")
        alone = [first_token_s(url, one) for _ in range(a.repeat)]
        iterations = metric(url, "headway_iterations_total") - iterations0
        busy = (metric(url, "headway_busy_seconds_total") - busy0) / a.repeat
        print(f"a short (200 in) alone, time to first token: median {statistics.median(alone) * 1e3:.1f} ms, "
              f"min {min(alone) * 1e3:.1f}; {iterations / a.repeat:.2f} iterations each, TTFT is "
              f"{statistics.mean(alone) / busy:.2f} times their time")  # fmt: skip
        assert server._process is not None
        pid = server._process.pid
        kv_per_token = 2 * 8 * 2 * 64 * 2
        idle = resident_mib(pid)
        post(url, {**short, "prompt": [2 + i % 4000 for i in range(16384)], "max_tokens": 1})
        used = resident_mib(pid)
        weights = Path(a.model, "model.safetensors").stat().st_size / 2**20
        kv = 16384 * kv_per_token / 2**20
        print(f"resident: {idle:.0f} MiB idle, {used:.0f} MiB after a 16K prompt (weights {weights:.0f}, KV {kv:.0f}): "
              f"{used - weights - kv:.0f} MiB beyond weights and KV")  # fmt: skip
        busy0, plan0 = metric(url, "headway_busy_seconds_total"), metric(url, "headway_schedule_seconds_total")
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda _: post(url, {**short, "max_tokens": 200}), range(64)))
        busy = metric(url, "headway_busy_seconds_total") - busy0
        plan = metric(url, "headway_schedule_seconds_total") - plan0
        print(f"scheduling at 64 running decodes: {plan / (busy + plan):.2%} of iteration time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
